/* Records of a writable layer's index file. Each is an ordinary index entry followed by a padding entry (which other
 * readers drop) whose free bits hold a kind and two checksums, so that a torn end is recognised for what it is. */
#ifndef AENV_LSMT_JOURNAL_H
#define AENV_LSMT_JOURNAL_H

#include "lsmt_format.h"

enum record_kind {
    RECORD_SEGMENT = 1, /* a write or a discard */
    RECORD_BARRIER = 2, /* entry.word1: so many records from the start are durable, and so is their data */
    RECORD_RESIZE = 3,  /* entry.word1: the virtual size in sectors from here on */
};

struct record {
    struct segment entry, check;
};
_Static_assert(sizeof(struct record) == 32, "record");

/* `seed` is drawn when the file is made: records of an older file at the same place on disk do not fit. */
struct record record_make(uint32_t seed, uint64_t number, enum record_kind kind, struct segment entry,
                          uint32_t data_crc);
enum record_kind record_check(uint32_t seed, uint64_t number, const struct record *record); /* 0: not valid */
static inline uint32_t record_data_crc(const struct record *record) { return (uint32_t)record->check.word1; }
static inline uint32_t data_crc(uint32_t seed, const void *data, size_t length)
{
    return crc32c_raw(~seed, data, length);
}

/* Fills the header of an index file; draws the seed. */
int journal_header(struct lsmt_header *header, uint64_t virtual_size, const char *uuid, const char *parent_uuid,
                   uint32_t *seed);
bool journal_seed(const struct lsmt_header *header, uint32_t *seed); /* false: a standard index without checksums */

/* What a pair of files holds. */
struct journal {
    bool checked; /* false: standard index without checksums */
    uint32_t seed;
    uint64_t records, file_records, durable; /* valid ones, those in the file, those behind a barrier */
    uint64_t data_end, virtual_size;
    struct lsmt_header header; /* of the data file */
    struct map map;
};
int journal_load(int data_fd, int index_fd, struct journal *journal, struct fault *fault);

#endif
