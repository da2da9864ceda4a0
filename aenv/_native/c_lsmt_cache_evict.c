/* Room in the chunk cache: the chunks that were not used for the longest time go, of all layers alike. */
#include <stdlib.h>
#include <string.h>

#include "lsmt_cache_state.h"

static bool evictable(unsigned word)
{
    return (word & WORD_STATE) == CHUNK_PRESENT || (word & WORD_STATE) == CHUNK_UNVERIFIED;
}

/* The `rank`-th largest of `values` (from 0), which it reorders. */
static uint32_t select_largest(uint32_t *values, size_t count, size_t rank)
{
    size_t low = 0, high = count - 1;
    while (low < high) {
        uint32_t pivot = values[low + (high - low) / 2];
        size_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i > j)
                break;
            uint32_t other = values[i];
            values[i++] = values[j];
            values[j] = other;
            if (!j--)
                break;
        }
        if (rank <= j && j < count)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return values[rank];
}

static uint32_t age_of(const struct cache *cache, const struct chunk *chunk)
{
    return atomic_load_explicit(&cache->tick, memory_order_relaxed) -
           atomic_load_explicit(&chunk->used, memory_order_relaxed);
}

/* The age from which on so many chunks are left; 0 if that cannot be told. */
static uint32_t age_limit(struct cache *cache, uint64_t bytes)
{
    size_t room = 0, count = 0;
    for (struct remote *r = cache->remotes; r; r = r->next)
        room += atomic_load(&r->present);
    uint32_t *ages = malloc((room + 1) * sizeof *ages);
    if (!ages)
        return 0;
    for (struct remote *r = cache->remotes; r; r = r->next)
        for (uint64_t i = 0; i < r->chunks && count < room && atomic_load(&r->present); i++)
            if (evictable(atomic_load_explicit(&r->chunk[i].word, memory_order_relaxed)))
                ages[count++] = age_of(cache, &r->chunk[i]);
    uint64_t used = atomic_load(&cache->used), mean = count ? used / count + 1 : 1;
    size_t rank = (size_t)(bytes / mean);
    uint32_t found = count ? select_largest(ages, count, rank < count ? rank : count - 1) : 0;
    free(ages);
    return found;
}

static void evict_from(struct remote *remote, uint32_t age, uint64_t goal)
{
    struct cache *cache = remote->cache;
    for (uint64_t i = 0; i < remote->chunks && atomic_load(&cache->used) > goal; i++) {
        unsigned word = atomic_load_explicit(&remote->chunk[i].word, memory_order_relaxed);
        if (!evictable(word) || age_of(cache, &remote->chunk[i]) < age || !remote_drop(remote, i, word))
            continue;
        add(&cache->evicted_chunks, 1);
        add(&cache->evicted_bytes, chunk_length(remote, i));
    }
}

/* Its files must be open while chunks are dropped. */
static bool hold(struct remote *remote)
{
    struct cache *cache = remote->cache;
    pthread_mutex_lock(&cache->lock);
    bool open = remote->refs || remote_open_files(remote) == 0;
    remote->refs += open;
    pthread_mutex_unlock(&cache->lock);
    return open;
}

static void release(struct remote *remote)
{
    struct cache *cache = remote->cache;
    pthread_mutex_lock(&cache->lock);
    remote_unref(remote);
    pthread_mutex_unlock(&cache->lock);
}

static void evict_to(struct cache *cache, uint64_t goal)
{
    /* Chunks differ in length: what the first pass leaves, the next ones find. The last takes any chunk. */
    for (int pass = 0; pass < 4 && atomic_load(&cache->used) > goal; pass++) {
        uint32_t age = pass < 3 ? age_limit(cache, atomic_load(&cache->used) - goal) : 0;
        for (struct remote *r = cache->remotes; r && atomic_load(&cache->used) > goal; r = r->next)
            if (atomic_load(&r->present) && hold(r)) {
                evict_from(r, age, goal);
                release(r);
            }
    }
}

void cache_shrink(struct cache *cache)
{
    uint64_t used = atomic_load(&cache->used), step = cache->high - cache->low + cache->options.chunk_size;
    evict_to(cache, used > cache->high ? cache->low : used > step ? used - step : 0);
}

void cache_forget_empty(struct cache *cache)
{
    struct remote **at = &cache->remotes;
    while (*at) {
        struct remote *remote = *at;
        pthread_mutex_lock(&cache->lock);
        bool idle = !remote->refs && !atomic_load(&remote->present);
        if (idle)
            *at = remote->next;
        pthread_mutex_unlock(&cache->lock);
        if (idle) {
            remote_unlink(cache, remote->name);
            remote_free(remote);
        } else {
            at = &remote->next;
        }
    }
}

static bool take(struct cache *cache, uint64_t bytes)
{
    uint64_t used = atomic_load(&cache->used);
    while (used + bytes <= cache->options.limit)
        if (atomic_compare_exchange_weak(&cache->used, &used, used + bytes))
            return true;
    return false;
}

bool cache_make_room(struct cache *cache, uint64_t bytes)
{
    if (bytes > cache->options.limit)
        return false;
    bool taken = take(cache, bytes);
    /* Between the high mark and the limit one fetcher evicts and the others go on. */
    if (taken && (atomic_load(&cache->used) <= cache->high || pthread_mutex_trylock(&cache->evicting)))
        return true;
    if (!taken)
        pthread_mutex_lock(&cache->evicting);
    uint64_t room = cache->options.limit - bytes; /* a cache of a few chunks has no marks to speak of */
    if (taken && atomic_load(&cache->used) > cache->high)
        evict_to(cache, cache->low);
    for (int tries = 0; !taken && tries < 4; tries++) { /* others take what was freed, too */
        evict_to(cache, cache->low < room ? cache->low : room);
        taken = take(cache, bytes);
    }
    cache_forget_empty(cache);
    pthread_mutex_unlock(&cache->evicting);
    return taken;
}
