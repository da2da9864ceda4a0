"""C declarations of the layer library, and the extension types other modules cimport."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "block.h" nogil:
    struct block_device:
        bint read_only


cdef extern from "lsmt.h" nogil:
    enum:
        LSMT_MAX_ENTRIES, LSMT_UUID, LSMT_TAG

    struct fault:
        int code
        char field[48]
        char text[208]

    uint32_t crc32c_raw(uint32_t crc, const void *data, size_t length)

    struct segment:
        uint64_t word0, word1
    uint64_t seg_offset(const segment *)
    uint64_t seg_length(const segment *)
    uint64_t seg_moffset(const segment *)
    bint seg_zeroed(const segment *)
    unsigned seg_tag(const segment *)
    segment seg_make(uint64_t offset, uint64_t length, uint64_t moffset, bint zeroed, unsigned tag)

    struct index
    struct index_cursor:
        size_t block
        unsigned slot
    void index_unref(index *)
    index_cursor index_find(const index *, uint64_t sector)
    bint index_at(const index *, index_cursor *, segment *)

    struct source:
        int (*read)(source *, void *buffer, size_t length, uint64_t offset, bint direct) noexcept nogil
        void (*close)(source *) noexcept nogil
        uint64_t size
    ctypedef int (*progress_t)(void *, uint64_t) noexcept nogil
    int zfile_verify(source *, progress_t progress, void *opaque, fault *)

    struct layer_info:
        uint64_t virtual_size, index_entries, data_bytes
        char uuid[37]
        char parent_uuid[37]
        char user_tag[257]
        char kind[16]

    struct layer:
        source *source
        layer_info info
    int layer_open(const char *path, layer **, index **, fault *)
    int layer_open_source(source *, layer **, index **, fault *)
    int layer_open_writable(const char *data, const char *index_path, layer **, index **, fault *)
    void layer_unref(layer *)

    struct stack:
        unsigned layers, levels
        uint64_t virtual_size
    int stack_new(layer **layers, index **indexes, unsigned count, stack **, fault *)
    int stack_push(const stack *, layer *, index *, stack **, fault *)
    stack *stack_ref(stack *)
    void stack_unref(stack *)
    int stack_read(stack *, void *buffer, size_t length, uint64_t offset, bint direct)
    index *stack_flatten(const stack *)
    uint64_t stack_segments(const stack *)
    uint64_t stack_index_bytes(const stack *)

    struct memory_extent:
        uint64_t guest_offset, length
        uint32_t file, reserved
        uint64_t file_offset
    struct memory_files:
        int base
        unsigned layers
        int zero
    int stack_memory(const stack *, uint64_t size, const memory_files *, memory_extent **, size_t *count, fault *)

    enum layer_form:
        FORM_PLAIN, FORM_LZ4, FORM_ZSTD

    struct writer_options:
        layer_form form
        uint32_t block_size
        bint tar
        uint64_t virtual_size
        const char *uuid
        const char *parent_uuid
        const char *user_tag

    struct writer
    int writer_new(int fd, const writer_options *, writer **, fault *)
    int writer_add(writer *, uint64_t sector, uint64_t sectors, const void *data, fault *)
    uint64_t writer_entries(const writer *)
    int writer_finish(writer *, uint64_t *file_size, fault *)
    void writer_free(writer *)

    struct commit_result:
        uint64_t entries, data_bytes, zero_bytes, same_bytes, file_size
    int stack_commit(stack *, stack *parent, bint keep_zeros, int fd, const writer_options *, uint64_t max_entries,
                     progress_t progress, void *opaque, commit_result *, fault *)

    ctypedef bint atomic_bool
    void atomic_init(atomic_bool *, bint)
    void atomic_store(atomic_bool *, bint)
    struct commit_job:
        bint keep_zeros
        int fd
        const writer_options *options
        uint64_t max_entries
        atomic_bool *stop
        commit_result *result
        fault *fault
    int stack_commit_in_background(stack *, stack *parent, const commit_job *)

    struct upper
    struct upper_recovery:
        uint64_t records, cut_records, cut_data_bytes
    int upper_create(const char *data, const char *index, uint64_t virtual_size, const char *uuid,
                     const char *parent_uuid, fault *)
    int upper_open(const char *data, const char *index, upper **, upper_recovery *, fault *)
    void upper_close(upper *)
    int upper_seal(upper *, fault *)

    struct image_stats:
        uint64_t reads, read_bytes, writes, write_bytes, discards, flushes, restacks, errors

    struct image
    int image_new(stack *, upper *, bint direct, image **, fault *)
    void image_free(image *)
    block_device *image_device(image *)
    int image_read(image *, void *buffer, size_t length, uint64_t offset)
    int image_write(image *, const void *buffer, size_t length, uint64_t offset)
    int image_discard(image *, uint64_t offset, uint64_t length)
    int image_flush(image *)
    int image_resize(image *, uint64_t virtual_size)
    int image_restack(image *, upper *next, upper **old, fault *)
    int image_replace(image *, stack *, fault *)
    uint64_t image_size(image *)
    stack *image_stack(image *)
    void image_upper_usage(image *, uint64_t *segments, uint64_t *bytes)
    void image_get_stats(const image *, image_stats *)


cdef extern from "lsmt_index.h" nogil:
    struct index_builder
    index_builder *index_begin()
    void index_put(index_builder *, segment)
    index *index_end(index_builder *)
    size_t index_bytes(const index *)


cdef extern from "lsmt_cache.h" nogil:
    struct cache_options:
        uint64_t limit, prefetch_rate
        uint32_t chunk_size, fetch_bytes, readahead, wait_ms, prefetch_most

    struct cache_stats:
        uint64_t hits, misses, joined, fetches, fetched_chunks, fetched_bytes, prefetched_chunks, failed_chunks
        uint64_t expired, stored_chunks, evicted_chunks, evicted_bytes, damaged_chunks, not_stored, used_bytes, limit
        uint64_t waiting, queued, in_flight, layers

    struct cache
    int cache_open(const char *directory, const cache_options *, cache **, fault *)
    void cache_unref(cache *)
    void cache_release(cache *)
    void cache_get_stats(cache *, cache_stats *)

    struct origin
    origin *origin_new(cache *)
    void origin_close(origin *)
    void origin_unref(origin *)
    bint origin_closed(origin *)

    struct remote
    int cache_attach(cache *, const char *name, uint64_t size, uint32_t chunk_size, origin *, source **, fault *)
    source *remote_again(remote *)
    remote *remote_of(source *)
    const char *remote_name(const remote *)
    uint32_t remote_chunk_size(const remote *)
    void remote_get_stats(const remote *, cache_stats *)
    size_t remote_prefetch(remote *, const uint64_t *chunks, size_t count, bint urgent, bint direct)

    struct fetch:
        remote *remote
        uint64_t first, offset
        size_t length, chunk_size
        unsigned count, delivered
        char *buffer
        bint prefetch, ended
    fetch *origin_take(origin *, uint32_t wait_ms)
    void fetch_deliver(fetch *)
    void fetch_end(fetch *, int error)
    void fetch_unref(fetch *)

    struct trace
    struct trace_entry:
        uint32_t layer
        uint64_t chunk
    trace *trace_start(cache *, remote **, uint32_t count, size_t most)
    size_t trace_count(trace *)
    size_t trace_copy(trace *, trace_entry *, size_t room)
    void trace_free(trace *)


cdef class Image:
    """Its C side must not be used after `close`; a front end closes its own side first."""

    cdef image *_image
    cdef readonly str data_path
    cdef readonly str index_path
    cdef readonly object recovery
    cdef int _check_open(self) except -1
    cdef block_device *device(self) except NULL
