/* Recording which chunks of some layers are read first. */
#include <stdlib.h>
#include <string.h>

#include "lsmt_cache_state.h"

struct traced {
    struct remote *remote;
    uint8_t *seen; /* a bit for each chunk */
};

struct trace {
    struct cache *cache;
    struct trace *next;
    size_t count, most; /* at `most` the layers are let go */
    struct trace_entry *entry;
    uint32_t layers;
    struct traced layer[];
};

static void release(struct trace *trace)
{
    for (uint32_t i = 0; i < trace->layers; i++)
        free(trace->layer[i].seen);
    free(trace->entry);
    free(trace);
}

struct trace *trace_start(struct cache *cache, struct remote *const *remotes, uint32_t count, size_t most)
{
    struct trace *trace = calloc(1, sizeof *trace + count * sizeof trace->layer[0]);
    if (!trace)
        return NULL;
    trace->cache = cache;
    trace->most = most;
    bool whole = (trace->entry = malloc((most + 1) * sizeof *trace->entry)) != NULL;
    for (; trace->layers < count && whole; trace->layers++) {
        struct traced *layer = &trace->layer[trace->layers];
        layer->remote = remotes[trace->layers];
        whole = (layer->seen = calloc(1, layer->remote->chunks / 8 + 1)) != NULL;
    }
    if (!whole) {
        release(trace);
        return NULL;
    }
    pthread_mutex_lock(&cache->lock);
    cache_ref(cache);
    for (uint32_t i = 0; i < count; i++) {
        remotes[i]->refs++;
        atomic_fetch_add(&remotes[i]->traces, 1);
    }
    trace->next = cache->traces;
    cache->traces = trace;
    pthread_mutex_unlock(&cache->lock);
    return trace;
}

static void let_go(struct trace *trace)
{
    for (uint32_t i = 0; i < trace->layers; i++)
        atomic_fetch_sub(&trace->layer[i].remote->traces, 1);
}

static void touch(struct trace *trace, struct remote *remote, uint64_t number)
{
    for (uint32_t i = 0; i < trace->layers && trace->count < trace->most; i++) {
        struct traced *layer = &trace->layer[i];
        uint8_t bit = (uint8_t)(1u << (number & 7));
        if (layer->remote != remote || layer->seen[number >> 3] & bit)
            continue;
        layer->seen[number >> 3] |= bit;
        trace->entry[trace->count++] = (struct trace_entry){i, number};
        if (trace->count == trace->most)
            let_go(trace);
    }
}

/* Hits take the lock only as long as a recording has room. */
void trace_touch(struct remote *remote, uint64_t number)
{
    pthread_mutex_lock(&remote->cache->lock);
    for (struct trace *trace = remote->cache->traces; trace; trace = trace->next)
        touch(trace, remote, number);
    pthread_mutex_unlock(&remote->cache->lock);
}

size_t trace_count(struct trace *trace)
{
    pthread_mutex_lock(&trace->cache->lock);
    size_t count = trace->count;
    pthread_mutex_unlock(&trace->cache->lock);
    return count;
}

size_t trace_copy(struct trace *trace, struct trace_entry *out, size_t room)
{
    pthread_mutex_lock(&trace->cache->lock);
    size_t count = trace->count < room ? trace->count : room;
    memcpy(out, trace->entry, count * sizeof *out);
    pthread_mutex_unlock(&trace->cache->lock);
    return count;
}

void trace_free(struct trace *trace)
{
    if (!trace)
        return;
    struct cache *cache = trace->cache;
    pthread_mutex_lock(&cache->lock);
    struct trace **at = &cache->traces;
    while (*at != trace)
        at = &(*at)->next;
    *at = trace->next;
    if (trace->count < trace->most)
        let_go(trace);
    for (uint32_t i = 0; i < trace->layers; i++)
        remote_unref(trace->layer[i].remote);
    pthread_mutex_unlock(&cache->lock);
    release(trace);
    cache_unref(cache);
}
