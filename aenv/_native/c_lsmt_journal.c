/* Reading the index file of a writable layer: which records are whole, and which data they point to is there. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "lsmt_journal.h"

#define MARK "aenv checked records, seed "

static uint32_t record_crc(uint32_t seed, uint64_t number, const struct record *record)
{
    uint64_t words[4] = {number, record->entry.word0, record->entry.word1, record->check.word0};
    uint32_t data = record_data_crc(record);
    return crc32c_raw(crc32c_raw(seed, words, sizeof words), &data, sizeof data);
}

struct record record_make(uint32_t seed, uint64_t number, enum record_kind kind, struct segment entry, uint32_t data)
{
    struct record record = {entry, {LSMT_NO_OFFSET | (uint64_t)kind << 50, data}};
    record.check.word1 |= (uint64_t)record_crc(seed, number, &record) << 32;
    return record;
}

enum record_kind record_check(uint32_t seed, uint64_t number, const struct record *record)
{
    unsigned kind = (unsigned)(record->check.word0 >> 50);
    if ((record->check.word0 & LSMT_NO_OFFSET) != LSMT_NO_OFFSET || kind < RECORD_SEGMENT || kind > RECORD_RESIZE)
        return 0;
    return record_crc(seed, number, record) == record->check.word1 >> 32 ? kind : 0;
}

int journal_header(struct lsmt_header *header, uint64_t virtual_size, const char *uuid, const char *parent_uuid,
                   uint32_t *seed)
{
    char tag[LSMT_TAG];
    if (getrandom(seed, sizeof *seed, 0) != sizeof *seed)
        return -EIO;
    snprintf(tag, sizeof tag, MARK "%08x", *seed);
    header_fill(header, LSMT_IS_HEADER, virtual_size, uuid, parent_uuid, tag);
    header->index_offset = LSMT_BLOCK;
    return 0;
}

bool journal_seed(const struct lsmt_header *header, uint32_t *seed)
{
    char tag[LSMT_TAG + 1] = {0};
    memcpy(tag, header->user_tag, LSMT_TAG);
    return sscanf(tag, MARK "%8x", seed) == 1;
}

static int check_segment(const struct segment *s, uint64_t number, uint64_t data_size, struct fault *fault)
{
    unsigned long long n = number;
    uint64_t end = seg_zeroed(s) ? 0 : seg_moffset(s) + seg_length(s);
    if (!seg_length(s))
        return fault_set(fault, EBADMSG, "index.length", "record %llu has no length", n);
    if (seg_end(s) > LSMT_MAX_SECTORS)
        return fault_set(fault, EBADMSG, "index.offset", "record %llu ends after the largest image", n);
    if (seg_moffset(s) < LSMT_BLOCK / LSMT_SECTOR || end > (data_size + LSMT_SECTOR - 1) / LSMT_SECTOR)
        return fault_set(fault, EBADMSG, "index.moffset", "record %llu points outside of the data file", n);
    return 0;
}

static int apply(struct journal *journal, struct segment s)
{
    uint64_t place = seg_moffset(&s), end = (place + seg_length(&s)) * LSMT_SECTOR;
    if (seg_zeroed(&s)) {
        /* It has no data. When it was written, another writer may have had a place before its own, and have failed or
         * been killed before there was anything: then it points behind the end of the file. */
        uint64_t there = journal->data_end / LSMT_SECTOR;
        return map_insert(&journal->map, seg_make(seg_offset(&s), seg_length(&s), place < there ? place : there, true, 0));
    }
    if (end > journal->data_end)
        journal->data_end = end;
    s.word1 &= (1ull << 56) - 1;
    return map_insert(&journal->map, s);
}

/* Finds the first record that is not whole, and the last barrier before it. A barrier after it proves that the damaged
 * record was durable once: then this is not a torn end but a damaged file. */
static int scan_records(struct journal *journal, const struct record *records, struct fault *fault)
{
    bool cut = false;
    for (uint64_t i = 0; i < journal->file_records; i++) {
        enum record_kind kind = record_check(journal->seed, i, &records[i]);
        if (cut && kind == RECORD_BARRIER && records[i].entry.word1 > journal->records)
            return fault_set(fault, EBADMSG, "index.record", "record %llu is damaged, and it was durable",
                             (unsigned long long)journal->records);
        if (!kind)
            cut = true;
        if (cut)
            continue;
        journal->records = i + 1;
        if (kind == RECORD_BARRIER && records[i].entry.word1 <= i)
            journal->durable = records[i].entry.word1;
    }
    return 0;
}

static bool data_is_there(int data_fd, uint32_t seed, const struct record *record, uint64_t data_size, void **buffer)
{
    size_t length = seg_length(&record->entry) * LSMT_SECTOR;
    uint64_t at = seg_moffset(&record->entry) * LSMT_SECTOR;
    if (seg_zeroed(&record->entry))
        return true;
    if (at + length > data_size)
        return false;
    if (!*buffer && !(*buffer = malloc((size_t)LSMT_MAX_LENGTH * LSMT_SECTOR)))
        return false;
    return read_fully(data_fd, *buffer, length, at) == 0 &&
           data_crc(seed, *buffer, length) == record_data_crc(record);
}

static int replay_records(int data_fd, struct journal *journal, const struct record *records, uint64_t data_size,
                          struct fault *fault)
{
    void *buffer = NULL;
    int rc = 0;
    for (uint64_t i = 0; !rc && i < journal->records; i++) {
        enum record_kind kind = (enum record_kind)(records[i].check.word0 >> 50);
        if (kind == RECORD_RESIZE) {
            if (records[i].entry.word1 > LSMT_MAX_SECTORS)
                rc = fault_set(fault, EBADMSG, "index.virtual_size", "record %llu", (unsigned long long)i);
            journal->virtual_size = records[i].entry.word1 * LSMT_SECTOR;
        }
        if (rc || kind != RECORD_SEGMENT)
            continue;
        if (i >= journal->durable && !data_is_there(data_fd, journal->seed, &records[i], data_size, &buffer)) {
            journal->records = i;
            break;
        }
        if (!(rc = check_segment(&records[i].entry, i, data_size, fault)) && apply(journal, records[i].entry))
            rc = fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    free(buffer);
    return rc;
}

/* Entries of a standard index may be padding; a torn last one is dropped; there is nothing else to check. */
static int replay_entries(struct journal *journal, const struct segment *entries, uint64_t count, uint64_t data_size,
                          struct fault *fault)
{
    for (uint64_t i = 0; i < count; i++) {
        if (seg_offset(&entries[i]) == LSMT_NO_OFFSET)
            continue;
        int rc = check_segment(&entries[i], i, data_size, fault);
        if (rc)
            return rc;
        if (apply(journal, entries[i]))
            return fault_set(fault, ENOMEM, "memory", "out of memory");
    }
    return 0;
}

static int load_headers(int data_fd, int index_fd, struct journal *journal, struct fault *fault)
{
    struct lsmt_header header;
    if (read_fully(data_fd, &journal->header, sizeof journal->header, 0))
        return fault_set(fault, EBADMSG, "header", "cannot be read");
    if (read_fully(index_fd, &header, sizeof header, 0))
        return fault_set(fault, EBADMSG, "index.header", "cannot be read");
    int rc = header_check(&journal->header, ROLE_HEADER, fault);
    if (rc || (rc = header_check(&header, ROLE_INDEX_HEADER, fault)))
        return rc;
    if (journal->header.flags != (LSMT_IS_HEADER | LSMT_IS_DATA))
        return fault_set(fault, EBADMSG, "header.flags", "0x%x is not an append-only writable layer",
                         journal->header.flags);
    if (header.index_offset != LSMT_BLOCK)
        return fault_set(fault, EBADMSG, "index.header.index_offset", "%llu instead of 4096",
                         (unsigned long long)header.index_offset);
    if (memcmp(header.uuid, journal->header.uuid, LSMT_UUID) != 0)
        return fault_set(fault, EBADMSG, "index.header.uuid", "not that of the data file");
    journal->checked = journal_seed(&header, &journal->seed);
    journal->virtual_size = journal->header.virtual_size;
    journal->data_end = LSMT_BLOCK;
    return 0;
}

int journal_load(int data_fd, int index_fd, struct journal *journal, struct fault *fault)
{
    struct stat data, index;
    memset(journal, 0, sizeof *journal);
    if (fstat(data_fd, &data) || fstat(index_fd, &index))
        return fault_set(fault, errno, "file", "%s", strerror(errno));
    int rc = load_headers(data_fd, index_fd, journal, fault);
    if (rc)
        return rc;
    size_t bytes = (size_t)index.st_size - LSMT_BLOCK, unit = journal->checked ? 32 : 16;
    if (bytes / unit > LSMT_MAX_RW_ENTRIES)
        return fault_set(fault, EBADMSG, "index.size", "more than %u records", LSMT_MAX_RW_ENTRIES);
    void *records = malloc(bytes + 1);
    if (!records)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    journal->file_records = bytes / unit;
    if ((rc = read_fully(index_fd, records, bytes, LSMT_BLOCK)))
        rc = fault_set(fault, -rc, "index", "cannot be read: %s", strerror(-rc));
    else if (!journal->checked)
        rc = replay_entries(journal, records, bytes / 16, (uint64_t)data.st_size, fault);
    else if (!(rc = scan_records(journal, records, fault)))
        rc = replay_records(data_fd, journal, records, (uint64_t)data.st_size, fault);
    free(records);
    if (rc)
        map_free(&journal->map);
    return rc;
}
