/* A stack as a memory map: which bytes of which file the pages of a guest's RAM are. */
#include <errno.h>
#include <stdlib.h>

#include "lsmt.h"

#define PAGE_SECTORS 8u

/* In sectors until they are all there: the layers of others may cut a segment inside a page and go on with the next. */
struct builder {
    struct memory_extent *extents;
    size_t count, room;
};

static int add(struct builder *builder, uint64_t begin, uint64_t end, uint32_t file, uint64_t file_sector)
{
    struct memory_extent *last = builder->count ? &builder->extents[builder->count - 1] : NULL;
    if (last && last->file == file && last->guest_offset + last->length == begin &&
        last->file_offset + last->length == file_sector) {
        last->length += end - begin;
        return 0;
    }
    if (builder->count == builder->room) {
        size_t room = builder->room ? 2 * builder->room : 1024;
        struct memory_extent *extents = realloc(builder->extents, room * sizeof *extents);
        if (!extents)
            return -ENOMEM;
        builder->extents = extents;
        builder->room = room;
    }
    builder->extents[builder->count++] =
        (struct memory_extent){.guest_offset = begin, .length = end - begin, .file = file, .file_offset = file_sector};
    return 0;
}

static int add_all(struct builder *builder, const struct index *flat, uint64_t sectors, const struct memory_files *files)
{
    uint64_t done = 0;
    int rc = 0;
    struct index_cursor cursor = {0, 0};
    struct segment s;
    for (; !rc && index_at(flat, &cursor, &s); cursor.slot++) {
        uint64_t begin = seg_offset(&s), end = seg_end(&s);
        if (begin > done && files->base >= 0)
            rc = add(builder, done, begin, (uint32_t)files->base, done);
        if (!rc && !seg_zeroed(&s))
            rc = add(builder, begin, end, files->layers + seg_tag(&s), seg_moffset(&s));
        else if (!rc && files->zero >= 0)
            rc = add(builder, begin, end, (uint32_t)files->zero, begin);
        done = end;
    }
    if (!rc && done > sectors)
        return -ERANGE;
    if (!rc && done < sectors && files->base >= 0)
        rc = add(builder, done, sectors, (uint32_t)files->base, done);
    return rc;
}

/* From sectors to bytes; -EOPNOTSUPP for what a mapping cannot show. */
static int to_pages(struct builder *builder)
{
    for (size_t i = 0; i < builder->count; i++) {
        struct memory_extent *e = &builder->extents[i];
        if (e->guest_offset % PAGE_SECTORS || e->length % PAGE_SECTORS || e->file_offset % PAGE_SECTORS)
            return -EOPNOTSUPP;
        e->guest_offset *= LSMT_SECTOR, e->length *= LSMT_SECTOR, e->file_offset *= LSMT_SECTOR;
    }
    return 0;
}

int stack_memory(const struct stack *stack, uint64_t size, const struct memory_files *files,
                 struct memory_extent **extents, size_t *count, struct fault *fault)
{
    struct builder builder = {0};
    if (stack->virtual_size != size)
        return fault_set(fault, EINVAL, "virtual_size", "the layers have %llu bytes, the memory %llu",
                         (unsigned long long)stack->virtual_size, (unsigned long long)size);
    struct index *flat = stack_flatten(stack);
    int rc = flat ? add_all(&builder, flat, size / LSMT_SECTOR, files) : -ENOMEM;
    if (rc == -ERANGE)
        rc = fault_set(fault, EBADMSG, "index.offset", "a segment ends after the memory of %llu bytes",
                       (unsigned long long)size);
    else if (rc || (rc = to_pages(&builder)))
        fault_set(fault, -rc, "layers", rc == -ENOMEM ? "out of memory" : "segments that are not made of whole pages");
    index_unref(flat);
    if (rc) {
        free(builder.extents);
        return rc;
    }
    *extents = builder.extents;
    *count = builder.count;
    return 0;
}
