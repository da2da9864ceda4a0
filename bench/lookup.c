/* Which structure for an index of segments? Each search depends on the one before and reads where the found segment's data
 * lies, so that latency is measured. Candidates: a sorted array of entries as on disk (16 bytes); over every 16th of them
 * an Eytzinger array, or a static B+-tree; such a tree over groups of 16 keys and 16 records (12 bytes a segment); and the
 * packed blocks that the library has. `load` is what all of them are up against: a load from a random one of the entries.
 *
 *   cc -O2 -std=gnu11 -Iaenv/_native -o lookup bench/lookup.c aenv/_native/c_lsmt_index.c aenv/_native/c_lsmt_merge.c
 *   ./lookup 1000 100000 1000000 10000000
 */
#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "lsmt_index.h"

#define STEP 16
#define ROUNDS 400000

/* The widths suffice for images of 2 TiB in files of 1 PiB. */
struct group {
    uint32_t begin[STEP];
    uint64_t record[STEP]; /* place 41 bits, length 14, zeroed 1, tag 8 */
};

static struct segment *segments;
static struct group *groups;
static struct index *packed;
static size_t count, fences, tree_levels;
static uint64_t span;
static uint64_t *fence, *eytzinger;
static uint32_t *eytzinger_place, *tree[8];

static uint64_t offset_of(size_t i) { return seg_offset(&segments[i]); }
static uint64_t end_of(size_t i) { return seg_end(&segments[i]); }
static uint64_t place_of(size_t i) { return i < count ? seg_moffset(&segments[i]) : 0; }

static void *array(size_t bytes)
{
    void *memory;
    bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
    assert(posix_memalign(&memory, 2 << 20, bytes) == 0);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memset(memory, 0xff, bytes);
}

static uint64_t in_group(size_t group, uint64_t sector)
{
    size_t at = group * STEP, end = at + STEP < count ? at + STEP : count, first = at;
    for (; at < end; at++)
        first += end_of(at) <= sector;
    return place_of(first);
}

static uint64_t by_array(uint64_t sector)
{
    size_t low = 0;
    for (size_t left = count; left > 1; left -= left / 2)
        low = offset_of(low + left / 2) <= sector ? low + left / 2 : low;
    return place_of(low + (end_of(low) <= sector));
}

static void fill_eytzinger(size_t node, size_t *next)
{
    if (node > fences)
        return;
    fill_eytzinger(2 * node, next);
    eytzinger[node] = fence[*next];
    eytzinger_place[node] = (uint32_t)(*next)++;
    fill_eytzinger(2 * node + 1, next);
}

static uint64_t by_eytzinger(uint64_t sector)
{
    size_t node = 1;
    while (node <= fences) {
        __builtin_prefetch(eytzinger + node * 8);
        node = 2 * node + (eytzinger[node] <= sector);
    }
    node >>= __builtin_ctzll(~node) + 1; /* back to where the search last went left: the first larger key */
    size_t place = node ? eytzinger_place[node] : fences;
    return in_group(place ? place - 1 : 0, sector);
}

static void fill_tree(void)
{
    size_t keys = fences, level = 0;
    uint32_t *built[8];
    built[0] = array((keys + STEP) * 4);
    for (size_t i = 0; i < keys; i++)
        built[0][i] = (uint32_t)fence[i];
    while (keys > STEP) {
        size_t nodes = (keys + STEP - 1) / STEP;
        built[level + 1] = array((nodes + STEP) * 4);
        for (size_t i = 0; i < nodes; i++)
            built[level + 1][i] = built[level][i * STEP];
        keys = nodes, level++;
    }
    tree_levels = level + 1;
    for (size_t i = 0; i < tree_levels; i++)
        tree[i] = built[level - i];
}

static size_t walk_tree(uint64_t sector)
{
    size_t node = 0;
    for (size_t i = 0; i < tree_levels; i++) {
        const uint32_t *keys = tree[i] + node * STEP;
        unsigned below = 0;
        for (int k = 0; k < STEP; k++)
            below += keys[k] <= (uint32_t)sector;
        node = node * STEP + (below ? below - 1 : 0);
    }
    return node;
}

static uint64_t by_tree(uint64_t sector) { return in_group(walk_tree(sector), sector); }

static uint64_t by_groups(uint64_t sector)
{
    size_t at = walk_tree(sector);
    const struct group *group = &groups[at];
    __builtin_prefetch(group->record);
    __builtin_prefetch(group->record + STEP / 2);
    unsigned below = 0;
    for (int k = 0; k < STEP; k++)
        below += group->begin[k] <= (uint32_t)sector;
    size_t found = at * STEP + (below ? below - 1 : 0);
    uint64_t record = group->record[found % STEP];
    if (group->begin[found % STEP] + (record >> 41 & LSMT_MAX_LENGTH) <= sector)
        record = ++found < count ? groups[found / STEP].record[found % STEP] : 0;
    return record & ((1ull << 41) - 1);
}

static uint64_t by_blocks(uint64_t sector)
{
    struct index_cursor cursor = index_find(packed, sector);
    struct segment found;
    return index_at(packed, &cursor, &found) ? seg_moffset(&found) : 0;
}

static uint64_t by_load(uint64_t sector) { return segments[sector % count].word1; }

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 20;
}

static double nanoseconds(uint64_t (*find)(uint64_t))
{
    double best = 1e9;
    uint64_t state = 1, sum = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < ROUNDS; i++)
            sum += find((draw(&state) + (sum & 1)) % span);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double each = ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / ROUNDS;
        best = each < best ? each : best;
    }
    for (uint64_t sector = 0; find != by_load && sector < span; sector += 1 + span / 10007)
        assert(find(sector) == by_array(sector));
    return best;
}

/* `scattered`: of 64 layers, with segments of any size at random places. */
static void make(bool scattered)
{
    uint64_t at = 0, length = 8, place = 8, tag = 0, state = 7;
    struct index_builder *builder = index_begin();
    for (size_t i = 0; i < count; i++) {
        if (scattered)
            length = 8 * (1 + draw(&state) % 16), tag = draw(&state) % 64, place = 8 + 8 * (draw(&state) % (1 << 25));
        segments[i] = seg_make(at, length, place, false, (unsigned)tag);
        groups[i / STEP].begin[i % STEP] = (uint32_t)at;
        groups[i / STEP].record[i % STEP] = place | length << 41 | tag << 56;
        index_put(builder, segments[i]);
        at += length + (scattered ? 8 * (1 + draw(&state) % 32) : 8);
        place += length;
    }
    span = at;
    packed = index_end(builder);
    assert(packed);
    for (size_t i = 0; i < fences; i++)
        fence[i] = offset_of(i * STEP);
    size_t next = 0;
    fill_eytzinger(1, &next);
    fill_tree();
}

static void compare(bool scattered)
{
    static uint64_t (*const finds[])(uint64_t) = {by_array, by_eytzinger, by_tree, by_groups, by_blocks, by_load};
    fences = (count + STEP - 1) / STEP;
    segments = array(count * sizeof *segments);
    groups = array((count / STEP + 1) * sizeof *groups);
    fence = array(fences * sizeof *fence);
    eytzinger = array((fences + 9) * sizeof *eytzinger);
    eytzinger_place = array((fences + 9) * sizeof *eytzinger_place);
    make(scattered);
    printf("%8zu %s", count, scattered ? "scattered" : "one layer");
    for (size_t i = 0; i < sizeof finds / sizeof *finds; i++)
        printf("  %9.0f", nanoseconds(finds[i]));
    printf("  %9.1f\n", (double)index_bytes(packed) / (double)count);
    fflush(stdout);
    index_unref(packed);
    free(segments), free(groups), free(fence), free(eytzinger), free(eytzinger_place);
}

int main(int arguments, char **argument)
{
    puts("segments                array  eytzinger    b+-tree     groups     blocks       load  bytes of a segment in blocks");
    for (int i = 1; i < arguments; i++) {
        count = (size_t)atoll(argument[i]);
        assert(count);
        compare(false);
        compare(true);
    }
    return 0;
}
