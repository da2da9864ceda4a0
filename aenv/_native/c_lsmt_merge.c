/* Segments: cutting, joining, and the merge of an upper set over a lower one. */
#include "lsmt_index.h"

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

/* The lower set, read once from its first segment to its last. */
struct lower {
    const struct index *index;
    struct index_cursor cursor;
    struct segment now;
    bool more;
};

static inline void go_on(struct lower *lower)
{
    lower->cursor.slot++;
    lower->more = index_at(lower->index, &lower->cursor, &lower->now);
}

/* Puts the parts of the lower set that lie in [begin, end). */
static void merge_gap(struct index_builder *merged, struct lower *lower, uint64_t begin, uint64_t end)
{
    while (lower->more && seg_end(&lower->now) <= begin)
        go_on(lower);
    if (begin == end)
        return;
    for (; lower->more && seg_offset(&lower->now) < end; go_on(lower)) {
        index_put(merged, seg_trim(lower->now, begin, end));
        if (seg_end(&lower->now) > end)
            return;
    }
}

struct index *index_merge(const struct index *top, const struct index *below)
{
    struct index_builder *merged = index_begin();
    struct lower lower = {.index = below};
    struct index_cursor cursor = {0, 0};
    struct segment s;
    uint64_t done = 0;
    if (!merged)
        return NULL;
    lower.more = index_at(below, &lower.cursor, &lower.now);
    for (; index_at(top, &cursor, &s); cursor.slot++) {
        merge_gap(merged, &lower, done, seg_offset(&s));
        index_put(merged, s);
        done = seg_end(&s);
    }
    merge_gap(merged, &lower, done, UINT64_MAX);
    return index_end(merged);
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
