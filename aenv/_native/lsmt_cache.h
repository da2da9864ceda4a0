/* Remote layers: sources whose bytes come in chunks from elsewhere, behind one bounded cache of chunks on a local disk.
 *
 * Readers call the source. A chunk that is there costs a `pread`; for one that is not, a reader queues a want with the
 * layer's origin and sleeps. Fetchers (threads of whoever owns the cache) take wants from an origin, fill the buffer and
 * deliver: readers copy from that buffer, so that neither a full disk nor an eviction can keep them from going on.
 */
#ifndef AENV_LSMT_CACHE_H
#define AENV_LSMT_CACHE_H

#include "lsmt.h"

#define CACHE_CHUNK_LEAST (64u << 10)
#define CACHE_CHUNK_MOST (16u << 20)
#define CACHE_NAME 160u /* bytes of a layer's name in the cache, with its NUL */

struct cache_options {
    uint64_t limit;          /* bytes of all chunks; the cache is full at once when it is 0 */
    uint32_t chunk_size;     /* of layers that are new in the cache: a power of two */
    uint32_t fetch_bytes;    /* of neighbouring chunks that are fetched together, at most */
    uint32_t readahead;      /* bytes ahead of a sequential reader, at most */
    uint32_t wait_ms;        /* a reader waits so long for a chunk, then gets EIO */
    uint64_t prefetch_rate;  /* bytes a second of each origin; 0: not bounded */
    uint32_t prefetch_most;  /* fetches of an origin at a time that are for prefetch */
};

struct cache_stats {
    uint64_t hits, misses, joined;             /* chunks asked for: there; first to ask; asked when on the way */
    uint64_t fetches, fetched_chunks, fetched_bytes, prefetched_chunks;
    uint64_t failed_chunks, expired;           /* fetches that failed; readers that waited too long */
    uint64_t stored_chunks, evicted_chunks, evicted_bytes, damaged_chunks, not_stored;
    uint64_t used_bytes, limit, waiting, queued, in_flight, layers;
};

struct cache;
struct origin;

int cache_open(const char *directory, const struct cache_options *options, struct cache **out, struct fault *fault);
void cache_unref(struct cache *cache);
void cache_release(struct cache *cache); /* another process may use the directory now: nothing is stored any longer */
void cache_get_stats(struct cache *cache, struct cache_stats *stats);

/* Whoever fetches from one place. Closing it ends its fetchers and fails its readers. */
struct origin *origin_new(struct cache *cache);
void origin_close(struct origin *origin);
void origin_unref(struct origin *origin);

/* A layer of `size` bytes as a source; `name` says which content it is. A later attachment of the same name brings its
 * origin with it. `chunk_size` 0: as the cache has it. */
int cache_attach(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size, struct origin *origin,
                 struct source **out, struct fault *fault);
struct remote;
struct source *remote_again(struct remote *attached); /* another source of it; NULL: no memory */
struct remote *remote_of(struct source *attached);
const char *remote_name(const struct remote *remote);
uint32_t remote_chunk_size(const struct remote *remote);
void remote_get_stats(const struct remote *remote, struct cache_stats *stats); /* hits, misses, joined, fetched, failed */
/* Queue chunks for prefetch, in order; those that are there or on the way are left out, and what the cache cannot hold.
 * `direct`: as in source.read. Gives how many were queued. */
size_t remote_prefetch(struct remote *remote, const uint64_t *chunks, size_t count, bool urgent, bool direct);

/* One fetch: neighbouring chunks of a layer. */
struct fetch {
    struct remote *remote;
    struct origin *origin; /* that it was taken from */
    uint64_t first, offset; /* chunk; byte in the layer */
    size_t length, chunk_size;
    unsigned count, delivered;
    char *buffer;
    atomic_uint refs;
    bool prefetch, ended;
};

struct fetch *origin_take(struct origin *origin, uint32_t wait_ms); /* NULL: nothing to do, or closed */
bool origin_closed(struct origin *origin);
void fetch_deliver(struct fetch *fetch);       /* the next chunk is whole, and is what it should be */
void fetch_end(struct fetch *fetch, int error); /* what was not delivered fails with the negative errno `error` */
void fetch_unref(struct fetch *fetch);

/* The order in which chunks of some layers are first read. */
struct trace;
struct trace_entry {
    uint32_t layer;
    uint64_t chunk;
};
struct trace *trace_start(struct cache *cache, struct remote *const *remotes, uint32_t count, size_t most);
size_t trace_count(struct trace *trace);
size_t trace_copy(struct trace *trace, struct trace_entry *out, size_t room);
void trace_free(struct trace *trace);

#endif
