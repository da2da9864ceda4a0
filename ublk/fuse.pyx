"""The FUSE front end: a mounted directory with one file per image."""

from libc.errno cimport EACCES, EBUSY, EEXIST, ENOENT
from posix.types cimport gid_t, mode_t, uid_t

from aenv._native.lsmt cimport Image, block_device

import os

from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError


cdef extern from "c_fuse.h" nogil:
    struct fuse_front
    struct fuse_image:
        const char *name
        block_device *device
        bint cached
        uid_t uid
        gid_t gid
        mode_t mode
    int fuse_front_start(const char *directory, fuse_front **)
    int fuse_front_add(fuse_front *, const fuse_image *)
    int fuse_front_remove(fuse_front *, const char *name, unsigned patience)
    int fuse_front_opens(fuse_front *, const char *name)
    int fuse_front_resized(fuse_front *, const char *name)
    void fuse_front_stop(fuse_front *)


cdef int check(int rc, str name) except? -1:
    if rc >= 0:
        return rc
    if rc == -ENOENT:
        raise NotFoundError(f"{name}: no such image")
    if rc == -EBUSY:
        raise ConflictError(f"{name}: is in use")
    if rc == -EEXIST:
        raise ConflictError(f"{name}: exists")
    raise UnavailableError(f"{name}: {os.strerror(-rc)}")


cdef class Mount:
    """Mounted from construction to `close`. Every image that is added is kept alive until it is removed."""

    cdef fuse_front *_front
    cdef dict _images
    cdef readonly str directory

    def __cinit__(self, directory):
        cdef bytes path = os.fsencode(directory)
        cdef const char *c_path = path
        cdef int rc
        self._images = {}
        self.directory = os.fspath(directory)
        with nogil:
            rc = fuse_front_start(c_path, &self._front)
        if rc:
            self._front = NULL
            if rc == -EACCES:
                raise UnavailableError(f"{self.directory}: FUSE cannot be mounted", hint="it needs root and /dev/fuse")
            check(rc, self.directory)

    def __dealloc__(self):
        if self._front is not NULL:
            fuse_front_stop(self._front)

    cdef int _check_open(self) except -1:
        if self._front is NULL:
            raise ConflictError("the mount is closed")
        return 0

    def close(self):
        """Unmount and wait for all requests. Whoever has a file open gets errors from then on."""
        if self._front is NULL:
            return
        cdef fuse_front *front = self._front
        self._front = NULL
        with nogil:
            fuse_front_stop(front)
        self._images.clear()

    def add(self, str name, Image image not None, *, bint cached, uid_t uid=0, gid_t gid=0, mode_t mode=0o600):
        """Show `image` as file `name`. `cached`: its pages stay in the page cache and are shared by all who map it."""
        self._check_open()
        if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 255:
            raise InvalidInputError("name", f"{name!r} cannot be the name of a file")
        cdef bytes c_name = os.fsencode(name)
        cdef fuse_image description = fuse_image(c_name, image.device(), cached, uid, gid, mode)
        check(fuse_front_add(self._front, &description), name)
        self._images[name] = image

    def remove(self, str name, unsigned patience=500):
        """Raises ConflictError if somebody has the file open, still after `patience` milliseconds."""
        self._check_open()
        cdef bytes encoded = os.fsencode(name)
        cdef const char *c_name = encoded
        cdef int rc
        with nogil:
            rc = fuse_front_remove(self._front, c_name, patience)
        check(rc, name)
        del self._images[name]

    def opens(self, str name):
        """How many file descriptions of the file are open."""
        self._check_open()
        return check(fuse_front_opens(self._front, os.fsencode(name)), name)

    def resized(self, str name):
        """Tell the kernel that the image's size has changed."""
        self._check_open()
        cdef bytes encoded = os.fsencode(name)
        cdef const char *c_name = encoded
        cdef int rc
        with nogil:
            rc = fuse_front_resized(self._front, c_name)
        check(rc, name)
