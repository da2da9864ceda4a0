"""Python shell of the layer library. All sizes and offsets are bytes, multiples of 512."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EBADMSG, EBUSY, EEXIST, EINVAL, ENOENT, EOPNOTSUPP, EOVERFLOW, EROFS
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import os
import time
from array import array
from math import gcd
from typing import NamedTuple

from aenv.errors import AenvError, ConflictError, InvalidInputError, NotFoundError, UnavailableError

MAX_ENTRIES = LSMT_MAX_ENTRIES
FORMS = {"plain": FORM_PLAIN, "lz4": FORM_LZ4, "zstd": FORM_ZSTD}


class LayerInfo(NamedTuple):
    kind: str
    virtual_size: int
    uuid: str
    parent_uuid: str
    user_tag: str
    entries: int
    data_bytes: int


class Segment(NamedTuple):
    offset: int
    length: int
    moffset: int
    zeroed: bool
    layer: int


class CommitResult(NamedTuple):
    entries: int
    data_bytes: int
    zero_bytes: int
    same_bytes: int
    file_size: int


class Recovery(NamedTuple):
    records: int
    cut_records: int
    cut_data_bytes: int


class Stats(NamedTuple):
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    discards: int
    flushes: int
    restacks: int
    errors: int


cdef object error_of(int code, str field, str text):
    if code in (EBADMSG, EINVAL, EOVERFLOW):
        return InvalidInputError(field, text)
    if code == ENOENT:
        return NotFoundError(f"{field}: {text}")
    if code in (EBUSY, EEXIST, EROFS):
        return ConflictError(f"{field}: {text}")
    return UnavailableError(f"{field}: {text}")


cdef int raise_fault(fault *f, str where) except -1:
    text = f.text.decode("utf-8", "replace")
    raise error_of(f.code, f.field.decode(), f"{text} ({where})" if where else text)


cdef int check_io(int rc, str what) except -1:
    if rc:
        raise error_of(-rc, what, os.strerror(-rc))
    return 0


cdef struct Progress:
    void *callback
    void *error


cdef int call_progress(void *opaque, uint64_t at) noexcept with gil:
    cdef Progress *progress = <Progress *>opaque
    try:
        (<object>progress.callback)(at)
    except BaseException as error:
        (<list>progress.error).append(error)
        return 0
    return 1


def crc32c(data, uint32_t crc=0):
    """CRC32C with no initial and no final inversion, as ZFile uses it."""
    cdef const unsigned char[::1] view = data
    return crc32c_raw(crc, &view[0] if view.shape[0] else NULL, view.shape[0])


include "lsmt_cache.pxi"


cdef class Layer:
    """A sealed layer (`Layer(path)` or `Layer(remote)`), or the content of a writable one (`Layer(data, index)`)."""

    cdef layer *_layer
    cdef index *_index
    cdef readonly str path

    def __cinit__(self, path, index_path=None):
        cdef fault f
        cdef int rc
        if isinstance(path, Remote):
            rc = self._open_remote(path, &f)
        else:
            rc = self._open_files(path, index_path, &f)
        if rc:
            self._layer = NULL
            self._index = NULL
            raise_fault(&f, self.path)

    cdef int _open_files(self, object path, object index_path, fault *f) except? -1:
        cdef bytes data = os.fsencode(path)
        cdef bytes other = os.fsencode(index_path) if index_path is not None else b""
        cdef const char *c_data = data
        cdef const char *c_other = other
        cdef bint writable = index_path is not None
        cdef int rc
        self.path = os.fspath(path)
        with nogil:
            if writable:
                rc = layer_open_writable(c_data, c_other, &self._layer, &self._index, f)
            else:
                rc = layer_open(c_data, &self._layer, &self._index, f)
        return rc

    cdef int _open_remote(self, Remote remote, fault *f) except? -1:
        cdef source *attached = remote.attach()
        cdef int rc
        self.path = remote.name
        with nogil:
            rc = layer_open_source(attached, &self._layer, &self._index, f)
        return rc

    def __dealloc__(self):
        if self._layer is not NULL:
            layer_unref(self._layer)
            index_unref(self._index)

    @property
    def info(self):
        cdef layer_info *info = &self._layer.info
        return LayerInfo(
            info.kind.decode(), info.virtual_size, info.uuid.decode("ascii"), info.parent_uuid.decode("ascii"),
            info.user_tag.decode("utf-8", "replace"), info.index_entries, info.data_bytes,
        )

    def segments(self):
        """Yield the `Segment`s in order of their place in the image."""
        cdef index_cursor cursor = index_cursor(0, 0)
        cdef segment s
        while index_at(self._index, &cursor, &s):
            yield segment_tuple(&s)
            cursor.slot += 1

    def verify(self, progress=None):
        """Read everything once, so that every checksum is checked. `progress` gets the bytes done."""
        run_verify(self._layer.source, progress, self.path)


cdef object segment_tuple(const segment *s):
    return Segment(
        seg_offset(s) * 512, seg_length(s) * 512, seg_moffset(s) * 512, seg_zeroed(s), seg_tag(s)
    )


cdef object run_verify(source *s, object callback, str path):
    cdef fault f
    cdef int rc
    cdef list errors = []
    cdef Progress progress = Progress(<void *>callback, <void *>errors)
    cdef progress_t function = NULL
    if callback is not None:
        function = call_progress
    with nogil:
        rc = zfile_verify(s, function, &progress, &f)
    if errors:
        raise errors[0]
    if rc:
        raise_fault(&f, path)


cdef Stack wrap_stack(stack *s):
    cdef Stack self = Stack.__new__(Stack)
    self._stack = s
    return self


cdef class Stack:
    """Layers, lowest first, and their merged index. Immutable; shared by all images that use it."""

    cdef stack *_stack
    cdef object __weakref__

    def __init__(self, layers):
        cdef fault f
        cdef int rc
        cdef unsigned count, i
        layers = list(layers)
        if not 1 <= len(layers) <= 255:
            raise InvalidInputError("layers", f"{len(layers)} layers; a stack has 1 to 255")
        if self._stack is not NULL:
            raise InvalidInputError("stack", "is made already")
        count = len(layers)
        cdef layer *c_layers[255]
        cdef index *indexes[255]
        for i in range(count):
            c_layers[i] = (<Layer?>layers[i])._layer
            indexes[i] = (<Layer>layers[i])._index
        with nogil:
            rc = stack_new(c_layers, indexes, count, &self._stack, &f)
        if rc:
            self._stack = NULL
            raise_fault(&f, "")

    def __dealloc__(self):
        stack_unref(self._stack)

    def push(self, Layer layer not None):
        """A new stack with `layer` on top; the indexes below are shared with this one."""
        cdef fault f
        cdef int rc
        cdef stack *out
        with nogil:
            rc = stack_push(self._stack, layer._layer, layer._index, &out, &f)
        if rc:
            raise_fault(&f, layer.path)
        return wrap_stack(out)

    @property
    def virtual_size(self):
        return self._stack.virtual_size

    @property
    def layer_count(self):
        return self._stack.layers

    @property
    def level_count(self):
        return self._stack.levels

    @property
    def segment_count(self):
        """Segments held in memory for this stack."""
        return stack_segments(self._stack)

    @property
    def index_bytes(self):
        """Memory that holds them, and finds them; parts of it may be shared with other stacks."""
        return stack_index_bytes(self._stack)

    def read(self, uint64_t offset, size_t length):
        """Bytes of the image; what no layer maps is zero."""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, length)
        cdef char *buffer = PyBytes_AS_STRING(data)
        cdef int rc
        with nogil:
            rc = stack_read(self._stack, buffer, length, offset, False)
        check_io(rc, "read")
        return data

    def segments(self):
        """Yield the merged `Segment`s in order of their place in the image."""
        cdef index *flat = stack_flatten(self._stack)
        cdef index_cursor cursor = index_cursor(0, 0)
        cdef segment s
        if flat is NULL:
            raise MemoryError
        try:
            while index_at(flat, &cursor, &s):
                yield segment_tuple(&s)
                cursor.slot += 1
        finally:
            index_unref(flat)

    def memory_extents(self, uint64_t size, *, int base=-1, unsigned layers=0, int zero=-1, limit=None):
        """The records of a `MemoryMap` (aenv/vmm/base.py) of `size` bytes that shows these layers, which must be plain
        files. `base`, `layers` and `zero` are the numbers of the image below, of the lowest layer, and of an image of
        zeros; without one (-1) there is no extent where it would be.

        None when there would be more than `limit`, or segments are not made of whole pages.
        """
        cdef fault f
        cdef memory_files files = memory_files(base, layers, zero)
        cdef memory_extent *extents = NULL
        cdef size_t count = 0
        cdef int rc
        with nogil:
            rc = stack_memory(self._stack, size, &files, &extents, &count, &f)
        if rc == -EOPNOTSUPP:
            return None
        if rc:
            raise_fault(&f, "")
        try:
            if limit is not None and count > limit:
                return None
            return PyBytes_FromStringAndSize(<char *>extents, count * sizeof(memory_extent))
        finally:
            free(extents)

    def commit(
        self, int fd, *, str form="plain", uint32_t block_size=4096, bint tar=False, str uuid="", str parent_uuid="",
        str user_tag="", Stack parent=None, bint keep_zeros=False, uint64_t max_entries=LSMT_MAX_ENTRIES,
        virtual_size=None, progress=None,
    ):
        """Write the mapped content as one sealed layer to the empty file `fd`, and flush it. Gives a `CommitResult`.

        `keep_zeros`: something lies below the new layer, zeros must hide it. `parent`: what lies below, so that equal
        blocks are left out. `progress` gets the offset reached; an exception in it stops the commit.
        """
        cdef Options options = Options(form, block_size, tar, uuid, parent_uuid, user_tag,
                                       self._stack.virtual_size if virtual_size is None else virtual_size)
        cdef fault f
        cdef commit_result result
        cdef stack *below = parent._stack if parent is not None else NULL
        cdef list errors = []
        cdef Progress state = Progress(<void *>progress, <void *>errors)
        cdef progress_t function = NULL
        cdef int rc
        if progress is not None:
            function = call_progress
        with nogil:
            rc = stack_commit(self._stack, below, keep_zeros, fd, &options.c, max_entries, function, &state, &result, &f)
        if errors:
            raise errors[0]
        if rc:
            raise_fault(&f, "")
        return CommitResult(
            result.entries, result.data_bytes, result.zero_bytes, result.same_bytes, result.file_size
        )


    def commit_in_background(
        self, int fd, Stop stop not None, *, str uuid="", str user_tag="", Stack parent=None, bint keep_zeros=False,
        uint64_t max_entries=LSMT_MAX_ENTRIES,
    ):
        """`commit` to a plain layer with the lowest priorities for processor and disk; blocks until it is done.

        Raises UnavailableError when another thread has called `stop.set()`.
        """
        cdef Options options = Options("plain", 4096, False, uuid, "", user_tag, self._stack.virtual_size)
        cdef fault f
        cdef commit_result result
        cdef commit_job job
        cdef stack *below = parent._stack if parent is not None else NULL
        cdef int rc
        job.keep_zeros, job.fd, job.options, job.max_entries = keep_zeros, fd, &options.c, max_entries
        job.stop, job.result, job.fault = &stop.flag, &result, &f
        with nogil:
            rc = stack_commit_in_background(self._stack, below, &job)
        if rc:
            raise_fault(&f, "")
        return CommitResult(
            result.entries, result.data_bytes, result.zero_bytes, result.same_bytes, result.file_size
        )


cdef class Stop:
    """Tells work in another thread to end early."""

    cdef atomic_bool flag

    def __cinit__(self):
        atomic_init(&self.flag, False)

    def set(self):
        atomic_store(&self.flag, True)


cdef class Options:
    cdef writer_options c
    cdef tuple keep

    def __cinit__(self, form, block_size, tar, uuid, parent_uuid, user_tag, virtual_size):
        if form not in FORMS:
            raise InvalidInputError("form", f"expected one of {', '.join(FORMS)}, got {form!r}")
        if not 0 <= virtual_size < 1 << 60:
            raise InvalidInputError("virtual_size", f"{virtual_size} bytes")
        for name, value in (("uuid", uuid), ("parent_uuid", parent_uuid), ("user_tag", user_tag)):
            if "\0" in value:
                raise InvalidInputError(name, "holds a NUL")
        self.keep = (uuid.encode(), parent_uuid.encode(), user_tag.encode())
        self.c.form = FORMS[form]
        self.c.block_size = block_size
        self.c.tar = tar
        self.c.virtual_size = virtual_size
        self.c.uuid = <bytes>self.keep[0]
        self.c.parent_uuid = <bytes>self.keep[1]
        self.c.user_tag = <bytes>self.keep[2]


cdef class Writer:
    """Writes one sealed layer, segment by segment in ascending order, to the empty file `fd`."""

    cdef writer *_writer

    def __cinit__(
        self, int fd, virtual_size, *, str form="plain", uint32_t block_size=4096, bint tar=False, str uuid="",
        str parent_uuid="", str user_tag="",
    ):
        cdef Options options = Options(form, block_size, tar, uuid, parent_uuid, user_tag, virtual_size)
        cdef fault f
        if writer_new(fd, &options.c, &self._writer, &f):
            self._writer = NULL
            raise_fault(&f, "")

    def __dealloc__(self):
        writer_free(self._writer)

    def add(self, uint64_t offset, data):
        """Data at `offset`; zeros are the caller's business."""
        cdef const unsigned char[::1] view = data
        cdef fault f
        cdef int rc
        cdef size_t length = view.shape[0]
        if offset % 512 or length % 512 or not length:
            raise InvalidInputError("offset", "offset and length must be multiples of 512")
        cdef const void *bytes_ = &view[0]
        with nogil:
            rc = writer_add(self._writer, offset // 512, length // 512, bytes_, &f)
        if rc:
            raise_fault(&f, "")

    def add_zeros(self, uint64_t offset, uint64_t length):
        """A range that hides what lies below."""
        cdef fault f
        if offset % 512 or length % 512 or not length:
            raise InvalidInputError("offset", "offset and length must be multiples of 512")
        if writer_add(self._writer, offset // 512, length // 512, NULL, &f):
            raise_fault(&f, "")

    @property
    def entries(self):
        return writer_entries(self._writer)

    def finish(self):
        """Write index and trailer and flush; gives the size of the file."""
        cdef fault f
        cdef uint64_t size
        cdef int rc
        with nogil:
            rc = writer_finish(self._writer, &size, &f)
        if rc:
            raise_fault(&f, "")
        return size


def create_writable(data, index_path, uint64_t virtual_size, *, str uuid, str parent_uuid=""):
    """Make the two files of an empty writable layer. Neither may exist."""
    cdef fault f
    cdef bytes c_data = os.fsencode(data), c_index = os.fsencode(index_path)
    cdef bytes c_uuid = uuid.encode(), c_parent = parent_uuid.encode()
    cdef const char *p_data = c_data
    cdef const char *p_index = c_index
    cdef const char *p_uuid = c_uuid
    cdef const char *p_parent = c_parent
    cdef int rc
    with nogil:
        rc = upper_create(p_data, p_index, virtual_size, p_uuid, p_parent, &f)
    if rc:
        raise_fault(&f, "")


cdef class Sealing:
    """A writable layer on its way to be sealed: frozen by a restack, or opened to be sealed."""

    cdef upper *_upper
    cdef readonly str data_path

    def __init__(self, data, index_path):
        cdef fault f
        cdef upper_recovery recovery
        cdef bytes c_data = os.fsencode(data), c_index = os.fsencode(index_path)
        cdef const char *p_data = c_data
        cdef const char *p_index = c_index
        cdef int rc
        self.data_path = os.fspath(data)
        with nogil:
            rc = upper_open(p_data, p_index, &self._upper, &recovery, &f)
        if rc:
            self._upper = NULL
            raise_fault(&f, "")

    def __dealloc__(self):
        upper_close(self._upper)

    def finish(self):
        """Write index and trailer, durably, and remove the index file. May be called again after an error."""
        cdef fault f
        cdef int rc
        if self._upper is NULL:
            return
        with nogil:
            rc = upper_seal(self._upper, &f)
            if rc == 0:
                upper_close(self._upper)
        if rc:
            raise_fault(&f, "")
        self._upper = NULL


cdef class Image:
    """A stack, and a writable layer on top if `data` and `index_path` are given."""

    def __cinit__(self, Stack stack=None, data=None, index_path=None, *, bint direct=False):
        cdef fault f
        cdef upper *top = NULL
        cdef upper_recovery recovery
        cdef bytes c_data, c_index
        cdef const char *p_data
        cdef const char *p_index
        cdef int rc
        if (data is None) != (index_path is None):
            raise InvalidInputError("index", "a writable layer has a data file and an index file")
        if data is not None:
            c_data, c_index = os.fsencode(data), os.fsencode(index_path)
            p_data, p_index = c_data, c_index
            self.data_path, self.index_path = os.fspath(data), os.fspath(index_path)
            with nogil:
                rc = upper_open(p_data, p_index, &top, &recovery, &f)
            if rc:
                raise_fault(&f, "")
            self.recovery = Recovery(recovery.records, recovery.cut_records, recovery.cut_data_bytes)
        if image_new(stack._stack if stack is not None else NULL, top, direct, &self._image, &f):
            self._image = NULL
            upper_close(top)
            raise_fault(&f, "")

    def __dealloc__(self):
        image_free(self._image)

    def close(self):
        """Close the files; no operation may be running. Flushes nothing: `flush` does."""
        image_free(self._image)
        self._image = NULL

    cdef int _check_open(self) except -1:
        if self._image is NULL:
            raise ConflictError("the image is closed")
        return 0

    cdef block_device *device(self) except NULL:
        self._check_open()
        return image_device(self._image)

    @property
    def size(self):
        self._check_open()
        return image_size(self._image)

    @property
    def read_only(self):
        self._check_open()
        return image_device(self._image).read_only

    @property
    def stack(self):
        """The sealed layers now, or None."""
        self._check_open()
        cdef stack *s = image_stack(self._image)
        return wrap_stack(s) if s is not NULL else None

    @property
    def segments(self):
        """Segments of the writable layer, and bytes of its data file."""
        self._check_open()
        cdef uint64_t segments, size
        image_upper_usage(self._image, &segments, &size)
        return segments, size

    @property
    def stats(self):
        cdef image_stats s
        self._check_open()
        image_get_stats(self._image, &s)
        return Stats(s.reads, s.read_bytes, s.writes, s.write_bytes, s.discards, s.flushes, s.restacks, s.errors)

    def read(self, uint64_t offset, size_t length):
        self._check_open()
        cdef bytes data = PyBytes_FromStringAndSize(NULL, length)
        cdef char *buffer = PyBytes_AS_STRING(data)
        cdef int rc
        with nogil:
            rc = image_read(self._image, buffer, length, offset)
        check_io(rc, "read")
        return data

    def write(self, uint64_t offset, data):
        self._check_open()
        cdef const unsigned char[::1] view = data
        cdef size_t length = view.shape[0]
        cdef const void *buffer = &view[0] if length else NULL
        cdef int rc
        with nogil:
            rc = image_write(self._image, buffer, length, offset)
        check_io(rc, "write")

    def discard(self, uint64_t offset, uint64_t length):
        self._check_open()
        cdef int rc
        with nogil:
            rc = image_discard(self._image, offset, length)
        check_io(rc, "discard")

    def flush(self):
        self._check_open()
        cdef int rc
        with nogil:
            rc = image_flush(self._image)
        check_io(rc, "flush")

    def resize(self, uint64_t virtual_size):
        self._check_open()
        cdef int rc
        with nogil:
            rc = image_resize(self._image, virtual_size)
        check_io(rc, "virtual_size")

    def restack(self, data, index_path):
        """Put the empty writable layer of the two files on top. Gives the old one as a `Sealing` to be finished."""
        self._check_open()
        cdef fault f
        cdef upper_recovery recovery
        cdef upper *next_upper
        cdef upper *old
        cdef bytes c_data = os.fsencode(data), c_index = os.fsencode(index_path)
        cdef const char *p_data = c_data
        cdef const char *p_index = c_index
        cdef int rc
        with nogil:
            rc = upper_open(p_data, p_index, &next_upper, &recovery, &f)
            if rc == 0:
                rc = image_restack(self._image, next_upper, &old, &f)
                if rc:
                    upper_close(next_upper)
        if rc:
            raise_fault(&f, "")
        cdef Sealing sealing = Sealing.__new__(Sealing)
        sealing._upper = old
        sealing.data_path = self.data_path
        self.data_path, self.index_path = os.fspath(data), os.fspath(index_path)
        return sealing

    def replace(self, Stack stack not None):
        """Read what lies below the writable layer from another stack, which has the same content."""
        self._check_open()
        cdef fault f
        cdef int rc
        with nogil:
            rc = image_replace(self._image, stack._stack, &f)
        if rc:
            raise_fault(&f, "")


include "lsmt_bench.pxi"
