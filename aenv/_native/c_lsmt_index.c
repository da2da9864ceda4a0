/* Sorted segments: search, and merge of an upper set over a lower one. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt.h"

#define FENCE_STEP 16 /* 16 segments are four cache lines */

struct segment seg_trim(struct segment s, uint64_t begin, uint64_t end)
{
    uint64_t from = seg_offset(&s) > begin ? seg_offset(&s) : begin;
    uint64_t to = seg_end(&s) < end ? seg_end(&s) : end;
    uint64_t moffset = seg_moffset(&s) + (seg_zeroed(&s) ? 0 : from - seg_offset(&s));
    return seg_make(from, to - from, moffset, seg_zeroed(&s), seg_tag(&s));
}

/* Makes one of two segments if the second goes on where the first ends, in the image and in the file. */
bool seg_join(struct segment *first, const struct segment *next)
{
    uint64_t length = seg_length(first) + seg_length(next);
    if (seg_end(first) != seg_offset(next) || seg_zeroed(first) != seg_zeroed(next) ||
        seg_tag(first) != seg_tag(next) || length > LSMT_MAX_LENGTH)
        return false;
    if (!seg_zeroed(first) && seg_moffset(first) + seg_length(first) != seg_moffset(next))
        return false;
    *first = seg_make(seg_offset(first), length, seg_moffset(first), seg_zeroed(first), seg_tag(first));
    return true;
}

struct index *index_new(struct segment *segments, size_t count)
{
    struct index *index = calloc(1, sizeof *index);
    size_t fences = (count + FENCE_STEP - 1) / FENCE_STEP;
    uint64_t *fence = malloc((fences + 1) * sizeof *fence);
    if (!index || !fence) {
        free(index), free(fence), free(segments);
        return NULL;
    }
    for (size_t i = 0; i < fences; i++)
        fence[i] = seg_offset(&segments[i * FENCE_STEP]);
    atomic_init(&index->refs, 1);
    index->segments = segments, index->count = count;
    index->fence = fence, index->fences = fences;
    return index;
}

struct index *index_ref(struct index *index)
{
    atomic_fetch_add(&index->refs, 1);
    return index;
}

void index_unref(struct index *index)
{
    if (!index || atomic_fetch_sub(&index->refs, 1) != 1)
        return;
    free(index->segments);
    free(index->fence);
    free(index);
}

void index_set_tag(struct index *index, unsigned tag)
{
    for (size_t i = 0; i < index->count; i++)
        index->segments[i].word1 = (index->segments[i].word1 & ((1ull << 56) - 1)) | (uint64_t)tag << 56;
}

size_t index_find(const struct index *index, uint64_t sector)
{
    const uint64_t *base = index->fence;
    size_t left = index->fences;
    if (!left)
        return 0;
    while (left > 1) { /* the last fence that is <= sector; compiles to conditional moves */
        size_t half = left / 2;
        base = base[half] <= sector ? base + half : base;
        left -= half;
    }
    size_t at = (size_t)(base - index->fence) * FENCE_STEP;
    size_t end = at + FENCE_STEP < index->count ? at + FENCE_STEP : index->count;
    size_t first = at;
    for (; at < end; at++) /* no early exit: a mispredicted branch costs more than 16 compares */
        first += seg_end(&index->segments[at]) <= sector;
    return first;
}

struct merge {
    struct segment *out;
    size_t count;
};

static inline void merge_put(struct merge *merge, struct segment s)
{
    if (!merge->count || !seg_join(&merge->out[merge->count - 1], &s))
        merge->out[merge->count++] = s;
}

/* Puts the parts of below[*at..] that lie in [begin, end). */
static void merge_gap(struct merge *merge, const struct index *below, size_t *at, uint64_t begin, uint64_t end)
{
    while (*at < below->count && seg_end(&below->segments[*at]) <= begin)
        ++*at;
    for (; *at < below->count && seg_offset(&below->segments[*at]) < end; ++*at) {
        merge_put(merge, seg_trim(below->segments[*at], begin, end));
        if (seg_end(&below->segments[*at]) > end)
            return;
    }
}

struct index *index_merge(const struct index *top, const struct index *below)
{
    /* Each upper segment can cut a lower one in two. */
    struct merge merge = {malloc((2 * top->count + below->count + 1) * sizeof(struct segment)), 0};
    size_t at = 0;
    uint64_t done = 0;
    if (!merge.out)
        return NULL;
    for (size_t i = 0; i < top->count; i++) {
        merge_gap(&merge, below, &at, done, seg_offset(&top->segments[i]));
        merge_put(&merge, top->segments[i]);
        done = seg_end(&top->segments[i]);
    }
    merge_gap(&merge, below, &at, done, UINT64_MAX);
    struct segment *fit = realloc(merge.out, (merge.count + 1) * sizeof *fit);
    return index_new(fit ? fit : merge.out, merge.count);
}

struct index *index_merge_all(struct index *const *lowest_first, size_t count)
{
    if (count == 1)
        return index_ref(lowest_first[0]);
    struct index *below = index_merge_all(lowest_first, count / 2);
    struct index *top = index_merge_all(lowest_first + count / 2, count - count / 2);
    struct index *merged = below && top ? index_merge(top, below) : NULL;
    index_unref(below);
    index_unref(top);
    return merged;
}
