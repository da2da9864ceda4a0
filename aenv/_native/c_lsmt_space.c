/* Space in the data file of a writable layer that no segment uses any more.
 *
 * A range may be written again only when three things are sure: the record that overrode it is durable; a barrier behind
 * that record is durable, so that a replay does not check the old data any more; and no read that found the old segment
 * is still running. The first takes one flush, the second one more, the third is the image's business (`space_release`).
 */
#include "lsmt_space.h"

#include <stdlib.h>
#include <string.h>

#define MOST_RANGES (1u << 20) /* in a list; beyond that, space is lost until the layer is opened again */

/* Joins the range with the last one, but not with one of the first `fixed`. */
static void push(struct ranges *ranges, struct range range, size_t fixed)
{
    struct range *last = ranges->count > fixed ? &ranges->range[ranges->count - 1] : NULL;
    if (last && last->begin + last->sectors == range.begin) {
        last->sectors += range.sectors;
        ranges->sectors += range.sectors;
        return;
    }
    if (ranges->count == ranges->room) {
        size_t room = ranges->room ? ranges->room * 2 : 64;
        struct range *grown = room <= MOST_RANGES ? realloc(ranges->range, room * sizeof *grown) : NULL;
        if (!grown)
            return;
        ranges->range = grown;
        ranges->room = room;
    }
    ranges->range[ranges->count++] = range;
    ranges->sectors += range.sectors;
}

static void move(struct ranges *to, struct ranges *from, size_t count)
{
    if (!count)
        return;
    for (size_t i = 0; i < count; i++) {
        push(to, from->range[i], 0);
        from->sectors -= from->range[i].sectors;
    }
    memmove(from->range, from->range + count, (from->count - count) * sizeof *from->range);
    from->count -= count;
}

void space_free(struct space *space)
{
    struct ranges *all[] = {&space->dead, &space->durable, &space->waiting, &space->ready};
    for (int i = 0; i < 4; i++)
        free(all[i]->range);
    memset(space, 0, sizeof *space);
}

void space_dead(struct space *space, uint64_t begin, uint64_t sectors)
{
    push(&space->dead, (struct range){begin, sectors}, space->counted);
}

void space_flush_begin(struct space *space) { space->counted = space->dead.count; }

void space_flush_end(struct space *space, bool barrier)
{
    move(&space->waiting, &space->durable, space->durable.count);
    if (barrier)
        move(&space->durable, &space->dead, space->counted);
    space->counted = 0;
}

static int by_begin(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

void space_release(struct space *space)
{
    struct ranges all = space->ready, merged = {0};
    move(&all, &space->waiting, space->waiting.count);
    if (all.count)
        qsort(all.range, all.count, sizeof *all.range, by_begin);
    for (size_t i = 0; i < all.count; i++)
        push(&merged, all.range[i], 0);
    free(all.range);
    space->ready = merged;
    space->next = 0;
}

bool space_take(struct space *space, uint64_t sectors, uint64_t align, uint64_t *begin)
{
    struct ranges *ready = &space->ready;
    for (unsigned tries = 0; tries < 16 && space->next < ready->count; tries++, space->next++) {
        struct range *range = &ready->range[space->next], pad = {range->begin, (align - range->begin % align) % align};
        if (range->sectors < sectors + pad.sectors)
            continue; /* too small for now; the next release looks at it again */
        *begin = range->begin + pad.sectors;
        range->begin += sectors + pad.sectors;
        range->sectors -= sectors + pad.sectors;
        ready->sectors -= sectors + pad.sectors;
        if (pad.sectors)
            push(ready, pad, ready->count);
        return true;
    }
    return false;
}
