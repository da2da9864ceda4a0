/* Indexes against a plain sorted array: what goes in comes out, and each search gives what a scan gives.
 *
 *   c_index SEED
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt_index.h"

#define MOST 5000
#define MAX_MOFFSET ((1ull << 55) - 1)

struct array {
    struct segment segments[2 * MOST + 2];
    size_t count;
};

static uint64_t draw(void)
{
    static uint64_t state;
    state += (uint64_t)random() << 32 ^ (uint64_t)random() << 16 ^ (uint64_t)random();
    return state * 0x9E3779B97F4A7C15ull >> 8 ^ state;
}

/* Mostly small, sometimes with any number of bits. */
static uint64_t draw_below(uint64_t end, unsigned odd)
{
    uint64_t limit = draw() % odd ? end < 64 ? end : 64 : end >> draw() % 40;
    return limit ? draw() % limit : 0;
}

static bool same(const struct segment *a, const struct segment *b)
{
    return a->word0 == b->word0 && a->word1 == b->word1;
}

static void put(struct array *array, struct segment s)
{
    if (!array->count || !seg_join(&array->segments[array->count - 1], &s))
        array->segments[array->count++] = s;
}

/* `odd`: one in so many is unlike its neighbours. */
static void make(struct array *array, size_t count, unsigned odd, bool tagged)
{
    uint64_t at = draw() % 4 ? 0 : draw() % LSMT_MAX_SECTORS, moffset = 8;
    array->count = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t length = 1 + draw_below(LSMT_MAX_LENGTH, odd), left = LSMT_MAX_SECTORS - at;
        at += draw() % 3 ? draw_below(left, odd) : 0; /* or it touches the one before */
        if (at + length > LSMT_MAX_SECTORS)
            break;
        moffset = draw() % odd ? moffset : draw_below(MAX_MOFFSET, 2);
        bool zeroed = draw() % odd == 0;
        put(array, seg_make(at, length, moffset, zeroed, tagged ? (unsigned)draw_below(256, odd) : 0));
        at += length;
        moffset += zeroed || moffset + length > MAX_MOFFSET ? 0 : length;
    }
}

static struct index *index_made_of(const struct array *array)
{
    struct index_builder *builder = index_begin();
    for (size_t i = 0; i < array->count; i++)
        index_put(builder, array->segments[i]);
    struct index *index = index_end(builder);
    assert(index && index->count == array->count);
    return index;
}

static void check_content(const struct array *array, const struct index *index)
{
    struct index_cursor cursor = {0, 0};
    struct segment s;
    for (size_t i = 0; i < array->count; i++, cursor.slot++)
        assert(index_at(index, &cursor, &s) && same(&s, &array->segments[i]));
    assert(!index_at(index, &cursor, &s) && !index_at(index, &cursor, &s));
}

static size_t scan(const struct array *array, uint64_t sector)
{
    size_t low = 0, high = array->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (seg_end(&array->segments[middle]) <= sector)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void check_found(const struct array *array, const struct index *index, struct index_cursor cursor, size_t expected)
{
    struct segment s;
    for (size_t i = expected; i < array->count && i < expected + 3; i++, cursor.slot++)
        assert(index_at(index, &cursor, &s) && same(&s, &array->segments[i]));
    if (expected + 3 > array->count)
        assert(!index_at(index, &cursor, &s));
}

static void check_find(const struct array *array, const struct index *index, uint64_t sector)
{
    size_t expected = scan(array, sector);
    check_found(array, index, index_find(index, sector), expected);
    check_found(array, index, index_find_plainly(index, sector), expected);
}

static void check_search(const struct array *array, const struct index *index)
{
    static const uint64_t edges[] = {0, 1, UINT32_MAX - 1, UINT32_MAX, 1ull << 32, LSMT_MAX_SECTORS - 1, LSMT_MAX_SECTORS};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        check_find(array, index, edges[i]);
    for (size_t i = 0; i < array->count; i++) {
        uint64_t begin = seg_offset(&array->segments[i]), end = seg_end(&array->segments[i]);
        check_find(array, index, begin);
        check_find(array, index, end - 1);
        check_find(array, index, end);
        check_find(array, index, begin ? begin - 1 : 0);
        check_find(array, index, draw() % LSMT_MAX_SECTORS);
    }
}

static void check_tagged(struct array *array, struct index *index)
{
    unsigned tag = (unsigned)(draw() % 256);
    struct index *tagged = index_tagged(index, tag);
    check_content(array, index);
    for (size_t i = 0; i < array->count; i++)
        array->segments[i].word1 = (array->segments[i].word1 & ((1ull << 56) - 1)) | (uint64_t)tag << 56;
    check_content(array, tagged);
    check_search(array, tagged);
    index_unref(tagged);
}

/* Upper over lower, sector by sector of what the segments begin and end. */
static void check_merge(const struct array *top, const struct array *below, const struct index *upper,
                        const struct index *lower)
{
    static struct array expected;
    size_t at = 0;
    uint64_t done = 0;
    expected.count = 0;
    for (size_t i = 0; i <= top->count; i++) {
        uint64_t end = i < top->count ? seg_offset(&top->segments[i]) : UINT64_MAX;
        for (at = scan(below, done); done < end && at < below->count && seg_offset(&below->segments[at]) < end; at++)
            put(&expected, seg_trim(below->segments[at], done, end));
        if (i < top->count)
            put(&expected, top->segments[i]), done = seg_end(&top->segments[i]);
    }
    struct index *merged = index_merge(upper, lower);
    assert(merged);
    check_content(&expected, merged);
    index_unref(merged);
}

static void run(size_t count, unsigned odd)
{
    static struct array array, other;
    make(&array, count, odd, true);
    make(&other, count / 2, odd, true);
    struct index *index = index_made_of(&array), *below = index_made_of(&other);
    check_content(&array, index);
    check_search(&array, index);
    check_merge(&array, &other, index, below);
    check_merge(&other, &array, below, index);
    index_unref(index);
    index_unref(below);
    make(&array, count, odd, false);
    index = index_made_of(&array);
    check_tagged(&array, index);
    index_unref(index);
}

/* Segments so alike that a block holds as many as it ever does. */
static void check_alike(void)
{
    static struct array array;
    for (uint64_t count = 1; count < 200; count++) {
        array.count = 0;
        for (uint64_t i = 0; i < count; i++)
            put(&array, seg_make(2 * i, 1, 8 + i, false, 3));
        struct index *index = index_made_of(&array);
        check_content(&array, index);
        check_search(&array, index);
        index_unref(index);
    }
}

/* Even segments that have nothing in common, in an image of 1 TiB, take no more than an entry on disk does. */
static void check_size(void)
{
    static struct array array;
    uint64_t at = 0, step = (1ull << 31) / MOST;
    for (array.count = 0; array.count < MOST; at += step)
        put(&array, seg_make(at + draw() % (step / 2), 1 + draw() % LSMT_MAX_LENGTH, draw() % (1ull << 35),
                             draw() % 2, (unsigned)(draw() % 256)));
    struct index *index = index_made_of(&array);
    check_content(&array, index);
    check_search(&array, index);
    assert(index_bytes(index) <= 16 * MOST);
    index_unref(index);
}

int main(int count, char **arguments)
{
    if (count != 2)
        return 2;
    srandom((unsigned)atoi(arguments[1]));
    for (size_t size = 0; size < 40; size++)
        for (unsigned odd = 1; odd <= 100; odd *= 10)
            run(size, odd);
    for (unsigned power = 6; power <= 12; power++)
        for (int more = -1; more <= 1; more++)
            for (unsigned odd = 1; odd <= 1000; odd *= 10)
                run((size_t)((1 << power) + more), odd);
    check_alike();
    check_size();
    puts("done");
    return 0;
}
