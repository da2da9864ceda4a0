"""The ublk front end: images as block devices /dev/ublkbN."""

from libc.errno cimport EACCES, ENODEV, ENOENT, ENXIO, EOPNOTSUPP, EPERM
from libc.stdint cimport uint32_t, uint64_t

from aenv._native.lsmt cimport Image, block_device

import os
from typing import NamedTuple

from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError


cdef extern from "c_device_uapi.h":
    uint64_t UBLK_F_UPDATE_SIZE


cdef extern from "c_device.h" nogil:
    struct ublk_front
    struct ublk_device
    struct ublk_options:
        unsigned queues, depth
        uint64_t owner
    struct ublk_found:
        uint32_t number
        unsigned state
    int ublk_front_open(const ublk_options *, ublk_front **)
    void ublk_front_close(ublk_front *)
    uint64_t ublk_front_features(const ublk_front *)
    int ublk_device_prepare(ublk_front *, ublk_device **)
    int ublk_device_start(ublk_device *, block_device *image)
    int ublk_device_recover(ublk_front *, uint32_t number, block_device *image, ublk_device **)
    int ublk_device_resize(ublk_device *)
    void ublk_device_remove(ublk_device *)
    uint32_t ublk_device_number(const ublk_device *)
    int ublk_front_find(ublk_front *, uint32_t number, ublk_found *)
    int ublk_front_delete(ublk_front *, uint32_t number)


class Found(NamedTuple):
    """A device of ours that the kernel knows. `orphan`: its server was killed, and it waits for the next one."""

    number: int
    orphan: bool


cdef int check(int rc, str what) except? -1:
    if rc >= 0:
        return rc
    if rc == -ENODEV:
        raise NotFoundError(f"{what}: no such device")
    if rc == -EOPNOTSUPP:
        raise UnavailableError(f"{what}: this kernel's ublk cannot do that")
    raise UnavailableError(f"{what}: {os.strerror(-rc)}")


cdef class Device:
    """One block device, from `Control.prepare` or `recover` to `remove`."""

    cdef ublk_device *_device
    cdef Image _image
    cdef Control _control  # keeps the front alive

    def __dealloc__(self):
        if self._device is not NULL:
            ublk_device_remove(self._device)

    cdef int _check_open(self) except -1:
        if self._device is NULL:
            raise ConflictError("the device is removed")
        return 0

    @property
    def number(self):
        self._check_open()
        return ublk_device_number(self._device)

    @property
    def path(self):
        return f"/dev/ublkb{self.number}"

    def start(self, Image image not None):
        """Show `image`. The device is of no use after an error."""
        self._check_open()
        if self._image is not None:
            raise ConflictError(f"{self.path}: has an image")
        cdef block_device *c_image = image.device()
        cdef ublk_device *device = self._device
        cdef int rc
        self._image = image
        with nogil:
            rc = ublk_device_start(device, c_image)
        check(rc, self.path)

    def resized(self):
        """Tell the kernel that the image's size has changed. Raises UnavailableError before Linux 6.16."""
        self._check_open()
        cdef ublk_device *device = self._device
        cdef int rc
        with nogil:
            rc = ublk_device_resize(device)
        check(rc, self.path)

    def remove(self):
        """Whoever has it open gets errors from then on. Waits for the requests that are served."""
        self._check_open()
        cdef ublk_device *device = self._device
        self._device = NULL
        with nogil:
            ublk_device_remove(device)
        self._image = None


cdef class Control:
    """Access to the kernel's ublk driver.

    `owner` (64 bits, not 0) marks the devices of this server and of those before and after it. Raises
    UnavailableError where there is no ublk.
    """

    cdef ublk_front *_front
    cdef readonly unsigned queues
    cdef readonly unsigned depth

    def __cinit__(self, uint64_t owner, *, unsigned queues, unsigned depth):
        if not 1 <= queues <= 64:
            raise InvalidInputError("queues", f"{queues} is not in 1..64")
        if not 1 <= depth <= 1024:
            raise InvalidInputError("depth", f"{depth} is not in 1..1024")
        cdef ublk_options options = ublk_options(queues, depth, owner)
        cdef int rc
        with nogil:
            rc = ublk_front_open(&options, &self._front)
        if rc:
            self._front = NULL
            if rc in (-ENOENT, -ENXIO, -ENODEV):
                raise UnavailableError("this kernel has no ublk", hint="load the module ublk_drv (Linux 6.5 or newer)")
            if rc in (-EACCES, -EPERM):
                raise UnavailableError("ublk may not be used here", hint="it needs root")
            check(rc, "ublk")
        self.queues = queues
        self.depth = depth

    def __dealloc__(self):
        if self._front is not NULL:
            ublk_front_close(self._front)

    @property
    def features(self):
        """The kernel's UBLK_F_… bits."""
        return ublk_front_features(self._front)

    @property
    def can_resize(self):
        """Whether devices in use can change their size (Linux 6.16)."""
        return bool(self.features & UBLK_F_UPDATE_SIZE)

    def prepare(self):
        """A device without an image: `start` of it is faster than making one."""
        cdef Device device = Device()
        cdef int rc
        with nogil:
            rc = ublk_device_prepare(self._front, &device._device)
        if rc:
            device._device = NULL
            check(rc, "ublk")
        device._control = self
        return device

    def recover(self, uint32_t number, Image image not None):
        """Take over the device of a killed server, with the same image. Those who wait for it go on."""
        cdef Device device = Device()
        cdef block_device *c_image = image.device()
        cdef int rc
        with nogil:
            rc = ublk_device_recover(self._front, number, c_image, &device._device)
        if rc:
            device._device = NULL
            check(rc, f"/dev/ublkb{number}")
        device._control = self
        device._image = image
        return device

    def find(self, uint32_t number):
        """The device with this number if it has our mark, else None."""
        cdef ublk_found found
        cdef int rc
        with nogil:
            rc = ublk_front_find(self._front, number, &found)
        if rc in (-ENODEV, -EPERM, -EACCES):
            return None
        check(rc, f"/dev/ublkb{number}")
        return Found(number, found.state != 0)

    def delete(self, uint32_t number):
        """Delete a device with our mark that nobody serves."""
        cdef int rc
        with nogil:
            rc = ublk_front_delete(self._front, number)
        check(rc, f"/dev/ublkb{number}")
