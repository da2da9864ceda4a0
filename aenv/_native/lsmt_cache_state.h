/* What the files of the chunk cache share. Locks are taken in the order `evicting`, `lock`. */
#ifndef AENV_LSMT_CACHE_STATE_H
#define AENV_LSMT_CACHE_STATE_H

#include "lsmt_cache.h"

/* The word of a chunk: state (3 bits), MARK, and a generation that each eviction raises. A reader takes the word, reads
 * the file, and takes the word again: if the generation is the same, nothing was punched out under the read. So a hit
 * writes nothing that other threads read, but the time of the last use, once a tick. */
enum chunk_state { CHUNK_ABSENT, CHUNK_WRITING, CHUNK_UNVERIFIED, CHUNK_PRESENT, CHUNK_EVICTING };
#define WORD_STATE 7u
#define WORD_MARK 8u /* the first reader queues more readahead */
#define WORD_GENERATION 16u

struct chunk {
    atomic_uint word;
    atomic_uint used; /* the cache's tick at the last use */
    atomic_uint crc;  /* of a chunk that is present */
};

#define COUNTERS 8
struct counter {
    _Alignas(64) atomic_ulong value;
};

#define STREAMS 4
struct stream { /* a sequential reader: the next chunk it asks for lies in [begin, end] */
    uint64_t begin, end;
    unsigned window; /* chunks */
};

/* A layer that has chunks in the cache, or is attached. */
struct remote {
    struct cache *cache;
    struct remote *next;
    unsigned refs; /* attachments, fetches, evictions; under `lock`. The files are open as long as there are any. */
    unsigned attached, epoch; /* sources of it; a fetch from before the last attachment may have asked a worse place */
    struct origin *origin;
    char name[CACHE_NAME];
    uint64_t size, chunks;
    uint32_t chunk_size, shift, seed;
    struct chunk *chunk;
    atomic_ulong present;
    int data_fd, map_fd;
    struct source *file; /* reads the data file */
    atomic_uint traces;
    bool direct; /* its last reader keeps the bytes elsewhere: they leave the page cache */
    struct stream stream[STREAMS];
    unsigned stream_hand;
    struct counter hits[COUNTERS];
    atomic_ulong misses, joined, fetched_chunks, fetched_bytes, failed;
};

enum want_class { WANT_DEMAND, WANT_AHEAD, WANT_PREFETCH, WANT_CLASSES };
enum want_state { WANT_QUEUED, WANT_FETCHING, WANT_DONE, WANT_FAILED };

/* A chunk that somebody waits for or will: at most one for each chunk. Everything is under `lock`. */
struct want {
    struct want *chain, *previous, *next;
    struct remote *remote;
    uint64_t number;
    struct fetch *fetch; /* holds the bytes when it is done */
    unsigned refs;       /* readers, and the table */
    unsigned epoch;
    enum want_class class;
    enum want_state state;
    int error;
    bool mark;
    pthread_cond_t done;
};

#define WANT_BUCKETS 16384u

struct cache {
    atomic_uint refs;
    char *directory;
    int lock_fd;
    atomic_bool released;
    struct cache_options options;
    uint64_t high, low; /* bytes: eviction begins and ends */
    atomic_ulong used;
    atomic_uint tick; /* chunks stored so far */
    pthread_mutex_t evicting, lock;
    struct remote *remotes; /* changed under both locks, so each of them is enough to read it */
    struct trace *traces;
    struct want *bucket[WANT_BUCKETS];
    uint64_t waiting, queued, in_flight;
    atomic_ulong fetches, fetched_chunks, fetched_bytes, prefetched, failed, expired, evicted_chunks, evicted_bytes,
        damaged, not_stored;
};

struct want_list {
    struct want *head, *tail;
};

struct origin {
    atomic_uint refs;
    struct cache *cache;
    struct want_list list[WANT_CLASSES];
    pthread_cond_t ready;
    unsigned prefetching, waiting; /* fetches; readers */
    uint64_t progress;             /* ns: when a chunk came, or the first of the readers began to wait */
    uint64_t prefetch_next; /* ns: not before */
    bool closed;
};

static inline uint64_t chunk_length(const struct remote *remote, uint64_t number)
{
    uint64_t left = remote->size - (number << remote->shift);
    return left < remote->chunk_size ? left : remote->chunk_size;
}

static inline void add(atomic_ulong *counter, unsigned long amount)
{
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

struct cache *cache_ref(struct cache *cache);
struct origin *origin_ref(struct origin *origin);
uint64_t monotonic_ns(void);
void condition_init(pthread_cond_t *condition); /* for times of monotonic_ns */
int condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns); /* ETIMEDOUT */

/* --- files (c_lsmt_cache_files.c) ---------------------------------------------------------------------------- */

int remote_load(struct cache *cache, const char *name, struct remote **out); /* from its map file; -EBADMSG: not whole */
int remote_create(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size, struct remote **out);
void remote_unlink(struct cache *cache, const char *name);
int remote_open_files(struct remote *remote);
void remote_close_files(struct remote *remote);
void remote_free(struct remote *remote);
/* A chunk that is whole on its way into the file. False: it is not in the cache, and its place is empty. */
bool remote_store(struct remote *remote, uint64_t number, const char *bytes, bool mark, bool direct);
/* From `word` to absent, if nobody was faster. Under `evicting`. */
bool remote_drop(struct remote *remote, uint64_t number, unsigned word);
/* Reads a whole unverified chunk once: it is present from then on, or what does not match its CRC is dropped. */
int remote_verify(struct remote *remote, uint64_t number, unsigned word, bool direct);

/* --- eviction (c_lsmt_cache_evict.c) ------------------------------------------------------------------------- */

bool cache_make_room(struct cache *cache, uint64_t bytes); /* takes `bytes` of the limit, false if there is no way */
void cache_shrink(struct cache *cache);                    /* under `evicting`: down to the low mark */
void cache_forget_empty(struct cache *cache);              /* under `evicting`: layers without chunks or use */

/* --- wants (c_lsmt_cache_fetch.c) ---------------------------------------------------------------------------- */

/* Copies [offset, offset + length) of the chunk. 1: try again, it may be in the cache by now. */
int want_read(struct remote *remote, uint64_t number, uint64_t last, char *buffer, size_t length, size_t offset,
              bool direct);
int want_ask(struct remote *remote, uint64_t number, uint64_t last, bool direct); /* -EAGAIN, or as want_read */
void want_ahead(struct remote *remote, uint64_t number); /* somebody has come to a marked chunk */
void remote_move(struct remote *remote, struct origin *origin); /* under `lock` */
void remote_cancel(struct remote *remote); /* under `lock`: what is queued and nobody waits for */
void remote_unref(struct remote *remote); /* under `lock` */

void trace_touch(struct remote *remote, uint64_t number);

#endif
