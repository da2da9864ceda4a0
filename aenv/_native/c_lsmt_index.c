/* Indexes in memory: blocks of two cache lines, packed as tightly as what they hold allows, and a B+-tree over them. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "lsmt_index.h"

#define BLOCK 128u
#define HEAD 16u
#define ROOM (8 * (BLOCK - HEAD)) /* bits for columns and rows */
#define BLOCK_MOST 32u
#define BASE_MOST ((1ull << 45) - 1)
#define NODE 16u             /* keys of a node: one cache line */
#define NO_KEY UINT32_MAX
#define OVERHANG 64u         /* bytes behind the last block that a load may reach */
#define HUGE (2ul << 20)
#define HUGE_FROM (HUGE / 4 * 3)

/* What the segments of a block have in common, then a column of their offsets, then a row of bits for each: length - 1,
 * kind ^ that of the first, sector in the file - `base`. */
struct index_block {
    uint64_t offset : 50, last : 5, wide : 1, length_bits : 4; /* of the first segment; their number - 1; 32-bit offsets */
    uint64_t base : 45, kind : 9, moffset_bits : 6, kind_bits : 4;
    uint8_t columns[BLOCK - HEAD];
};
_Static_assert(sizeof(struct index_block) == BLOCK, "two cache lines");

static inline unsigned bits_of(uint64_t value) { return 63 - (unsigned)__builtin_clzll(value << 1 | 1); }
static inline uint64_t kind_of(const struct segment *s) { return (uint64_t)seg_tag(s) << 1 | seg_zeroed(s); }

/* --- reading a block ------------------------------------------------------------------------------------------ */

static inline uint64_t get_bits(const struct index_block *block, unsigned at, unsigned width)
{
    uint64_t word;
    memcpy(&word, (const uint8_t *)block + HEAD + at / 8, sizeof word);
    return word >> at % 8 & ((1ull << width) - 1);
}

static inline uint64_t start_of(const struct index_block *block, unsigned slot)
{
    return block->offset + (block->wide ? get_bits(block, 32 * slot, 32) : get_bits(block, 16 * slot, 16));
}

static inline unsigned row_of(const struct index_block *block, unsigned slot)
{
    return (block->wide ? 32 : 16) * (block->last + 1u) +
           slot * (block->length_bits + block->kind_bits + block->moffset_bits);
}

static inline struct segment segment_at(const struct index_block *block, unsigned slot)
{
    unsigned row = row_of(block, slot), lengths = block->length_bits, kinds = block->kind_bits;
    uint64_t kind = block->kind ^ get_bits(block, row + lengths, kinds);
    return seg_make(start_of(block, slot), 1 + get_bits(block, row, lengths),
                    block->base + get_bits(block, row + lengths + kinds, block->moffset_bits), kind & 1,
                    (unsigned)(kind >> 1));
}

bool index_at(const struct index *index, struct index_cursor *cursor, struct segment *out)
{
    if (cursor->block < index->blocks && cursor->slot > index->block[cursor->block].last)
        cursor->block++, cursor->slot = 0;
    if (cursor->block >= index->blocks)
        return false;
    *out = segment_at(&index->block[cursor->block], cursor->slot);
    return true;
}

/* --- search --------------------------------------------------------------------------------------------------- */

typedef unsigned (*node_rank_t)(const uint32_t *keys, uint32_t key);
typedef unsigned (*start_rank_t)(const struct index_block *block, uint64_t distance);

/* How many of a node's keys are not larger. */
static inline unsigned node_rank(const uint32_t *keys, uint32_t key)
{
    unsigned below = 0;
    for (unsigned i = 0; i < NODE; i++) /* no branch to predict */
        below += keys[i] <= key;
    return below;
}

/* How many of a block's segments begin no more than `distance` sectors behind the first. */
static inline unsigned start_rank(const struct index_block *block, uint64_t distance)
{
    unsigned below = 0;
    for (unsigned i = 0; i <= block->last; i++)
        below += start_of(block, i) - block->offset <= distance;
    return below;
}

/* The last block before `end` that does not begin after `sector`, or the first. */
static size_t last_before(const struct index *index, size_t end, uint64_t sector)
{
    size_t low = 0;
    for (size_t left = end; left > 1; left -= left / 2)
        low = index->block[low + left / 2].offset <= sector ? low + left / 2 : low;
    return low;
}

static inline __attribute__((always_inline)) struct index_cursor find(const struct index *index, uint64_t sector,
                                                                      node_rank_t in_node, start_rank_t in_block)
{
    uint64_t shifted = sector >> index->shift;
    uint32_t key = shifted < NO_KEY ? (uint32_t)shifted : NO_KEY - 1;
    size_t at = 0;
    for (unsigned i = 0; i < index->levels; i++) { /* the last key that is not larger */
        unsigned below = in_node(index->level[i] + at * NODE, key);
        at = at * NODE + (below ? below - 1 : 0);
    }
    if (!index->blocks)
        return (struct index_cursor){0, 0};
    __builtin_prefetch((const char *)&index->block[at] + BLOCK / 2);
    if (index->block[at].offset > sector) /* equal keys, if `shift` cuts offsets */
        at = last_before(index, at, sector);
    const struct index_block *block = &index->block[at];
    if (block->offset > sector)
        return (struct index_cursor){at, 0};
    unsigned slot = in_block(block, sector - block->offset) - 1;
    uint64_t end = start_of(block, slot) + 1 + get_bits(block, row_of(block, slot), block->length_bits);
    return (struct index_cursor){at, slot + (end <= sector)};
}

#ifdef __x86_64__
#define WIDE_VECTORS __attribute__((target("avx2,bmi2,popcnt")))

WIDE_VECTORS static inline unsigned node_rank_avx2(const uint32_t *keys, uint32_t key)
{
    __m256i all = _mm256_set1_epi32((int)key);
    __m256i low = _mm256_load_si256((const __m256i *)keys), high = _mm256_load_si256((const __m256i *)keys + 1);
    low = _mm256_cmpeq_epi32(_mm256_min_epu32(low, all), low);
    high = _mm256_cmpeq_epi32(_mm256_min_epu32(high, all), high);
    return (unsigned)_mm_popcnt_u32((unsigned)_mm256_movemask_epi8(_mm256_packs_epi32(low, high))) / 2;
}

WIDE_VECTORS static inline unsigned narrow_rank_avx2(const struct index_block *block, uint64_t distance)
{
    const __m256i *starts = (const __m256i *)block->columns;
    __m256i all = _mm256_set1_epi16((short)(distance < UINT16_MAX ? distance : UINT16_MAX));
    __m256i low = _mm256_loadu_si256(starts), high = _mm256_loadu_si256(starts + 1);
    low = _mm256_cmpeq_epi16(_mm256_min_epu16(low, all), low);
    high = _mm256_cmpeq_epi16(_mm256_min_epu16(high, all), high);
    uint64_t mask = (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
    return (unsigned)_mm_popcnt_u64(_bzhi_u64(mask, 2 * (block->last + 1u))) / 2;
}

WIDE_VECTORS static inline unsigned wide_rank_avx2(const struct index_block *block, uint64_t distance)
{
    const __m256i *starts = (const __m256i *)block->columns;
    __m256i all = _mm256_set1_epi32((int)(distance < UINT32_MAX ? distance : UINT32_MAX));
    uint32_t mask = 0;
    for (unsigned i = 0; i < BLOCK_MOST / 8; i++) {
        __m256i some = _mm256_loadu_si256(starts + i);
        some = _mm256_cmpeq_epi32(_mm256_min_epu32(some, all), some);
        mask |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(some)) << 8 * i;
    }
    return (unsigned)_mm_popcnt_u32(_bzhi_u32(mask, block->last + 1u));
}

WIDE_VECTORS static inline unsigned start_rank_avx2(const struct index_block *block, uint64_t distance)
{
    return block->wide ? wide_rank_avx2(block, distance) : narrow_rank_avx2(block, distance);
}

WIDE_VECTORS static struct index_cursor find_avx2(const struct index *index, uint64_t sector)
{
    return find(index, sector, node_rank_avx2, start_rank_avx2);
}

static bool vectors_are_wide;

__attribute__((constructor)) static void look_at_processor(void)
{
    __builtin_cpu_init();
    vectors_are_wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                       __builtin_cpu_supports("popcnt");
}
#endif

struct index_cursor index_find_plainly(const struct index *index, uint64_t sector)
{
    return find(index, sector, node_rank, start_rank);
}

struct index_cursor index_find(const struct index *index, uint64_t sector)
{
#ifdef __x86_64__
    if (vectors_are_wide)
        return find_avx2(index, sector);
#endif
    return index_find_plainly(index, sector);
}

/* --- building ------------------------------------------------------------------------------------------------- */

/* What decides how many bits a row of a block has. */
struct shape {
    uint64_t lengths, kinds, least, most, distance; /* bits in use, bits that differ, sectors in the file, last offset */
};

struct index_builder {
    struct index_block *block;
    size_t blocks, room, count;
    struct segment held[BLOCK_MOST]; /* of the block that is not full */
    unsigned holds;
    struct shape shape;
    bool failed;
};

static inline struct shape shape_of(const struct segment *s)
{
    return (struct shape){seg_length(s) - 1, 0, seg_moffset(s), seg_moffset(s), 0};
}

static inline void shape_add(struct shape *shape, const struct segment *first, const struct segment *s)
{
    uint64_t moffset = seg_moffset(s);
    shape->lengths |= seg_length(s) - 1;
    shape->kinds |= kind_of(s) ^ kind_of(first);
    shape->least = moffset < shape->least ? moffset : shape->least;
    shape->most = moffset > shape->most ? moffset : shape->most;
    shape->distance = seg_offset(s) - seg_offset(first);
}

static struct index_block head_of(const struct shape *shape, const struct segment *first, unsigned count)
{
    uint64_t base = shape->least < BASE_MOST ? shape->least : BASE_MOST;
    return (struct index_block){.offset = seg_offset(first),
                                .last = count - 1,
                                .wide = shape->distance > UINT16_MAX,
                                .length_bits = bits_of(shape->lengths),
                                .base = base,
                                .kind = kind_of(first),
                                .moffset_bits = bits_of(shape->most - base),
                                .kind_bits = bits_of(shape->kinds)};
}

static inline bool shape_fits(const struct shape *shape, unsigned count)
{
    uint64_t base = shape->least < BASE_MOST ? shape->least : BASE_MOST;
    unsigned row = bits_of(shape->lengths) + bits_of(shape->most - base) + bits_of(shape->kinds);
    return count <= BLOCK_MOST && shape->distance <= UINT32_MAX &&
           count * (row + (shape->distance > UINT16_MAX ? 32 : 16)) <= ROOM;
}

/* Bits, from the lowest of the first byte on. */
struct bits {
    uint8_t *at;
    uint64_t word;
    unsigned filled;
};

static inline void put_bits(struct bits *bits, uint64_t value, unsigned width)
{
    bits->word |= value << bits->filled;
    if (bits->filled + width >= 64) { /* never if nothing is filled: there are no 64 bits */
        memcpy(bits->at, &bits->word, sizeof bits->word);
        bits->at += sizeof bits->word;
        bits->word = value >> (64 - bits->filled);
        bits->filled -= 64;
    }
    bits->filled += width;
}

static void fill_block(const struct index_builder *builder, struct index_block *out)
{
    const struct segment *held = builder->held;
    struct index_block head = head_of(&builder->shape, held, builder->holds);
    unsigned lengths = head.length_bits, kinds = head.kind_bits, moffsets = head.moffset_bits;
    uint64_t offset = head.offset, base = head.base, kind = head.kind;
    uint8_t bytes[BLOCK - HEAD + sizeof(uint64_t)] = {0};
    struct bits rows = {bytes + row_of(&head, 0) / 8, 0, 0};
    for (unsigned i = 0; i < builder->holds; i++) {
        uint32_t wide = (uint32_t)(seg_offset(&held[i]) - offset);
        uint16_t narrow = (uint16_t)wide;
        if (head.wide)
            memcpy(bytes + i * sizeof wide, &wide, sizeof wide);
        else
            memcpy(bytes + i * sizeof narrow, &narrow, sizeof narrow);
        put_bits(&rows, (seg_length(&held[i]) - 1) | (kind_of(&held[i]) ^ kind) << lengths, lengths + kinds);
        put_bits(&rows, seg_moffset(&held[i]) - base, moffsets);
    }
    memcpy(rows.at, &rows.word, sizeof rows.word);
    memcpy(head.columns, bytes, sizeof head.columns);
    *out = head;
}

static void flush_block(struct index_builder *builder)
{
    if (builder->blocks == builder->room) {
        size_t room = builder->room ? 2 * builder->room : 8;
        struct index_block *block = realloc(builder->block, room * sizeof *block);
        if (!block) {
            builder->failed = true;
            return;
        }
        builder->block = block, builder->room = room;
    }
    fill_block(builder, &builder->block[builder->blocks++]);
}

static inline void begin_block(struct index_builder *builder, struct segment s)
{
    builder->shape = shape_of(&s);
    builder->held[0] = s;
    builder->holds = 1;
}

struct index_builder *index_begin(void) { return calloc(1, sizeof(struct index_builder)); }

/* The last segment has become longer: it may have to go into a block of its own. */
static void refit(struct index_builder *builder)
{
    struct shape shape = builder->shape;
    struct segment last = builder->held[builder->holds - 1];
    shape.lengths |= seg_length(&last) - 1;
    if (shape_fits(&shape, builder->holds)) {
        builder->shape = shape;
    } else {
        builder->holds--;
        flush_block(builder);
        begin_block(builder, last);
    }
}

void index_put(struct index_builder *builder, struct segment s)
{
    if (builder->holds && seg_join(&builder->held[builder->holds - 1], &s)) {
        refit(builder);
        return;
    }
    builder->count++;
    if (builder->holds) {
        struct shape shape = builder->shape;
        shape_add(&shape, builder->held, &s);
        if (shape_fits(&shape, builder->holds + 1)) {
            builder->shape = shape;
            builder->held[builder->holds++] = s;
            return;
        }
        flush_block(builder);
    }
    begin_block(builder, s);
}

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

/* With small pages a search of a large array would miss the TLB as well. The end of it is in a huge page, too, if it fills
 * most of one. */
static size_t lines_size(size_t bytes)
{
    size_t rest = bytes % HUGE;
    if (bytes < HUGE_FROM)
        return round_up(bytes, BLOCK);
    return bytes - rest + (rest >= HUGE_FROM ? HUGE : round_up(rest, 4096));
}

/* Fresh from the kernel if large: pages that malloc has used before are small, and stay so. */
static void *alloc_lines(size_t bytes)
{
    size_t size = lines_size(bytes);
    if (size < HUGE)
        return aligned_alloc(BLOCK, size);
    char *begin = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED)
        return NULL;
    char *lines = (char *)round_up((uintptr_t)begin, HUGE);
    if (lines > begin)
        munmap(begin, (size_t)(lines - begin));
    munmap(lines + size, (size_t)(begin + HUGE - lines));
    madvise(lines, size, MADV_HUGEPAGE);
    return lines;
}

static void free_lines(void *lines, size_t bytes)
{
    size_t size = lines_size(bytes);
    if (size < HUGE)
        free(lines);
    else if (lines)
        munmap(lines, size);
}

static size_t blocks_bytes(const struct index *index) { return index->blocks * sizeof *index->block + OVERHANG; }
static size_t keys_bytes(const struct index *index) { return index->key_count * sizeof *index->keys; }

/* Fills the levels from the leaves to the root. */
static int build_tree(struct index *index)
{
    size_t sizes[INDEX_LEVELS], total = 0, keys = index->blocks;
    unsigned levels = 0;
    do {
        sizes[levels++] = round_up(keys ? keys : 1, NODE);
        total += sizes[levels - 1];
        keys = (keys + NODE - 1) / NODE;
    } while (keys > 1 && levels < INDEX_LEVELS);
    index->key_count = total;
    index->keys = alloc_lines(keys_bytes(index));
    if (!index->keys)
        return -ENOMEM;
    for (size_t i = 0; i < total; i++)
        index->keys[i] = NO_KEY;
    uint64_t last = index->blocks ? index->block[index->blocks - 1].offset : 0;
    while (last >> index->shift >= NO_KEY)
        index->shift++;
    index->levels = levels;
    uint32_t *at = index->keys;
    for (unsigned i = 0; i < levels; i++) {
        index->level[i] = at;
        at += sizes[levels - 1 - i];
    }
    for (size_t i = 0; i < index->blocks; i++)
        index->level[levels - 1][i] = (uint32_t)(index->block[i].offset >> index->shift);
    for (unsigned i = levels - 1; i > 0; i--)
        for (size_t k = 0; k * NODE < sizes[levels - 1 - i]; k++)
            index->level[i - 1][k] = index->level[i][k * NODE];
    return 0;
}

/* An index of a copy of the blocks, in as much memory as they need. */
static struct index *index_of(const struct index_block *block, size_t blocks, size_t count)
{
    struct index *index = calloc(1, sizeof *index);
    if (!index)
        return NULL;
    atomic_init(&index->refs, 1);
    index->count = count, index->blocks = blocks;
    index->block = alloc_lines(blocks_bytes(index));
    if (!index->block) {
        free(index);
        return NULL;
    }
    if (blocks)
        memcpy(index->block, block, blocks * sizeof *block);
    memset(index->block + blocks, 0, OVERHANG);
    if (build_tree(index)) {
        index_unref(index);
        return NULL;
    }
    return index;
}

struct index *index_end(struct index_builder *builder)
{
    if (!builder)
        return NULL;
    if (builder->holds)
        flush_block(builder);
    struct index *index = builder->failed ? NULL : index_of(builder->block, builder->blocks, builder->count);
    free(builder->block);
    free(builder);
    return index;
}

struct index *index_tagged(struct index *index, unsigned tag)
{
    if (!index->blocks || (unsigned)(index->block[0].kind >> 1) == tag)
        return index_ref(index);
    struct index *tagged = index_of(index->block, index->blocks, index->count);
    for (size_t i = 0; tagged && i < tagged->blocks; i++)
        tagged->block[i].kind = (tagged->block[i].kind & 1) | tag << 1;
    return tagged;
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
    free_lines(index->block, blocks_bytes(index));
    free_lines(index->keys, keys_bytes(index));
    free(index);
}

size_t index_bytes(const struct index *index)
{
    return sizeof *index + lines_size(blocks_bytes(index)) + lines_size(keys_bytes(index));
}
