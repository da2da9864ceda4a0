/* Indexes: immutable sorted sets of disjoint segments, and how they are made.
 *
 * Segments lie in blocks of two cache lines, which hold as many as fit: of offsets, lengths, places and tags only the bits
 * that differ within the block. That is 3.5 to 15 bytes a segment. A static B+-tree of 32-bit keys, nodes of 16 (one cache
 * line), finds the block; it stays in the processor's cache and leaves one access to memory for a search.
 */
#ifndef AENV_LSMT_INDEX_H
#define AENV_LSMT_INDEX_H

#include "lsmt.h"

#define INDEX_LEVELS 8
struct index_block;
struct index {
    atomic_uint refs;
    unsigned levels, shift; /* a key is the offset of a block without its lowest bits */
    size_t count, blocks, key_count;
    struct index_block *block;
    uint32_t *keys, *level[INDEX_LEVELS]; /* from the root */
};

/* Takes segments in ascending order, and joins those that go on where the one before ends. */
struct index_builder;
struct index_builder *index_begin(void); /* NULL: out of memory */
void index_put(struct index_builder *builder, struct segment segment);
struct index *index_end(struct index_builder *builder); /* frees the builder; NULL: out of memory */

struct index_cursor index_find_plainly(const struct index *index, uint64_t sector); /* as on other processors */
/* Of an index whose segments all have the same tag, one where they have this one: it may be the same. */
struct index *index_tagged(struct index *index, unsigned tag);
size_t index_bytes(const struct index *index); /* of memory, with its tree */

#endif
