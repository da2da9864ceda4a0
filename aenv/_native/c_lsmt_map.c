/* The index of a writable layer in memory: sorted segments in chunks, so that an insert moves at most one chunk. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt_index.h"

void map_free(struct map *map)
{
    for (size_t i = 0; i < map->used; i++)
        free(map->chunks[i]);
    free(map->chunks);
    free(map->first);
    free(map->spare[0]);
    free(map->spare[1]);
    memset(map, 0, sizeof *map);
}

/* Room for the two chunk splits an insert may need, so that it cannot fail half way. */
static int map_reserve(struct map *map)
{
    for (int i = 0; i < 2; i++)
        if (!map->spare[i] && !(map->spare[i] = malloc(sizeof *map->spare[i])))
            return -ENOMEM;
    if (map->used + 2 <= map->room)
        return 0;
    size_t room = map->room ? map->room * 2 : 4;
    struct map_chunk **chunks = realloc(map->chunks, room * sizeof *chunks);
    if (!chunks)
        return -ENOMEM;
    map->chunks = chunks;
    uint64_t *first = realloc(map->first, room * sizeof *first);
    if (!first)
        return -ENOMEM;
    map->first = first;
    map->room = room;
    return 0;
}

static struct map_chunk *take_spare(struct map *map)
{
    int which = map->spare[1] ? 1 : 0;
    struct map_chunk *chunk = map->spare[which];
    map->spare[which] = NULL;
    chunk->count = 0;
    return chunk;
}

static void put_chunk(struct map *map, size_t at, struct map_chunk *chunk)
{
    memmove(map->chunks + at + 1, map->chunks + at, (map->used - at) * sizeof *map->chunks);
    memmove(map->first + at + 1, map->first + at, (map->used - at) * sizeof *map->first);
    map->chunks[at] = chunk;
    map->used++;
}

static void drop_chunk(struct map *map, size_t at)
{
    free(map->chunks[at]);
    map->used--;
    memmove(map->chunks + at, map->chunks + at + 1, (map->used - at) * sizeof *map->chunks);
    memmove(map->first + at, map->first + at + 1, (map->used - at) * sizeof *map->first);
}

static inline void set_first(struct map *map, size_t chunk)
{
    map->first[chunk] = seg_offset(&map->chunks[chunk]->segments[0]);
}

struct map_cursor map_find(const struct map *map, uint64_t sector)
{
    size_t low = 0, left = map->used;
    if (!left)
        return (struct map_cursor){0, 0};
    while (left > 1) {
        size_t half = left / 2;
        low = map->first[low + half] <= sector ? low + half : low;
        left -= half;
    }
    const struct map_chunk *chunk = map->chunks[low];
    unsigned at = 0;
    for (unsigned rest = chunk->count; rest > 1; rest -= rest / 2) /* first segment that ends after sector */
        at = seg_end(&chunk->segments[at + rest / 2 - 1]) <= sector ? at + rest / 2 : at;
    at += chunk->count && seg_end(&chunk->segments[at]) <= sector;
    return (struct map_cursor){low, at};
}

const struct segment *map_at(const struct map *map, struct map_cursor *cursor)
{
    if (cursor->chunk < map->used && cursor->at >= map->chunks[cursor->chunk]->count)
        cursor->chunk++, cursor->at = 0;
    return cursor->chunk < map->used ? &map->chunks[cursor->chunk]->segments[cursor->at] : NULL;
}

static void insert_at(struct map *map, struct map_cursor where, struct segment segment)
{
    if (!map->used) {
        put_chunk(map, 0, take_spare(map));
    } else if (where.chunk == map->used) {
        where.chunk--, where.at = map->chunks[where.chunk]->count;
    }
    struct map_chunk *chunk = map->chunks[where.chunk];
    if (chunk->count == MAP_CHUNK) {
        /* Sequential writes append: leave the full chunk full. */
        unsigned keep = where.at == MAP_CHUNK ? MAP_CHUNK : MAP_CHUNK / 2;
        struct map_chunk *next = take_spare(map);
        next->count = MAP_CHUNK - keep;
        memcpy(next->segments, chunk->segments + keep, next->count * sizeof segment);
        chunk->count = keep;
        put_chunk(map, where.chunk + 1, next);
        if (next->count)
            set_first(map, where.chunk + 1);
        if (where.at > keep || keep == MAP_CHUNK)
            where.chunk++, where.at -= keep, chunk = next;
    }
    memmove(chunk->segments + where.at + 1, chunk->segments + where.at, (chunk->count - where.at) * sizeof segment);
    chunk->segments[where.at] = segment;
    chunk->count++;
    map->count++;
    set_first(map, where.chunk);
}

static void remove_at(struct map *map, struct map_cursor where)
{
    struct map_chunk *chunk = map->chunks[where.chunk];
    chunk->count--;
    map->count--;
    memmove(chunk->segments + where.at, chunk->segments + where.at + 1,
            (chunk->count - where.at) * sizeof *chunk->segments);
    if (!chunk->count)
        drop_chunk(map, where.chunk);
    else
        set_first(map, where.chunk);
}

static void tell_dead(const struct map *map, const struct segment *whole, uint64_t begin, uint64_t end)
{
    struct segment part = seg_trim(*whole, begin, end);
    if (map->dead && !seg_zeroed(&part))
        map->dead(map->opaque, seg_moffset(&part), seg_length(&part));
}

static void clear_range(struct map *map, uint64_t begin, uint64_t end)
{
    for (;;) {
        struct map_cursor cursor = map_find(map, begin);
        struct segment *s = (struct segment *)map_at(map, &cursor);
        if (!s || seg_offset(s) >= end)
            return;
        struct segment whole = *s;
        tell_dead(map, &whole, begin, end);
        if (seg_offset(&whole) < begin) {
            *s = seg_trim(whole, 0, begin);
            if (seg_end(&whole) > end) {
                cursor.at++;
                insert_at(map, cursor, seg_trim(whole, end, UINT64_MAX));
            }
        } else if (seg_end(&whole) > end) {
            *s = seg_trim(whole, end, UINT64_MAX);
            set_first(map, cursor.chunk);
        } else {
            remove_at(map, cursor);
        }
    }
}

static bool join_before(struct map *map, struct map_cursor where, const struct segment *segment)
{
    if (where.at == 0 && where.chunk == 0)
        return false;
    if (where.at == 0 || where.chunk == map->used)
        where.chunk--, where.at = map->chunks[where.chunk]->count;
    return seg_join(&map->chunks[where.chunk]->segments[where.at - 1], segment);
}

int map_insert(struct map *map, struct segment segment)
{
    int rc = map_reserve(map);
    if (rc)
        return rc;
    clear_range(map, seg_offset(&segment), seg_end(&segment));
    struct map_cursor where = map_find(map, seg_offset(&segment));
    if (where.chunk < map->used && where.at > map->chunks[where.chunk]->count)
        where.at = map->chunks[where.chunk]->count;
    if (map->used && join_before(map, where, &segment))
        return 0;
    insert_at(map, where, segment);
    return 0;
}

struct index *map_freeze(const struct map *map)
{
    struct index_builder *builder = index_begin();
    for (size_t i = 0; builder && i < map->used; i++)
        for (unsigned k = 0; k < map->chunks[i]->count; k++)
            index_put(builder, map->chunks[i]->segments[k]);
    return index_end(builder);
}
