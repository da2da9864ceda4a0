/* What readers wait for and fetchers bring: one want for each chunk on the way, in the lists of its origin. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "lsmt_cache_state.h"

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

#define NS_PER_MS 1000000ull
#define NS_PER_S 1000000000ull
#define CROWD 256u /* readers that may wait for an origin that brings nothing */

/* --- origins ------------------------------------------------------------------------------------------------- */

struct origin *origin_new(struct cache *cache)
{
    struct origin *origin = calloc(1, sizeof *origin);
    if (!origin)
        return NULL;
    atomic_init(&origin->refs, 1);
    origin->cache = cache_ref(cache);
    condition_init(&origin->ready);
    return origin;
}

struct origin *origin_ref(struct origin *origin)
{
    atomic_fetch_add(&origin->refs, 1);
    return origin;
}

void origin_unref(struct origin *origin)
{
    if (!origin || atomic_fetch_sub(&origin->refs, 1) != 1)
        return;
    pthread_cond_destroy(&origin->ready);
    cache_unref(origin->cache);
    free(origin);
}

static void list_append(struct want_list *list, struct want *want)
{
    want->previous = list->tail;
    want->next = NULL;
    *(list->tail ? &list->tail->next : &list->head) = want;
    list->tail = want;
}

static void list_remove(struct want_list *list, struct want *want)
{
    *(want->previous ? &want->previous->next : &list->head) = want->next;
    *(want->next ? &want->next->previous : &list->tail) = want->previous;
}

static struct want_list *list_of(const struct want *want) { return &want->remote->origin->list[want->class]; }

/* --- wants --------------------------------------------------------------------------------------------------- */

static struct want **bucket_of(const struct remote *remote, uint64_t number)
{
    uint64_t hash = ((uintptr_t)remote >> 6 ^ number) * 0x9E3779B97F4A7C15ull;
    return &remote->cache->bucket[hash >> 50 & (WANT_BUCKETS - 1)];
}

static struct want *want_find(const struct remote *remote, uint64_t number)
{
    struct want *want = *bucket_of(remote, number);
    while (want && (want->remote != remote || want->number != number))
        want = want->chain;
    return want;
}

static void want_unref(struct want *want)
{
    if (--want->refs)
        return;
    if (want->fetch)
        fetch_unref(want->fetch);
    pthread_cond_destroy(&want->done);
    free(want);
}

static void want_forget(struct want *want)
{
    struct want **at = bucket_of(want->remote, want->number);
    while (*at != want)
        at = &(*at)->chain;
    *at = want->chain;
    want_unref(want);
}

static void want_fail(struct want *want, int error)
{
    struct remote *remote = want->remote;
    if (want->state == WANT_QUEUED) {
        list_remove(list_of(want), want);
        remote->cache->queued--;
    }
    want->state = WANT_FAILED;
    want->error = error;
    add(&remote->failed, 1);
    add(&remote->cache->failed, 1);
    pthread_cond_broadcast(&want->done);
    want_forget(want);
}

/* The chunk's want, made if there is none; NULL if there is no memory. Demand overtakes what was queued for later. */
static struct want *want_get(struct remote *remote, uint64_t number, enum want_class class, bool *made)
{
    struct want *want = want_find(remote, number);
    *made = !want;
    if (want) {
        if (want->state == WANT_QUEUED && class < want->class) {
            list_remove(list_of(want), want);
            want->class = class;
            list_append(list_of(want), want);
            pthread_cond_signal(&remote->origin->ready);
        }
        return want;
    }
    if (!(want = calloc(1, sizeof *want)))
        return NULL;
    struct want **bucket = bucket_of(remote, number);
    *want = (struct want){.chain = *bucket, .remote = remote, .number = number, .refs = 1, .class = class};
    condition_init(&want->done);
    *bucket = want;
    list_append(list_of(want), want);
    remote->cache->queued++;
    pthread_cond_signal(&remote->origin->ready);
    return want;
}

static bool absent(const struct remote *remote, uint64_t number)
{
    unsigned state = atomic_load(&remote->chunk[number].word) & WORD_STATE;
    return state == CHUNK_ABSENT || state == CHUNK_EVICTING;
}

static bool queue_later(struct remote *remote, uint64_t number, enum want_class class, bool mark)
{
    bool made;
    if (number >= remote->chunks || !absent(remote, number))
        return false;
    struct want *want = want_get(remote, number, class, &made);
    if (want && made)
        want->mark = mark;
    return want && made;
}

/* Somebody asks for chunk `number`: if that is where a sequential reader was expected, what follows is queued. */
static void ahead(struct remote *remote, uint64_t number)
{
    uint64_t bytes = remote->cache->options.readahead, eighth = remote->cache->options.limit / 8;
    unsigned most = (unsigned)((bytes < eighth ? bytes : eighth) >> remote->shift);
    for (unsigned i = 0; i < STREAMS && most; i++) {
        struct stream *s = &remote->stream[i];
        if (number < s->begin || number > s->end || !s->end)
            continue;
        s->window = !s->window ? 1 : 2 * s->window < most ? 2 * s->window : most;
        uint64_t from = s->end > number ? s->end : number + 1;
        for (uint64_t n = from; n < from + s->window; n++)
            queue_later(remote, n, WANT_AHEAD, n == from);
        s->begin = number + 1;
        s->end = from + s->window;
        return;
    }
    remote->stream[remote->stream_hand++ % STREAMS] = (struct stream){number + 1, number + 1, 0};
}

void want_ahead(struct remote *remote, uint64_t number)
{
    pthread_mutex_lock(&remote->cache->lock);
    ahead(remote, number);
    pthread_mutex_unlock(&remote->cache->lock);
}

/* Queues what is missing of [number, last], so that it comes together. Gives the want of `number`, or NULL: it is in the
 * cache by now (*error 0), or cannot be waited for. */
static struct want *demand(struct remote *remote, uint64_t number, uint64_t last, int *error)
{
    struct want *first = NULL;
    *error = 0;
    if (remote->origin->closed)
        *error = -EIO;
    for (uint64_t n = number; n <= last && !*error; n++) {
        bool made;
        struct want *want = want_find(remote, n);
        if (!want && !absent(remote, n)) {
            if (n == number)
                return NULL;
            continue;
        }
        if (!(want = want_get(remote, n, WANT_DEMAND, &made)))
            *error = -ENOMEM;
        else if (made || want->mark) {
            want->mark = false;
            ahead(remote, n);
        }
        if (n == number && want) {
            first = want;
            first->refs++;
            add(made ? &remote->misses : &remote->joined, 1);
        }
    }
    if (*error && first) {
        want_unref(first);
        first = NULL;
    }
    return first;
}

static int wait_until_done(struct want *want)
{
    struct cache *cache = want->remote->cache;
    struct origin *origin = origin_ref(want->remote->origin);
    uint64_t now = monotonic_ns(), wait = cache->options.wait_ms * NS_PER_MS;
    int rc = 0;
    if (!origin->waiting++)
        origin->progress = now;
    /* A crowd before a place that does not answer would take all threads of a front end. */
    uint64_t until = origin->waiting > CROWD && now - origin->progress > wait / 4 ? now : now + wait;
    cache->waiting++;
    while (want->state < WANT_DONE && !rc && !want->remote->origin->closed)
        rc = condition_wait(&want->done, &cache->lock, until);
    cache->waiting--;
    origin->waiting--;
    origin_unref(origin);
    if (want->state >= WANT_DONE)
        return want->error;
    add(&cache->expired, 1);
    if (want->state == WANT_QUEUED && want->refs == 2) /* nobody else waits: a dead origin must not collect wants */
        want_fail(want, -EIO);
    return -EIO;
}

int want_ask(struct remote *remote, uint64_t number, uint64_t last, bool direct)
{
    pthread_mutex_t *lock = &remote->cache->lock;
    int rc;
    pthread_mutex_lock(lock);
    struct want *want = demand(remote, number, last, &rc);
    if (want) {
        remote->direct = direct;
        rc = -EAGAIN;
        want_unref(want);
    } else if (!rc) {
        rc = 1;
    }
    pthread_mutex_unlock(lock);
    return rc;
}

int want_read(struct remote *remote, uint64_t number, uint64_t last, char *buffer, size_t length, size_t offset,
              bool direct)
{
    pthread_mutex_t *lock = &remote->cache->lock;
    int rc;
    pthread_mutex_lock(lock);
    struct want *want = demand(remote, number, last, &rc);
    if (!want) {
        pthread_mutex_unlock(lock);
        return rc ? rc : 1;
    }
    remote->direct = direct;
    rc = wait_until_done(want);
    pthread_mutex_unlock(lock);
    if (!rc) {
        const struct fetch *fetch = want->fetch;
        memcpy(buffer, fetch->buffer + ((number - fetch->first) << remote->shift) + offset, length);
    }
    pthread_mutex_lock(lock);
    if (want->state == WANT_FAILED && want->fetch && want->epoch != remote->epoch && !remote->origin->closed)
        rc = 1; /* since that fetch began the layer was opened again: its new source has not been asked */
    want_unref(want);
    pthread_mutex_unlock(lock);
    return rc;
}

size_t remote_prefetch(struct remote *remote, const uint64_t *chunks, size_t count, bool urgent, bool direct)
{
    struct cache *cache = remote->cache;
    uint64_t most = cache->options.limit >> remote->shift;
    size_t queued = 0;
    pthread_mutex_lock(&cache->lock);
    remote->direct = direct;
    for (size_t i = 0; i < count && remote->origin && !remote->origin->closed && cache->queued < most; i++)
        queued += queue_later(remote, chunks[i], urgent ? WANT_AHEAD : WANT_PREFETCH, false);
    pthread_mutex_unlock(&cache->lock);
    return queued;
}

/* Calls `act` for each queued want of the layer, which may take it out. */
static void each_queued(struct remote *remote, void (*act)(struct want *, void *), void *opaque)
{
    struct origin *origin = remote->origin;
    for (int class = 0; origin && class < WANT_CLASSES; class++)
        for (struct want *want = origin->list[class].head, *next; want; want = next) {
            next = want->next;
            if (want->remote == remote)
                act(want, opaque);
        }
}

static void move_want(struct want *want, void *opaque)
{
    struct origin *origin = opaque;
    list_remove(list_of(want), want);
    list_append(&origin->list[want->class], want);
}

void remote_move(struct remote *remote, struct origin *origin)
{
    struct origin *old = remote->origin;
    if (old == origin)
        return;
    each_queued(remote, move_want, origin);
    remote->origin = origin_ref(origin);
    pthread_cond_broadcast(&origin->ready);
    origin_unref(old);
}

static void fail_want(struct want *want, void *opaque)
{
    (void)opaque;
    want_fail(want, -ECANCELED);
}

void remote_cancel(struct remote *remote) { each_queued(remote, fail_want, NULL); }

/* --- fetches ------------------------------------------------------------------------------------------------- */

void fetch_unref(struct fetch *fetch)
{
    if (!fetch || atomic_fetch_sub(&fetch->refs, 1) != 1)
        return;
    origin_unref(fetch->origin);
    free(fetch->buffer);
    free(fetch);
}

/* How many queued neighbours from `want` on go into one fetch. What can wait does not ride with what cannot. */
static unsigned run_length(const struct want *want)
{
    const struct remote *remote = want->remote;
    unsigned most = remote->cache->options.fetch_bytes >> remote->shift, count = 1;
    enum want_class limit = want->class == WANT_DEMAND ? WANT_AHEAD : want->class;
    while (count < most) {
        const struct want *next = want_find(remote, want->number + count);
        if (!next || next->state != WANT_QUEUED || next->class > limit)
            break;
        count++;
    }
    return count;
}

static struct fetch *fetch_new(struct remote *remote, uint64_t first, unsigned count)
{
    struct fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch)
        return NULL;
    uint64_t end = (first + count) << remote->shift;
    *fetch = (struct fetch){.remote = remote, .first = first, .count = count, .offset = first << remote->shift};
    fetch->length = (end < remote->size ? end : remote->size) - fetch->offset;
    fetch->chunk_size = remote->chunk_size;
    atomic_init(&fetch->refs, 1);
    if (posix_memalign((void **)&fetch->buffer, 4096, fetch->length)) {
        free(fetch);
        return NULL;
    }
    return fetch;
}

static struct fetch *begin_fetch(struct origin *origin, struct want *leader)
{
    struct remote *remote = leader->remote;
    struct cache *cache = origin->cache;
    struct fetch *fetch = fetch_new(remote, leader->number, run_length(leader));
    if (!fetch) {
        want_fail(leader, -ENOMEM);
        return NULL;
    }
    fetch->origin = origin_ref(origin);
    fetch->prefetch = leader->class == WANT_PREFETCH;
    for (unsigned i = 0; i < fetch->count; i++) {
        struct want *want = want_find(remote, fetch->first + i);
        list_remove(list_of(want), want);
        want->state = WANT_FETCHING;
        want->epoch = remote->epoch;
        want->fetch = fetch;
        atomic_fetch_add(&fetch->refs, 1);
    }
    cache->queued -= fetch->count;
    cache->in_flight += fetch->count;
    remote->refs++;
    add(&cache->fetches, 1);
    if (fetch->prefetch) {
        uint64_t rate = cache->options.prefetch_rate, now = monotonic_ns();
        origin->prefetching++;
        if (rate) {
            uint64_t from = origin->prefetch_next > now ? origin->prefetch_next : now;
            origin->prefetch_next = from + fetch->length * NS_PER_S / rate;
        }
    }
    return fetch;
}

/* The want that goes next; NULL: none, or only prefetches for which it is too early (*until says when). */
static struct want *next_want(struct origin *origin, uint64_t *until)
{
    struct want *want = origin->list[WANT_DEMAND].head;
    if (!want)
        want = origin->list[WANT_AHEAD].head;
    if (want || !origin->list[WANT_PREFETCH].head || origin->prefetching >= origin->cache->options.prefetch_most)
        return want;
    if (origin->prefetch_next <= monotonic_ns())
        return origin->list[WANT_PREFETCH].head;
    if (origin->prefetch_next < *until)
        *until = origin->prefetch_next;
    return NULL;
}

/* Memory for a fetch must not wait for writes to a file system on an image that needs this very fetch. Without the
 * privilege it fails, and then such a file system cannot be mounted either. */
static void become_flusher(void)
{
    static _Thread_local bool is_flusher;
    if (!is_flusher)
        prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    is_flusher = true;
}

struct fetch *origin_take(struct origin *origin, uint32_t wait_ms)
{
    struct cache *cache = origin->cache;
    become_flusher();
    uint64_t end = monotonic_ns() + wait_ms * NS_PER_MS;
    struct fetch *fetch = NULL;
    pthread_mutex_lock(&cache->lock);
    while (!origin->closed && !fetch) {
        uint64_t until = end;
        struct want *want = next_want(origin, &until);
        if (want)
            fetch = begin_fetch(origin, want);
        else if (condition_wait(&origin->ready, &cache->lock, until) == ETIMEDOUT && until == end)
            break;
    }
    pthread_mutex_unlock(&cache->lock);
    return fetch;
}

bool origin_closed(struct origin *origin)
{
    pthread_mutex_lock(&origin->cache->lock);
    bool closed = origin->closed;
    pthread_mutex_unlock(&origin->cache->lock);
    return closed;
}

void origin_close(struct origin *origin)
{
    pthread_mutex_lock(&origin->cache->lock);
    origin->closed = true;
    for (int class = 0; class < WANT_CLASSES; class++)
        while (origin->list[class].head)
            want_fail(origin->list[class].head, -EIO);
    for (size_t i = 0; i < WANT_BUCKETS; i++) /* a fetcher may hang: its readers must not */
        for (struct want *want = origin->cache->bucket[i]; want; want = want->chain)
            if (want->remote->origin == origin)
                pthread_cond_broadcast(&want->done);
    pthread_cond_broadcast(&origin->ready);
    pthread_mutex_unlock(&origin->cache->lock);
}

void fetch_deliver(struct fetch *fetch)
{
    struct remote *remote = fetch->remote;
    struct cache *cache = remote->cache;
    uint64_t number = fetch->first + fetch->delivered;
    size_t length = chunk_length(remote, number);
    add(&remote->fetched_chunks, 1);
    add(&remote->fetched_bytes, length);
    add(&cache->fetched_chunks, 1);
    add(&cache->fetched_bytes, length);
    if (fetch->prefetch)
        add(&cache->prefetched, 1);
    pthread_mutex_lock(&cache->lock);
    struct want *want = want_find(remote, number);
    bool mark = want->mark, direct = remote->direct;
    want->state = WANT_DONE; /* readers go on from the buffer, those who come now, too */
    pthread_cond_broadcast(&want->done);
    cache->in_flight--;
    fetch->origin->progress = monotonic_ns();
    pthread_mutex_unlock(&cache->lock);
    remote_store(remote, number, fetch->buffer + ((size_t)fetch->delivered << remote->shift), mark, direct);
    fetch->delivered++;
    pthread_mutex_lock(&cache->lock);
    want_forget(want);
    pthread_mutex_unlock(&cache->lock);
}

void fetch_end(struct fetch *fetch, int error)
{
    struct remote *remote = fetch->remote;
    struct cache *cache = remote->cache;
    if (fetch->ended)
        return;
    fetch->ended = true;
    pthread_mutex_lock(&cache->lock);
    for (unsigned i = fetch->delivered; i < fetch->count; i++) {
        want_fail(want_find(remote, fetch->first + i), error);
        cache->in_flight--;
    }
    if (fetch->prefetch) {
        fetch->origin->prefetching--;
        pthread_cond_signal(&fetch->origin->ready);
    }
    remote_unref(remote);
    pthread_mutex_unlock(&cache->lock);
}
