/* Which parts of a writable layer's data file can be written again. All numbers are sectors. */
#ifndef AENV_LSMT_SPACE_H
#define AENV_LSMT_SPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct range {
    uint64_t begin, sectors;
};

struct ranges {
    struct range *range;
    size_t count, room;
    uint64_t sectors; /* of all */
};

/* A range goes through the four lists in this order. */
struct space {
    struct ranges dead;    /* overridden */
    struct ranges durable; /* the overriding record is durable */
    struct ranges waiting; /* so is a barrier behind it; reads may still run */
    struct ranges ready;   /* sorted */
    size_t counted;        /* of `dead`, when the flush that runs began */
    size_t next;           /* of `ready`, where to look for room */
};

void space_free(struct space *space);
void space_dead(struct space *space, uint64_t begin, uint64_t sectors);
void space_flush_begin(struct space *space);
void space_flush_end(struct space *space, bool barrier); /* whether a barrier was written after this flush */
void space_release(struct space *space);                 /* no read is running */
bool space_take(struct space *space, uint64_t sectors, uint64_t align, uint64_t *begin);

#endif
