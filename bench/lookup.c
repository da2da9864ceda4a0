/* Which search structure for an index of segments? Three candidates, each search depending on the one before, so that
 * latency is measured: a sorted array; an Eytzinger array and a static B+-tree, both over every 16th segment.
 *
 *   cc -O2 -o lookup bench/lookup.c && ./lookup
 */
#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define STEP 16
#define ROUNDS 400000

struct segment {
    uint64_t word0, word1;
};

static struct segment *segments;
static size_t count, fences, tree_levels;
static uint64_t *fence, *eytzinger;
static uint32_t *eytzinger_place, *tree[8];

static uint64_t offset_of(size_t i) { return segments[i].word0 & ((1ull << 50) - 1); }
static uint64_t end_of(size_t i) { return offset_of(i) + (segments[i].word0 >> 50); }

static void *array(size_t bytes)
{
    void *memory;
    bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
    assert(posix_memalign(&memory, 2 << 20, bytes) == 0);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memset(memory, 0xff, bytes);
}

static size_t in_group(size_t group, uint64_t sector)
{
    size_t at = group * STEP, end = at + STEP < count ? at + STEP : count, first = at;
    for (; at < end; at++)
        first += end_of(at) <= sector;
    return first;
}

static size_t by_array(uint64_t sector)
{
    size_t low = 0;
    for (size_t left = count; left > 1; left -= left / 2)
        low = offset_of(low + left / 2) <= sector ? low + left / 2 : low;
    return low + (end_of(low) <= sector);
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

static size_t by_eytzinger(uint64_t sector)
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

static size_t by_tree(uint64_t sector)
{
    size_t node = 0;
    for (size_t i = 0; i < tree_levels; i++) {
        const uint32_t *keys = tree[i] + node * STEP;
        unsigned below = 0;
        for (int k = 0; k < STEP; k++)
            below += keys[k] <= (uint32_t)sector;
        node = node * STEP + (below ? below - 1 : 0);
    }
    return in_group(node, sector);
}

static double nanoseconds(size_t (*find)(uint64_t))
{
    double best = 1e9;
    uint64_t state = 1;
    size_t sum = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < ROUNDS; i++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            sum += find(((state >> 20) + (sum & 1)) % (STEP * count));
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        double each = ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / ROUNDS;
        best = each < best ? each : best;
    }
    for (uint64_t sector = 0; sector < STEP * count; sector += 1 + STEP * count / 10007)
        assert(find(sector) == by_array(sector));
    return best;
}

int main(void)
{
    puts("segments     array  eytzinger  b+-tree   (ns)");
    for (count = 1000; count <= 10000000; count *= 10) {
        fences = (count + STEP - 1) / STEP;
        segments = array(count * sizeof *segments);
        fence = array(fences * sizeof *fence);
        eytzinger = array((fences + 9) * sizeof *eytzinger);
        eytzinger_place = array((fences + 9) * sizeof *eytzinger_place);
        for (size_t i = 0; i < count; i++)
            segments[i] = (struct segment){(STEP * i) | 8ull << 50, 8 + 8 * i};
        for (size_t i = 0; i < fences; i++)
            fence[i] = offset_of(i * STEP);
        size_t next = 0;
        fill_eytzinger(1, &next);
        fill_tree();
        printf("%8zu  %8.0f  %9.0f  %7.0f\n", count, nanoseconds(by_array), nanoseconds(by_eytzinger),
               nanoseconds(by_tree));
        fflush(stdout);
    }
    return 0;
}
