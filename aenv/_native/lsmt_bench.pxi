"""What `aenv bench blocks` times inside of the library: included by lsmt.pyx."""

cdef extern from *:
    """
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>
    static uint64_t now_ns(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    static uint64_t draw(uint64_t *state)
    {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        return *state >> 20;
    }
    static void *huge_pages(char *memory, size_t size)
    {
        char *begin = (char *)(((uintptr_t)memory + (2u << 20) - 1) & ~(uintptr_t)((2u << 20) - 1));
        madvise(begin, size, MADV_HUGEPAGE);
        return begin;
    }
    static void touch(const void *page) { (void)*(const volatile unsigned char *)page; }
    """
    uint64_t now_ns() nogil
    uint64_t draw(uint64_t *state) nogil
    void *huge_pages(char *memory, size_t size) nogil
    void touch(const void *page) nogil
    ssize_t pread(int fd, void *buffer, size_t length, uint64_t offset) nogil


cdef index *made_index(size_t segments, bint scattered, uint64_t *state, uint64_t *end) except NULL:
    cdef index_builder *builder = index_begin()
    cdef index *built
    cdef uint64_t at = 0, length = 8, moffset = 8, tag = 0, drawn
    cdef size_t i
    if builder is NULL:
        raise MemoryError
    for i in range(segments):
        if scattered:
            drawn = draw(state)
            length, tag = 8 * (1 + drawn % 16), drawn // 16 % 64
            moffset = 8 + 8 * (drawn // 1024 % (1 << 25))
        index_put(builder, seg_make(at, length, moffset, False, tag))
        at += length + (8 * (1 + draw(state) % 32) if scattered else 8)
        moffset += length
    built = index_end(builder)
    if built is NULL:
        raise MemoryError
    end[0] = at
    return built


def lookup_nanoseconds(size_t segments, size_t rounds, uint64_t seed=1, *, bint scattered=False):
    """Mean time of one search in an index of so many segments, and bytes of memory for each.

    The index is that of one committed layer, or `scattered`: of 64 layers, which have their segments at random places.
    """
    cdef uint64_t state = seed | 1, span = 0
    cdef index *built = made_index(segments, scattered, &state, &span)
    cdef index_cursor cursor
    cdef segment found
    cdef size_t i, total = 0
    cdef uint64_t start = now_ns(), elapsed
    with nogil:
        for i in range(rounds):
            # Each search depends on the one before, so that latency is measured and not throughput.
            cursor = index_find(built, (draw(&state) + (total & 1)) % span)
            if index_at(built, &cursor, &found):
                total += seg_moffset(&found)
    elapsed = now_ns() - start
    cdef double size = index_bytes(built)
    index_unref(built)
    return elapsed / rounds, size / segments


def load_nanoseconds(size_t size, size_t rounds, uint64_t seed=1):
    """Mean time of one load from a random line of `size` bytes in huge pages, each depending on the one before."""
    cdef size_t lines = size // 64, i, k, at = 0
    cdef uint64_t state = seed | 1, start
    cdef bytearray memory = bytearray(lines * 64 + (2 << 20))
    cdef char *bytes_of = memory
    cdef uint64_t *word = <uint64_t *>huge_pages(bytes_of, lines * 64)
    with nogil:
        for i in range(lines):
            word[8 * i] = i
        for i in range(lines - 1, 0, -1):  # one cycle through all of them
            k = draw(&state) % i
            word[8 * i], word[8 * k] = word[8 * k], word[8 * i]
        start = now_ns()
        for i in range(rounds):
            at = word[8 * at]
        start = now_ns() - start
    if at >= lines:
        raise AssertionError(at)
    return start / rounds


def time_reads(Image image, int fd, uint64_t size, size_t length, size_t rounds, uint64_t seed=1):
    """Nanoseconds of each of `rounds` random reads of an image, or of the file `fd` if `image` is None."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, length)
    cdef char *buffer = PyBytes_AS_STRING(data)
    cdef uint64_t[::1] times = array("Q", bytes(8 * rounds))
    cdef uint64_t state = seed | 1, start, offset, places = size // length
    cdef size_t i
    cdef int rc = 0
    with nogil:
        for i in range(rounds):
            offset = draw(&state) % places * length
            start = now_ns()
            if image is not None:
                rc = image_read(image._image, buffer, length, offset)
            elif pread(fd, buffer, length, offset) != <ssize_t>length:
                rc = -5
            times[i] = now_ns() - start
            if rc:
                break
    check_io(rc, "read")
    return times.base


def time_faults(region, size_t rounds, uint64_t seed=1):
    """Nanoseconds of the first touch of each of `rounds` pages of a mapping, in a random order."""
    cdef const unsigned char[::1] view = region
    cdef uint64_t pages = view.shape[0] // 4096, state = seed | 1, start
    cdef uint64_t[::1] times = array("Q", bytes(8 * rounds))
    cdef size_t i
    if rounds > pages:
        raise InvalidInputError("rounds", f"{rounds} of {pages} pages")
    # A step that has no factor in common with the number of pages comes to each page once.
    cdef uint64_t step = (pages * 5 // 8) | 1, at = state % pages
    while gcd(step, pages) != 1:
        step += 2
    with nogil:
        for i in range(rounds):
            at = (at + step) % pages
            start = now_ns()
            touch(&view[at * 4096])
            times[i] = now_ns() - start
    return times.base
