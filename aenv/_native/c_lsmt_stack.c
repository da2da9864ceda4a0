/* Stacks: the merged view of layers, shared by all images that start from it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt_extents.h"
#include "lsmt_index.h"

static struct stack *stack_alloc(unsigned layers)
{
    struct stack *stack = calloc(1, sizeof *stack + layers * sizeof(struct layer *));
    if (stack) {
        atomic_init(&stack->refs, 1);
        stack->layers = layers;
    }
    return stack;
}

/* What follows from the layers. The topmost one with a size decides about that. */
static void set_properties(struct stack *stack)
{
    for (unsigned i = 0; i < stack->layers; i++)
        stack->remote |= stack->layer[i]->source->remote;
    for (unsigned i = stack->layers; i-- > 0 && !stack->virtual_size;)
        stack->virtual_size = stack->layer[i]->info.virtual_size;
}

/* The segments of each layer tagged with its place. */
static struct index *merge_layers(struct index *const *indexes, unsigned count)
{
    struct index *tagged[LSMT_MAX_LAYERS] = {NULL}, *merged = NULL;
    unsigned have = 0;
    while (have < count && (tagged[have] = index_tagged(indexes[have], have)))
        have++;
    if (have == count)
        merged = index_merge_all(tagged, count);
    while (have)
        index_unref(tagged[--have]);
    return merged;
}

int stack_new(struct layer *const *layers, struct index *const *indexes, unsigned count, struct stack **out,
              struct fault *fault)
{
    if (!count || count > LSMT_MAX_LAYERS)
        return fault_set(fault, EINVAL, "layers", "%u layers; a stack has 1 to %u", count, LSMT_MAX_LAYERS);
    struct stack *stack = stack_alloc(count);
    if (!stack)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    for (unsigned i = 0; i < count; i++)
        stack->layer[i] = layer_ref(layers[i]);
    set_properties(stack);
    if (!(stack->level[0] = merge_layers(indexes, count))) {
        stack_unref(stack);
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    stack->levels = 1;
    if (stack->level[0]->count > LSMT_MAX_RW_ENTRIES) {
        stack_unref(stack);
        return fault_set(fault, EINVAL, "layers", "more than %u segments", LSMT_MAX_RW_ENTRIES);
    }
    *out = stack;
    return 0;
}

/* Takes over `top`. Puts it on as a new level, merged with the levels below as long as these are not at least twice as large: so there are
 * at most log2(segments) levels, and pushing costs what the pushed layer holds, over time. */
static int push_level(struct stack *stack, const struct stack *below, struct index *top)
{
    unsigned at = 0;
    while (at < below->levels && (below->level[at]->count < 2 * top->count || below->levels - at >= STACK_MAX_LEVELS - 1)) {
        struct index *merged = index_merge(top, below->level[at++]);
        index_unref(top);
        if (!(top = merged))
            return -ENOMEM;
    }
    stack->level[stack->levels++] = top;
    for (; at < below->levels; at++)
        stack->level[stack->levels++] = index_ref(below->level[at]);
    return 0;
}

int stack_push(const struct stack *below, struct layer *layer, struct index *index, struct stack **out,
               struct fault *fault)
{
    unsigned count = below->layers + 1;
    if (count > LSMT_MAX_LAYERS)
        return fault_set(fault, EINVAL, "layers", "a stack has at most %u layers", LSMT_MAX_LAYERS);
    struct stack *stack = stack_alloc(count);
    if (!stack)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    for (unsigned i = 0; i < below->layers; i++)
        stack->layer[i] = layer_ref(below->layer[i]);
    stack->layer[count - 1] = layer_ref(layer);
    set_properties(stack);
    struct index *tagged = index_tagged(index, count - 1);
    if (!tagged || push_level(stack, below, tagged)) {
        stack_unref(stack);
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    *out = stack;
    return 0;
}

struct stack *stack_ref(struct stack *stack)
{
    atomic_fetch_add(&stack->refs, 1);
    return stack;
}

void stack_unref(struct stack *stack)
{
    if (!stack || atomic_fetch_sub(&stack->refs, 1) != 1)
        return;
    for (unsigned i = 0; i < stack->levels; i++)
        index_unref(stack->level[i]);
    for (unsigned i = 0; i < stack->layers; i++)
        layer_unref(stack->layer[i]);
    free(stack);
}

struct index *stack_flatten(const struct stack *stack)
{
    struct index *flat = index_ref(stack->level[0]);
    for (unsigned i = 1; flat && i < stack->levels; i++) {
        struct index *merged = index_merge(flat, stack->level[i]);
        index_unref(flat);
        flat = merged;
    }
    return flat;
}

uint64_t stack_index_bytes(const struct stack *stack)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < stack->levels; i++)
        bytes += index_bytes(stack->level[i]);
    return bytes;
}

uint64_t stack_segments(const struct stack *stack)
{
    uint64_t count = 0;
    for (unsigned i = 0; i < stack->levels; i++)
        count += stack->level[i]->count;
    return count;
}

/* --- extents ------------------------------------------------------------------------------------------------- */

static bool put(struct extents *out, struct extent extent)
{
    if (!extent.sectors)
        return true;
    struct extent *last = out->count ? &out->extent[out->count - 1] : NULL;
    if (last && last->origin == extent.origin &&
        (extent.origin == EXTENT_ZERO || last->moffset + last->sectors == extent.moffset)) {
        last->sectors += extent.sectors;
    } else if (out->count == EXTENTS_MAX) {
        return false;
    } else {
        out->extent[out->count++] = extent;
    }
    out->end += extent.sectors;
    return true;
}

static bool put_segment(struct extents *out, struct segment s, uint64_t end)
{
    s = seg_trim(s, out->end, end);
    return put(out, (struct extent){seg_moffset(&s), seg_length(&s), seg_zeroed(&s) ? EXTENT_ZERO : (int)seg_tag(&s)});
}

bool extents_resolve(const struct stack *stack, unsigned level, uint64_t end, struct extents *out)
{
    if (!stack || level == stack->levels)
        return put(out, (struct extent){0, end - out->end, EXTENT_ZERO});
    const struct index *index = stack->level[level];
    struct segment s;
    for (struct index_cursor cursor = index_find(index, out->end); out->end < end; cursor.slot++) {
        if (!index_at(index, &cursor, &s) || seg_offset(&s) >= end)
            return extents_resolve(stack, level + 1, end, out);
        if (seg_offset(&s) > out->end && !extents_resolve(stack, level + 1, seg_offset(&s), out))
            return false;
        if (!put_segment(out, s, end))
            return false;
    }
    return true;
}

bool extents_resolve_map(const struct map *map, const struct stack *stack, uint64_t end, struct extents *out)
{
    struct map_cursor cursor = map_find(map, out->end);
    while (out->end < end) {
        const struct segment *s = map_at(map, &cursor);
        if (!s || seg_offset(s) >= end)
            return extents_resolve(stack, 0, end, out);
        if (seg_offset(s) > out->end && !extents_resolve(stack, 0, seg_offset(s), out))
            return false;
        struct segment part = seg_trim(*s, out->end, end);
        int origin = seg_zeroed(&part) ? EXTENT_ZERO : EXTENT_UPPER;
        if (!put(out, (struct extent){seg_moffset(&part), seg_length(&part), origin}))
            return false;
        cursor.at++;
    }
    return true;
}

const void *stack_lend_extent(struct stack *stack, const struct extent *extent)
{
    struct source *source = stack->layer[extent->origin]->source;
    return source_lend(source, extent->sectors * LSMT_SECTOR, extent->moffset * LSMT_SECTOR);
}

int stack_read_extent(struct stack *stack, const struct extent *extent, void *buffer, bool direct)
{
    struct source *source = stack->layer[extent->origin]->source;
    return source->read(source, buffer, extent->sectors * LSMT_SECTOR, extent->moffset * LSMT_SECTOR, direct);
}

int stack_read(struct stack *stack, void *buffer, size_t length, uint64_t offset, bool direct)
{
    if (offset % LSMT_SECTOR || length % LSMT_SECTOR)
        return -EINVAL;
    char *at = buffer;
    uint64_t end = (offset + length) / LSMT_SECTOR;
    struct extents extents; /* too large to be cleared for each read */
    extents.end = offset / LSMT_SECTOR;
    while (extents.end < end) {
        extents.count = 0;
        extents_resolve(stack, 0, end, &extents);
        for (unsigned i = 0; i < extents.count; i++) {
            const struct extent *extent = &extents.extent[i];
            if (extent->origin == EXTENT_ZERO)
                memset(at, 0, extent->sectors * LSMT_SECTOR);
            else {
                int rc = stack_read_extent(stack, extent, at, direct);
                if (rc)
                    return rc == -ENODATA ? -EIO : rc;
            }
            at += extent->sectors * LSMT_SECTOR;
        }
    }
    return 0;
}
