/* Sorted segments: search, and merge of an upper set over a lower one. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "lsmt.h"

#define STEP 16                    /* segments of a leaf: four cache lines */
#define NODE 16                    /* keys of a node: one cache line */
#define NO_KEY UINT32_MAX
#define HUGE_FROM (4u << 20)       /* bytes */

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

struct segment *segments_alloc(size_t count)
{
    size_t bytes = (count + 1) * sizeof(struct segment);
    struct segment *segments = malloc(bytes);
    if (segments && bytes >= HUGE_FROM) { /* with small pages each search would miss the TLB as well */
        uintptr_t begin = ((uintptr_t)segments + 4095) & ~(uintptr_t)4095;
        madvise((void *)begin, ((uintptr_t)segments + bytes - begin) & ~(uintptr_t)4095, MADV_HUGEPAGE);
    }
    return segments;
}

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

/* Fills the levels from the leaves to the root. */
static int build_tree(struct index *index)
{
    size_t sizes[INDEX_LEVELS], total = 0, keys = (index->count + STEP - 1) / STEP;
    unsigned levels = 0;
    do {
        sizes[levels++] = round_up(keys ? keys : 1, NODE);
        total += sizes[levels - 1];
        keys = (keys + NODE - 1) / NODE;
    } while (keys > 1 && levels < INDEX_LEVELS);
    index->keys = aligned_alloc(64, total * sizeof(uint32_t));
    if (!index->keys)
        return -ENOMEM;
    for (size_t i = 0; i < total; i++)
        index->keys[i] = NO_KEY;
    uint64_t last = index->count ? seg_offset(&index->segments[index->count - 1]) : 0;
    while (last >> index->shift >= NO_KEY)
        index->shift++;
    index->levels = levels;
    uint32_t *at = index->keys;
    for (unsigned i = 0; i < levels; i++) {
        index->level[i] = at;
        at += sizes[levels - 1 - i];
    }
    for (size_t i = 0; i * STEP < index->count; i++)
        index->level[levels - 1][i] = (uint32_t)(seg_offset(&index->segments[i * STEP]) >> index->shift);
    for (unsigned i = levels - 1; i > 0; i--)
        for (size_t k = 0; k * NODE < sizes[levels - 1 - i]; k++)
            index->level[i - 1][k] = index->level[i][k * NODE];
    return 0;
}

struct index *index_new(struct segment *segments, size_t count)
{
    struct index *index = calloc(1, sizeof *index);
    if (!index) {
        free(segments);
        return NULL;
    }
    atomic_init(&index->refs, 1);
    index->segments = segments, index->count = count;
    if (build_tree(index)) {
        index_unref(index);
        return NULL;
    }
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
    free(index->keys);
    free(index);
}

void index_set_tag(struct index *index, unsigned tag)
{
    for (size_t i = 0; i < index->count; i++)
        index->segments[i].word1 = (index->segments[i].word1 & ((1ull << 56) - 1)) | (uint64_t)tag << 56;
}

size_t index_find(const struct index *index, uint64_t sector)
{
    uint64_t shifted = sector >> index->shift;
    uint32_t key = shifted < NO_KEY ? (uint32_t)shifted : NO_KEY - 1;
    size_t node = 0;
    for (unsigned i = 0; i < index->levels; i++) { /* the last key that is not larger; no branch to predict */
        const uint32_t *keys = index->level[i] + node * NODE;
        unsigned below = 0;
        for (unsigned k = 0; k < NODE; k++)
            below += keys[k] <= key;
        node = node * NODE + (below ? below - 1 : 0);
    }
    size_t at = node * STEP;
    while (at && seg_offset(&index->segments[at]) > sector) /* equal keys, if `shift` cuts offsets */
        at -= STEP;
    size_t end = at + STEP < index->count ? at + STEP : index->count, first = at;
    for (; at < end; at++)
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
    if (begin == end)
        return;
    for (; *at < below->count && seg_offset(&below->segments[*at]) < end; ++*at) {
        merge_put(merge, seg_trim(below->segments[*at], begin, end));
        if (seg_end(&below->segments[*at]) > end)
            return;
    }
}

struct index *index_merge(const struct index *top, const struct index *below)
{
    /* Each upper segment can cut a lower one in two. */
    struct merge merge = {segments_alloc(2 * top->count + below->count), 0};
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
