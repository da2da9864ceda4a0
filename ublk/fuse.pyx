"""The FUSE front end: a mounted directory with one file per image."""

from libc.errno cimport EACCES, EBUSY, EEXIST, ENOENT
from libc.stdint cimport uint64_t
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
        uint64_t ino
        uint64_t made_at
    enum:
        FUSE_FRONT_KEPT
    int fuse_front_start(const char *directory, const char *record, const int *kept, unsigned kept_count, fuse_front **)
    int fuse_front_serve(fuse_front *)
    bint fuse_front_resumed(const fuse_front *)
    void fuse_front_id(const fuse_front *, uint64_t *)
    unsigned fuse_front_descriptors(const fuse_front *, int *)
    int fuse_front_add(fuse_front *, const fuse_image *, uint64_t *ino)
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
    """Mounted from construction to `close`. Every image that is added is kept alive until it is removed.

    `record` is a file for what must outlive this process. `kept` are the `descriptors` of a mount whose server has died:
    if its connection is still alive, it goes on (`resumed`), with the images that are added under their old inodes
    before `serve`. They stay the caller's.
    """

    cdef fuse_front *_front
    cdef dict _images
    cdef readonly str directory

    def __cinit__(self, directory, record, kept=()):
        cdef bytes path = os.fsencode(directory), record_path = os.fsencode(record)
        cdef const char *c_path = path
        cdef const char *c_record = record_path
        cdef int[FUSE_FRONT_KEPT] fds
        cdef unsigned count = 0
        cdef int rc
        for fd in list(kept)[:FUSE_FRONT_KEPT]:
            fds[count] = fd
            count += 1
        self._images = {}
        self.directory = os.fspath(directory)
        with nogil:
            rc = fuse_front_start(c_path, c_record, fds, count, &self._front)
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

    @property
    def is_open(self):
        return self._front is not NULL

    def serve(self):
        """Begin to answer requests; first those that a dead server has read and not answered."""
        self._check_open()
        check(fuse_front_serve(self._front), self.directory)

    @property
    def resumed(self):
        """This is the connection of an earlier server: whoever had a file open has it still."""
        self._check_open()
        return fuse_front_resumed(self._front)

    @property
    def connection_id(self):
        """Names the connection to the kernel: open files survive as long as it stays the same."""
        self._check_open()
        cdef uint64_t[2] number
        fuse_front_id(self._front, number)
        return f"{number[0]:016x}{number[1]:016x}"

    @property
    def descriptors(self):
        """What another process must hold so that open files survive the death of this one."""
        self._check_open()
        cdef int[FUSE_FRONT_KEPT] fds
        cdef unsigned count = fuse_front_descriptors(self._front, fds)
        return [fds[i] for i in range(count)]

    def add(self, str name, Image image not None, *, bint cached, uid_t uid=0, gid_t gid=0, mode_t mode=0o600,
            uint64_t ino=0, uint64_t made_at=0):
        """Show `image` as file `name`; gives its inode. `cached`: its pages stay in the page cache and are shared by
        all who map it. `ino` and `made_at` (nanoseconds since 1970) are those it had before a restart."""
        self._check_open()
        if not name or "/" in name or "\0" in name or name in (".", "..") or len(os.fsencode(name)) > 255:
            raise InvalidInputError("name", f"{name!r} cannot be the name of a file")
        cdef bytes c_name = os.fsencode(name)
        cdef uint64_t given = 0
        cdef fuse_image description = fuse_image(c_name, image.device(), cached, uid, gid, mode, ino, made_at)
        check(fuse_front_add(self._front, &description, &given), name)
        self._images[name] = image
        return given

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
