/* The chunk cache: its directory, the layers in it, and reading from them. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "lsmt_cache_state.h"

#define SLACK_MOST (1ull << 30) /* bytes between the limit and the high mark, and from there to the low one */
#define READ_CHUNKS 64u         /* of one read that are asked for at once */

uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

int condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns)
{
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    return pthread_cond_timedwait(condition, mutex, &until);
}

/* --- the cache ----------------------------------------------------------------------------------------------- */

struct cache *cache_ref(struct cache *cache)
{
    atomic_fetch_add(&cache->refs, 1);
    return cache;
}

void cache_unref(struct cache *cache)
{
    if (!cache || atomic_fetch_sub(&cache->refs, 1) != 1)
        return;
    for (struct remote *remote = cache->remotes, *next; remote; remote = next) {
        next = remote->next;
        remote_free(remote);
    }
    if (cache->lock_fd >= 0)
        close(cache->lock_fd);
    pthread_mutex_destroy(&cache->evicting);
    pthread_mutex_destroy(&cache->lock);
    free(cache->directory);
    free(cache);
}

void cache_release(struct cache *cache)
{
    pthread_mutex_lock(&cache->evicting);
    atomic_store(&cache->released, true);
    if (cache->lock_fd >= 0)
        close(cache->lock_fd);
    cache->lock_fd = -1;
    pthread_mutex_unlock(&cache->evicting);
}

static int check_options(const struct cache_options *o, struct fault *fault)
{
    if (o->chunk_size < CACHE_CHUNK_LEAST || o->chunk_size > CACHE_CHUNK_MOST || o->chunk_size & (o->chunk_size - 1))
        return fault_set(fault, EINVAL, "chunk_size", "%u is not a power of two from %u to %u", o->chunk_size,
                         CACHE_CHUNK_LEAST, CACHE_CHUNK_MOST);
    if (!o->wait_ms || !o->prefetch_most)
        return fault_set(fault, EINVAL, o->wait_ms ? "prefetch_most" : "wait_ms", "must not be 0");
    return 0;
}

/* One process for one directory: two would punch holes into what the other has. */
static int lock_directory(struct cache *cache, struct fault *fault)
{
    cache->lock_fd = open(cache->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (cache->lock_fd < 0)
        return fault_set(fault, errno, "directory", "cannot open %s: %s", cache->directory, strerror(errno));
    if (flock(cache->lock_fd, LOCK_EX | LOCK_NB))
        return fault_set(fault, EBUSY, "directory", "%s is the cache of another process", cache->directory);
    return 0;
}

/* Where holes cannot be punched, an eviction would free nothing. */
static int probe_directory(struct cache *cache, struct fault *fault)
{
    static const char NAME[] = ".probe";
    int fd = openat(cache->lock_fd, NAME, O_RDWR | O_CREAT | O_CLOEXEC, 0600), rc = fd < 0 ? errno : 0;
    if (!rc && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, CACHE_CHUNK_LEAST))
        rc = errno;
    if (fd >= 0)
        close(fd);
    unlinkat(cache->lock_fd, NAME, 0);
    return rc ? fault_set(fault, rc, "directory", "cannot make files with holes in %s: %s", cache->directory, strerror(rc))
              : 0;
}

/* Files that are not whole are removed: they are only copies. */
static int load_directory(struct cache *cache, struct fault *fault)
{
    DIR *directory = opendir(cache->directory);
    if (!directory)
        return fault_set(fault, errno, "directory", "cannot read %s: %s", cache->directory, strerror(errno));
    for (struct dirent *entry; (entry = readdir(directory));) {
        char name[CACHE_NAME];
        char *end = strrchr(entry->d_name, '.');
        if (!end || end == entry->d_name || (size_t)(end - entry->d_name) >= sizeof name ||
            (strcmp(end, ".map") && strcmp(end, ".data")))
            continue;
        memcpy(name, entry->d_name, (size_t)(end - entry->d_name));
        name[end - entry->d_name] = 0;
        struct remote *remote = NULL;
        if (strcmp(end, ".data") == 0) {
            *end = 0;
            if (faccessat(dirfd(directory), strcat(entry->d_name, ".map"), F_OK, 0))
                remote_unlink(cache, name);
        } else if (remote_load(cache, name, &remote)) {
            remote_unlink(cache, name);
        } else {
            remote->next = cache->remotes;
            cache->remotes = remote;
        }
    }
    closedir(directory);
    return 0;
}

int cache_open(const char *directory, const struct cache_options *options, struct cache **out, struct fault *fault)
{
    int rc = check_options(options, fault);
    if (rc)
        return rc;
    struct cache *cache = calloc(1, sizeof *cache);
    if (!cache || !(cache->directory = strdup(directory))) {
        free(cache);
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    uint64_t slack = options->limit / 16 < SLACK_MOST ? options->limit / 16 : SLACK_MOST;
    atomic_init(&cache->refs, 1);
    cache->options = *options;
    cache->high = options->limit - slack;
    cache->low = cache->high - slack;
    pthread_mutex_init(&cache->evicting, NULL);
    pthread_mutex_init(&cache->lock, NULL);
    if ((rc = lock_directory(cache, fault)) || (rc = probe_directory(cache, fault)) ||
        (rc = load_directory(cache, fault))) {
        cache_unref(cache);
        return rc;
    }
    pthread_mutex_lock(&cache->evicting);
    if (atomic_load(&cache->used) > cache->high)
        cache_shrink(cache);
    cache_forget_empty(cache);
    pthread_mutex_unlock(&cache->evicting);
    *out = cache;
    return 0;
}

/* --- reading ------------------------------------------------------------------------------------------------- */

struct attachment {
    struct source source;
    struct remote *remote;
};

static void count_hit(struct remote *remote)
{
    static _Thread_local char mine; /* threads that share a counter's cache line would slow each other down */
    unsigned slot = (unsigned)((uintptr_t)&mine * 0x9E3779B97F4A7C15ull >> 56) % COUNTERS;
    atomic_fetch_add_explicit(&remote->hits[slot].value, 1, memory_order_relaxed);
}

/* 1: it is there no more. */
static int read_local(struct remote *remote, uint64_t number, unsigned word, char *buffer, size_t length,
                      uint64_t offset, bool direct)
{
    struct chunk *chunk = &remote->chunk[number];
    int rc = remote->file->read(remote->file, buffer, length, offset, direct);
#ifndef __SANITIZE_THREAD__ /* which does not know fences, and needs none: the file is no memory to it */
    atomic_thread_fence(memory_order_acquire); /* if the read saw the hole of an eviction, it sees its word, too */
#endif
    unsigned now = atomic_load(&chunk->word);
    if ((now ^ word) & ~WORD_MARK)
        return 1;
    if (rc == -ENOMEM)
        return rc;
    if (rc) { /* the local disk fails: the origin has the chunk still */
        pthread_mutex_lock(&remote->cache->evicting);
        if (remote_drop(remote, number, now))
            add(&remote->cache->damaged, 1);
        pthread_mutex_unlock(&remote->cache->evicting);
        return 1;
    }
    unsigned tick = atomic_load_explicit(&remote->cache->tick, memory_order_relaxed);
    if (atomic_load_explicit(&chunk->used, memory_order_relaxed) != tick)
        atomic_store_explicit(&chunk->used, tick, memory_order_relaxed);
    if (now & WORD_MARK && atomic_fetch_and(&chunk->word, ~WORD_MARK) & WORD_MARK)
        want_ahead(remote, number);
    return 0;
}

static _Thread_local bool must_not_wait;

bool source_may_wait(bool may)
{
    bool before = !must_not_wait;
    must_not_wait = !may;
    return before;
}

static int read_chunk(struct remote *remote, uint64_t number, uint64_t last, char *buffer, size_t length,
                      uint64_t offset, bool direct)
{
    int rc = 1;
    for (bool hit = true; rc == 1;) {
        unsigned word = atomic_load(&remote->chunk[number].word);
        if ((word & WORD_STATE) == CHUNK_UNVERIFIED) {
            int failed = remote_verify(remote, number, word, direct);
            rc = failed ? failed : 1;
        } else if ((word & WORD_STATE) == CHUNK_PRESENT) {
            rc = read_local(remote, number, word, buffer, length, offset, direct);
            if (rc == 0 && hit)
                count_hit(remote);
        } else {
            hit = false;
            rc = must_not_wait ? want_ask(remote, number, last, direct)
                               : want_read(remote, number, last, buffer, length, offset & (remote->chunk_size - 1), direct);
        }
    }
    if (atomic_load_explicit(&remote->traces, memory_order_relaxed))
        trace_touch(remote, number);
    return rc;
}

static int attachment_read(struct source *source, void *buffer, size_t length, uint64_t offset, bool direct)
{
    struct remote *remote = ((struct attachment *)source)->remote;
    char *at = buffer;
    if (offset > source->size || length > source->size - offset)
        return -ENODATA;
    while (length) {
        uint64_t number = offset >> remote->shift, last = (offset + length - 1) >> remote->shift;
        uint64_t end = (number + 1) << remote->shift;
        size_t part = end - offset < length ? end - offset : length;
        int rc = read_chunk(remote, number, last - number < READ_CHUNKS ? last : number + READ_CHUNKS, at, part,
                            offset, direct);
        if (rc)
            return rc;
        at += part, offset += part, length -= part;
    }
    return 0;
}

/* --- attaching ----------------------------------------------------------------------------------------------- */

void remote_unref(struct remote *remote)
{
    if (--remote->refs)
        return;
    remote_cancel(remote);
    remote_close_files(remote);
    origin_unref(remote->origin);
    remote->origin = NULL;
}

static void attachment_close(struct source *source)
{
    struct attachment *attachment = (struct attachment *)source;
    struct cache *cache = attachment->remote->cache;
    pthread_mutex_lock(&cache->lock);
    if (!--attachment->remote->attached)
        remote_cancel(attachment->remote);
    remote_unref(attachment->remote);
    pthread_mutex_unlock(&cache->lock);
    cache_unref(cache);
    free(attachment);
}

static struct remote *find(const struct cache *cache, const char *name)
{
    struct remote *remote = cache->remotes;
    while (remote && strcmp(remote->name, name))
        remote = remote->next;
    return remote;
}

/* Under `evicting`. Chunks of another size are of no use: the layer begins anew. */
static int renew(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size, struct remote **found,
                 struct fault *fault)
{
    struct remote *old = *found;
    if (old && (old->size != size || (chunk_size && old->chunk_size != chunk_size))) {
        if (old->refs)
            return fault_set(fault, EINVAL, old->size != size ? "size" : "chunks.size",
                             "the layer is open with another one");
        for (uint64_t i = 0; i < old->chunks; i++)
            if (atomic_load(&old->chunk[i].word) & WORD_STATE)
                atomic_fetch_sub(&cache->used, chunk_length(old, i));
        atomic_store(&old->present, 0);
        cache_forget_empty(cache);
        old = NULL;
    }
    if (old)
        return 0;
    chunk_size = chunk_size ? chunk_size : cache->options.chunk_size;
    int rc = remote_create(cache, name, size, chunk_size, &old);
    if (rc == -ENOSPC) {
        cache_shrink(cache);
        rc = remote_create(cache, name, size, chunk_size, &old);
    }
    if (rc)
        return fault_set(fault, -rc, "cache", "cannot make the files of a layer: %s", strerror(-rc));
    pthread_mutex_lock(&cache->lock);
    remote_close_files(old);
    old->next = cache->remotes;
    cache->remotes = old;
    pthread_mutex_unlock(&cache->lock);
    *found = old;
    return 0;
}

/* Under `lock`. */
static void attach(struct attachment *attachment, struct remote *remote)
{
    remote->refs++;
    remote->attached++;
    *attachment = (struct attachment){{attachment_read, attachment_close, remote->size, true}, remote};
    cache_ref(remote->cache);
}

struct source *remote_again(struct remote *attached)
{
    struct attachment *attachment = calloc(1, sizeof *attachment);
    if (!attachment)
        return NULL;
    pthread_mutex_lock(&attached->cache->lock);
    attach(attachment, attached);
    pthread_mutex_unlock(&attached->cache->lock);
    return &attachment->source;
}

static bool name_fits(const char *name)
{
    size_t length = strlen(name);
    return length && length < CACHE_NAME && name[0] != '.' && !strchr(name, '/');
}

int cache_attach(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size, struct origin *origin,
                 struct source **out, struct fault *fault)
{
    if (!name_fits(name))
        return fault_set(fault, EINVAL, "digest", "cannot be the name of a file");
    if (!size || size >> 60)
        return fault_set(fault, EINVAL, "size", "%llu bytes", (unsigned long long)size);
    if (chunk_size && (chunk_size < CACHE_CHUNK_LEAST || chunk_size > CACHE_CHUNK_MOST || chunk_size & (chunk_size - 1)))
        return fault_set(fault, EINVAL, "chunks.size", "%u is not a power of two from %u to %u", chunk_size,
                         CACHE_CHUNK_LEAST, CACHE_CHUNK_MOST);
    struct attachment *attachment = calloc(1, sizeof *attachment);
    if (!attachment)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    pthread_mutex_lock(&cache->evicting);
    struct remote *remote = find(cache, name);
    int rc = renew(cache, name, size, chunk_size, &remote, fault);
    pthread_mutex_lock(&cache->lock);
    if (!rc && !remote->refs && (rc = remote_open_files(remote)))
        fault_set(fault, -rc, "cache", "cannot open the files of a layer: %s", strerror(-rc));
    if (!rc) {
        remote->epoch++;
        remote_move(remote, origin);
        attach(attachment, remote);
    }
    pthread_mutex_unlock(&cache->lock);
    pthread_mutex_unlock(&cache->evicting);
    if (rc)
        free(attachment);
    else
        *out = &attachment->source;
    return rc;
}

struct remote *remote_of(struct source *attached) { return ((struct attachment *)attached)->remote; }
const char *remote_name(const struct remote *remote) { return remote->name; }
uint32_t remote_chunk_size(const struct remote *remote) { return remote->chunk_size; }

/* --- figures ------------------------------------------------------------------------------------------------- */

void remote_get_stats(const struct remote *remote, struct cache_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    for (int i = 0; i < COUNTERS; i++)
        stats->hits += atomic_load_explicit(&remote->hits[i].value, memory_order_relaxed);
    stats->misses = atomic_load(&remote->misses);
    stats->joined = atomic_load(&remote->joined);
    stats->fetched_chunks = atomic_load(&remote->fetched_chunks);
    stats->fetched_bytes = atomic_load(&remote->fetched_bytes);
    stats->failed_chunks = atomic_load(&remote->failed);
}

void cache_get_stats(struct cache *cache, struct cache_stats *stats)
{
    uint64_t layers = 0, hits = 0, misses = 0, joined = 0;
    pthread_mutex_lock(&cache->lock);
    for (struct remote *remote = cache->remotes; remote; remote = remote->next, layers++) {
        remote_get_stats(remote, stats);
        hits += stats->hits, misses += stats->misses, joined += stats->joined;
    }
    *stats = (struct cache_stats){
        .hits = hits, .misses = misses, .joined = joined,
        .fetches = atomic_load(&cache->fetches), .fetched_chunks = atomic_load(&cache->fetched_chunks),
        .fetched_bytes = atomic_load(&cache->fetched_bytes), .prefetched_chunks = atomic_load(&cache->prefetched),
        .failed_chunks = atomic_load(&cache->failed), .expired = atomic_load(&cache->expired),
        .stored_chunks = atomic_load(&cache->tick),
        .evicted_chunks = atomic_load(&cache->evicted_chunks), .evicted_bytes = atomic_load(&cache->evicted_bytes),
        .damaged_chunks = atomic_load(&cache->damaged), .not_stored = atomic_load(&cache->not_stored),
        .used_bytes = atomic_load(&cache->used), .limit = cache->options.limit, .waiting = cache->waiting,
        .queued = cache->queued, .in_flight = cache->in_flight, .layers = layers,
    };
    pthread_mutex_unlock(&cache->lock);
}
