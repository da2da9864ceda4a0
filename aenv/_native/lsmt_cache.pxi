"""Remote layers and their chunk cache: included by lsmt.pyx."""


class CacheStats(NamedTuple):
    hits: int
    misses: int
    joined: int
    fetches: int
    fetched_chunks: int
    fetched_bytes: int
    prefetched_chunks: int
    failed_chunks: int
    expired: int
    stored_chunks: int
    evicted_chunks: int
    evicted_bytes: int
    damaged_chunks: int
    not_stored: int
    used_bytes: int
    limit: int
    waiting: int
    queued: int
    in_flight: int
    layers: int


cdef object stats_tuple(const cache_stats *s):
    return CacheStats(
        s.hits, s.misses, s.joined, s.fetches, s.fetched_chunks, s.fetched_bytes, s.prefetched_chunks, s.failed_chunks,
        s.expired, s.stored_chunks, s.evicted_chunks, s.evicted_bytes, s.damaged_chunks, s.not_stored, s.used_bytes,
        s.limit, s.waiting, s.queued, s.in_flight, s.layers,
    )


cdef class ChunkCache:
    """Chunks of remote layers in a directory of this process: at most `limit` bytes of them."""

    cdef cache *_cache
    cdef readonly object directory

    def __cinit__(
        self, directory, uint64_t limit, *, uint32_t chunk_size=256 << 10, uint32_t fetch_bytes=4 << 20,
        uint32_t readahead=8 << 20, double wait_seconds=30, uint64_t prefetch_rate=0, uint32_t prefetch_most=2,
    ):
        cdef fault f
        cdef cache_options options
        cdef bytes path = os.fsencode(directory)
        cdef const char *c_path = path
        cdef int rc
        if not 0 < wait_seconds <= 3600:
            raise InvalidInputError("wait_seconds", f"{wait_seconds}")
        options.limit = limit
        options.chunk_size = chunk_size
        options.fetch_bytes = fetch_bytes
        options.readahead = readahead
        options.wait_ms = max(1, <uint32_t>(wait_seconds * 1000))
        options.prefetch_rate = prefetch_rate
        options.prefetch_most = prefetch_most
        self.directory = directory
        with nogil:
            rc = cache_open(c_path, &options, &self._cache, &f)
        if rc:
            self._cache = NULL
            raise_fault(&f, "")

    def __dealloc__(self):
        cache_unref(self._cache)

    def release(self):
        """Leave the directory to others; from now on nothing is stored in it."""
        with nogil:
            cache_release(self._cache)

    @property
    def stats(self):
        cdef cache_stats s
        with nogil:
            cache_get_stats(self._cache, &s)
        return stats_tuple(&s)


cdef class Origin:
    """The queue of what is to be fetched from one place. `take` is for its fetcher threads."""

    cdef origin *_origin
    cdef readonly ChunkCache cache

    def __cinit__(self, ChunkCache cache not None):
        self.cache = cache
        self._origin = origin_new(cache._cache)
        if self._origin is NULL:
            raise MemoryError

    def __dealloc__(self):
        origin_unref(self._origin)

    def take(self, double seconds):
        """The next `Fetch`, or None if there is none for so long, or if the origin is closed."""
        cdef fetch *taken
        cdef uint32_t wait = <uint32_t>(seconds * 1000)
        with nogil:
            taken = origin_take(self._origin, wait)
        if taken is NULL:
            return None
        cdef Fetch self_ = Fetch.__new__(Fetch)
        self_._fetch = taken
        self_.name = remote_name(taken.remote).decode()
        return self_

    @property
    def closed(self):
        return bool(origin_closed(self._origin))

    def close(self):
        """End `take`, fail what is queued. Layers of this origin can read only what is in the cache from now on."""
        with nogil:
            origin_close(self._origin)


cdef class Fetch:
    """Bytes to bring: fill the buffer of this object, `deliver` each chunk in turn, and `end`."""

    cdef fetch *_fetch
    cdef readonly str name
    cdef Py_ssize_t _shape[1]
    cdef Py_ssize_t _strides[1]

    def __dealloc__(self):
        if self._fetch is not NULL:
            with nogil:
                fetch_end(self._fetch, -5)
                fetch_unref(self._fetch)

    def __getbuffer__(self, Py_buffer *view, int flags):
        # After a delivery readers copy from the buffer: whoever fills it must leave delivered chunks alone.
        self._shape[0] = self._fetch.length
        self._strides[0] = 1
        view.buf = self._fetch.buffer
        view.obj = self
        view.len = self._fetch.length
        view.itemsize = 1
        view.readonly = 0
        view.format = "B"
        view.ndim = 1
        view.shape = self._shape
        view.strides = self._strides
        view.suboffsets = NULL
        view.internal = NULL

    @property
    def offset(self):
        """Where in the layer the buffer's first byte lies."""
        return self._fetch.offset

    @property
    def length(self):
        return self._fetch.length

    @property
    def first(self):
        """Number of the first chunk."""
        return self._fetch.first

    @property
    def chunk_size(self):
        return self._fetch.chunk_size

    @property
    def prefetch(self):
        return bool(self._fetch.prefetch)

    @property
    def delivered(self):
        """Bytes."""
        return min(<size_t>self._fetch.delivered * self._fetch.chunk_size, self._fetch.length)

    def deliver(self):
        """The next chunk is in the buffer, whole and right: hand it to its readers and keep it."""
        if self._fetch.ended or self._fetch.delivered == self._fetch.count:
            raise ConflictError("fetch: has ended")
        with nogil:
            fetch_deliver(self._fetch)

    def end(self, int code=0):
        """What was not delivered fails with the errno `code`."""
        cdef int error = -code if code > 0 else -5
        with nogil:
            fetch_end(self._fetch, error)


cdef class Remote:
    """A layer whose bytes come through the cache: `Layer(remote)` opens it."""

    cdef source *_source
    cdef remote *_remote
    cdef readonly str name
    cdef readonly uint64_t size
    cdef readonly Origin origin

    def __cinit__(self, Origin origin not None, str name, uint64_t size, uint32_t chunk_size=0):
        cdef fault f
        cdef bytes encoded = name.encode()
        cdef const char *c_name = encoded
        cdef int rc
        if "\0" in name:
            raise InvalidInputError("digest", "holds a NUL")
        self.name, self.size, self.origin = name, size, origin
        with nogil:
            rc = cache_attach(origin.cache._cache, c_name, size, chunk_size, origin._origin, &self._source, &f)
        if rc:
            self._source = NULL
            raise_fault(&f, name)
        self._remote = remote_of(self._source)

    cdef source *attach(self) except NULL:
        """Another source of the same layer, with a life of its own."""
        cdef source *attached = remote_again(self._remote)
        if attached is NULL:
            raise MemoryError
        return attached

    def __dealloc__(self):
        if self._source is not NULL:
            self._source.close(self._source)

    @property
    def chunk_size(self):
        return remote_chunk_size(self._remote)

    @property
    def stats(self):
        """What this layer's readers asked for; the fields of the whole cache are 0."""
        cdef cache_stats s
        remote_get_stats(self._remote, &s)
        return stats_tuple(&s)

    def read(self, uint64_t offset, size_t length, *, bint direct=False):
        """Bytes of the layer's file."""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, length)
        cdef char *buffer = PyBytes_AS_STRING(data)
        cdef int rc
        with nogil:
            rc = self._source.read(self._source, buffer, length, offset, direct)
        check_io(rc, "read")
        return data

    def prefetch(self, chunks, *, bint urgent=False, bint direct=False):
        """Queue chunks, in this order; gives how many were not there yet. `urgent`: at once, not at prefetch speed.
        `direct`: their readers do not want them in the page cache."""
        cdef uint64_t[::1] numbers = array("Q", chunks)
        cdef size_t count = numbers.shape[0], queued
        if not count:
            return 0
        with nogil:
            queued = remote_prefetch(self._remote, &numbers[0], count, urgent, direct)
        return queued


cdef class Recording:
    """Records which chunks of the given layers are read first, `most` at most."""

    cdef trace *_trace
    cdef readonly list remotes

    def __cinit__(self, remotes, size_t most=65536):
        cdef remote *c_remotes[255]
        cdef uint32_t i
        self.remotes = list(remotes)
        if not 1 <= len(self.remotes) <= 255:
            raise InvalidInputError("layers", f"{len(self.remotes)} remote layers; a trace has 1 to 255")
        if not 1 <= most <= 1 << 24:
            raise InvalidInputError("most", f"{most}")
        for i in range(len(self.remotes)):
            c_remotes[i] = (<Remote?>self.remotes[i])._remote
            if (<Remote>self.remotes[i]).origin.cache is not (<Remote>self.remotes[0]).origin.cache:
                raise InvalidInputError("layers", "are of different caches")
        self._trace = trace_start((<Remote>self.remotes[0]).origin.cache._cache, c_remotes, len(self.remotes), most)
        if self._trace is NULL:
            raise MemoryError

    def __dealloc__(self):
        trace_free(self._trace)

    def entries(self):
        """Pairs of a layer's place in `remotes` and a chunk's number, in the order of the first reads."""
        cdef size_t room = trace_count(self._trace), count, i
        cdef trace_entry *found = <trace_entry *>malloc((room + 1) * sizeof(trace_entry))
        if found is NULL:
            raise MemoryError
        try:
            count = trace_copy(self._trace, found, room)
            return [(found[i].layer, found[i].chunk) for i in range(count)]
        finally:
            free(found)
