/* From a range of an image to the places where its bytes are. */
#ifndef AENV_LSMT_EXTENTS_H
#define AENV_LSMT_EXTENTS_H

#include "lsmt.h"

#define EXTENTS_MAX 64
#define EXTENT_ZERO (-1)
#define EXTENT_UPPER (-2)

struct extent {
    uint64_t moffset, sectors;
    int origin; /* a layer's place in the stack, or one of the above */
};

/* The extents of the sectors before `end`, in order. */
struct extents {
    uint64_t end;
    unsigned count;
    struct extent extent[EXTENTS_MAX];
};

/* Append the extents of [out->end, end). False: no more room; what is there is right up to out->end. */
bool extents_resolve(const struct stack *stack, unsigned level, uint64_t end, struct extents *out);
bool extents_resolve_map(const struct map *map, const struct stack *stack, uint64_t end, struct extents *out);
/* NULL: must be read. The bytes are for system calls only. */
const void *stack_lend_extent(struct stack *stack, const struct extent *extent);
int stack_read_extent(struct stack *stack, const struct extent *extent, void *buffer, bool direct);

#endif
