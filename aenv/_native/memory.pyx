"""Cython shell of c_memory*.c: guest memory of another process into layers. All work is done without the GIL."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.types cimport pid_t

import os


cdef extern from "c_memory.h" nogil:
    enum:
        PAGE_BYTES
        MAX_THREADS

    struct memory_failure:
        int error
        char text[200]

    struct memory_region:
        uint64_t address
        uint64_t guest_offset
        uint64_t length

    struct memory_stats:
        uint64_t dirty_pages
        uint64_t stored_pages
        uint64_t zero_pages
        uint64_t equal_pages
        uint64_t segments
        uint64_t file_bytes

    struct memory_extent:
        pass

    struct memory_piece:
        uint64_t address
        uint32_t page, count

    struct memory_pieces:
        memory_piece *items
        size_t count

    struct memory_run:
        uint64_t offset, length

    enum memory_wanted:
        WANT_WRITTEN
        WANT_PRESENT

    struct memory_parent:
        pass

    int memory_scan(
        pid_t pid, const memory_region *regions, int count, memory_wanted wanted, int threads, int use_ioctl,
        memory_pieces *out, memory_failure *why)
    int memory_parent_open(
        memory_parent *parent, const int *fds, int files, const memory_extent *extents, size_t count,
        uint64_t virtual_size, memory_failure *why)
    void memory_parent_close(memory_parent *parent)
    struct memory_room:
        char *map
        uint64_t length
    int memory_room_make(int fd, uint64_t length, int threads, memory_room *room, memory_failure *why)
    void memory_room_free(memory_room *room)
    int memory_prefetch(int fd, uint64_t offset, uint64_t length, uint64_t *cold, memory_failure *why)
    int memory_runs(const memory_pieces *pieces, memory_run **runs, size_t *count)
    int memory_home(
        const memory_run *runs, size_t run_count, const memory_extent *content, size_t count, size_t limit,
        memory_extent **extents, size_t *found, memory_failure *why)
    int memory_capture(
        pid_t pid, const memory_region *regions, int count, uint64_t virtual_size, const memory_parent *parent,
        int out_fd, const memory_room *room, int threads, int use_ioctl, const char *uuid, memory_pieces *pieces,
        memory_stats *stats, memory_failure *why)


NO_UUID = "00000000-0000-0000-0000-000000000000"
# Page numbers are 32 bits wide.
MEMORY_LIMIT = 1 << 43


class ParentError(ValueError):
    """The parent of a capture is not valid; the text names the field. Nothing was changed."""


cdef _raise(memory_failure *why):
    text = why.text.decode("utf-8", "replace")
    if why.error == 0:
        raise ParentError(text)
    raise OSError(why.error, f"{text}: {os.strerror(why.error)}")


cdef int _threads(threads) except -1:
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads must be 1 to {MAX_THREADS}, got {threads}")
    return threads


cdef uint64_t _size(size) except 0:
    if not 0 < size <= MEMORY_LIMIT or size % PAGE_BYTES:
        raise ValueError(f"memory of {size} bytes is not a positive number of pages")
    return size


cdef memory_region *_regions(list regions, uint64_t size) except NULL:
    """Regions as (address, guest_offset, length): inside the memory, page-aligned and not overlapping."""
    if not 0 < len(regions) <= 4096:
        raise ValueError(f"{len(regions)} memory regions")
    end = 0
    for address, offset, length in sorted(regions, key=lambda region: region[1]):
        if address % PAGE_BYTES or offset % PAGE_BYTES or length % PAGE_BYTES or address <= 0 or length <= 0:
            raise ValueError("memory regions must be page-aligned")
        if offset < end or offset + length > size:
            raise ValueError("memory regions overlap or are beyond the memory")
        end = offset + length
    cdef memory_region *result = <memory_region *>calloc(len(regions), sizeof(memory_region))
    if result == NULL:
        raise MemoryError
    cdef Py_ssize_t i
    try:
        for i in range(len(regions)):
            result[i].address, result[i].guest_offset, result[i].length = regions[i]
    except BaseException:
        free(result)
        raise
    return result


cdef int *_descriptors(list fds) except NULL:
    cdef int *result = <int *>calloc(len(fds) + 1, sizeof(int))
    if result == NULL:
        raise MemoryError
    cdef Py_ssize_t i
    try:
        for i in range(len(fds)):
            result[i] = fds[i]
    except BaseException:
        free(result)
        raise
    return result


cdef class Room:
    """Space and page cache for about `size` bytes of pages in the empty file `fd`, which stays open as long as this
    lives. Raises OSError when the disk is full; where the kernel cannot make room ahead it is empty."""

    cdef memory_room _room

    def __init__(self, int fd, uint64_t size, *, threads=2):
        cdef memory_failure why
        cdef int c_threads = _threads(threads), result
        self.close()
        with nogil:
            result = memory_room_make(fd, (size // PAGE_BYTES + 1) * PAGE_BYTES, c_threads, &self._room, &why)
        if result < 0:
            _raise(&why)

    def __dealloc__(self):
        memory_room_free(&self._room)

    @property
    def length(self):
        """Bytes of the file, from its beginning, for which room was made."""
        return self._room.length if self._room.map != NULL else 0

    def close(self):
        """No capture may be using it."""
        memory_room_free(&self._room)


def capture(
    pid_t pid, list regions not None, size, list parent_fds not None, bytes parent_extents not None, int out_fd, *,
    Room room=None, threads=2, str uuid=NO_UUID, bint scan_by_ioctl=True,
):
    """Write all pages that process `pid` has changed in its private mapping to the empty file `out_fd`.

    `room` was made in `out_fd`. The parent is what RAM held before: records of a `MemoryMap` (aenv/vmm/base.py), and its
    files; no records are zeros.
    Returns a dict of counts (see `struct memory_stats`), and what was written, stored or not: records of u64 guest
    offset and u64 length in bytes, sorted and joined.
    """
    cdef bytes name = uuid.encode("ascii")
    if len(name) != 36:
        raise ValueError(f"{uuid!r} is not a UUID")
    if len(parent_extents) % sizeof(memory_extent):
        raise ValueError("parent extents are no whole number of records")
    cdef uint64_t c_size = _size(size)
    cdef int c_threads = _threads(threads), count = <int>len(regions), files = <int>len(parent_fds), result
    cdef size_t extents = len(parent_extents) // sizeof(memory_extent)
    cdef const memory_extent *c_extents = <const memory_extent *><const char *>parent_extents
    cdef memory_stats stats
    cdef memory_failure why
    cdef memory_parent parent
    cdef memory_pieces pieces
    cdef memory_room no_room
    cdef const memory_room *c_room = &room._room if room is not None else &no_room
    cdef memory_run *runs = NULL
    cdef size_t run_count = 0
    cdef const char *c_name = name
    cdef memory_region *c_regions = _regions(regions, c_size)
    cdef int *c_fds = NULL
    memset(&pieces, 0, sizeof(pieces))
    memset(&no_room, 0, sizeof(no_room))
    try:
        c_fds = _descriptors(parent_fds)
        with nogil:
            result = memory_parent_open(&parent, c_fds, files, c_extents, extents, c_size, &why)
            if result == 0:
                result = memory_capture(
                    pid, c_regions, count, c_size, &parent, out_fd, c_room, c_threads, scan_by_ioctl, c_name, &pieces,
                    &stats, &why)
            memory_parent_close(&parent)
        if result < 0:
            _raise(&why)
        if memory_runs(&pieces, &runs, &run_count) < 0:
            raise MemoryError
        return stats, PyBytes_FromStringAndSize(<char *>runs, run_count * sizeof(memory_run))
    finally:
        free(c_regions)
        free(c_fds)
        free(pieces.items)
        free(runs)


def home(bytes written not None, bytes content not None, size_t limit):
    """The records of a `MemoryMap` that make the pages of `written` (from `capture`) those of files again, which hold
    the same by `content`, the records of a map: at most `limit` of them, the longest."""
    if len(written) % sizeof(memory_run) or len(content) % sizeof(memory_extent):
        raise ValueError("no whole number of records")
    cdef const memory_run *runs = <const memory_run *><const char *>written
    cdef const memory_extent *c_content = <const memory_extent *><const char *>content
    cdef size_t run_count = len(written) // sizeof(memory_run), count = len(content) // sizeof(memory_extent), found
    cdef memory_extent *extents = NULL
    cdef memory_failure why
    cdef int result
    with nogil:
        result = memory_home(runs, run_count, c_content, count, limit, &extents, &found, &why)
    if result < 0:
        _raise(&why)
    try:
        return PyBytes_FromStringAndSize(<char *>extents, found * sizeof(memory_extent))
    finally:
        free(extents)


def written_bytes(pid_t pid, list regions not None, size):
    """How much memory process `pid` has written to its private mapping."""
    cdef uint64_t c_size = _size(size), total = 0
    cdef int count = <int>len(regions), result
    cdef memory_pieces found
    cdef memory_failure why
    cdef size_t i
    cdef memory_region *c_regions = _regions(regions, c_size)
    memset(&found, 0, sizeof(found))
    with nogil:
        result = memory_scan(pid, c_regions, count, WANT_WRITTEN, 1, True, &found, &why)
        for i in range(found.count):
            total += <uint64_t>found.items[i].count * PAGE_BYTES
        free(c_regions)
        free(found.items)
    if result < 0:
        _raise(&why)
    return total


def pages(pid_t pid, list regions not None, size, *, bint written, bint scan_by_ioctl=True):
    """The pages of process `pid` that it has written to its private mapping, or all that are mapped now: runs as
    (guest offset, length) in bytes, as they lie in the regions."""
    cdef uint64_t c_size = _size(size)
    cdef int count = <int>len(regions), result
    cdef memory_wanted wanted = WANT_WRITTEN if written else WANT_PRESENT
    cdef memory_pieces found
    cdef memory_failure why
    cdef size_t i
    cdef memory_region *c_regions = _regions(regions, c_size)
    memset(&found, 0, sizeof(found))
    with nogil:
        result = memory_scan(pid, c_regions, count, wanted, 1, scan_by_ioctl, &found, &why)
        free(c_regions)
    try:
        if result < 0:
            _raise(&why)
        return [
            (<uint64_t>found.items[i].page * PAGE_BYTES, <uint64_t>found.items[i].count * PAGE_BYTES)
            for i in range(found.count)
        ]
    finally:
        free(found.items)


def prefetch(int fd, uint64_t offset, uint64_t length):
    """Begin to read those pages of a file that are not in the page cache; returns how many bytes they are."""
    cdef uint64_t cold = 0
    cdef memory_failure why
    cdef int result
    with nogil:
        result = memory_prefetch(fd, offset, length, &cold, &why)
    if result < 0:
        _raise(&why)
    return cold
