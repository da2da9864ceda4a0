/* Commit and compaction: the mapped content of a stack, in order, as one new layer. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lsmt.h"

#define PIECE 2048u /* sectors read at once */
#define BLOCK (LSMT_BLOCK / LSMT_SECTOR)

enum verdict { KEEP, ZERO, SAME };

struct commit {
    struct stack *stack, *parent;
    struct writer *writer;
    bool keep_zeros;
    uint64_t bridge; /* gaps of up to so many sectors are filled with the parent's data; 0: none */
    uint8_t *data, *below;
    progress_t progress;
    void *opaque;
    struct commit_result *result;
    struct fault *fault;
};

static int put_run(struct commit *commit, uint64_t sector, uint64_t sectors, const uint8_t *data, enum verdict verdict)
{
    struct commit_result *result = commit->result;
    uint64_t bytes = sectors * LSMT_SECTOR;
    if (verdict == SAME) {
        result->same_bytes += bytes;
        return 0;
    }
    if (verdict == ZERO) {
        result->zero_bytes += bytes;
        return commit->keep_zeros ? writer_add(commit->writer, sector, sectors, NULL, commit->fault) : 0;
    }
    result->data_bytes += bytes;
    return writer_add(commit->writer, sector, sectors, data, commit->fault);
}

/* Judges block by block, aligned in the image, and puts runs of equal verdict. */
static int put_data(struct commit *commit, uint64_t sector, uint64_t sectors)
{
    uint64_t start = 0;
    enum verdict run = KEEP;
    for (uint64_t at = 0; at < sectors;) {
        uint64_t step = BLOCK - (sector + at) % BLOCK;
        step = step < sectors - at ? step : sectors - at;
        const uint8_t *block = commit->data + at * LSMT_SECTOR;
        enum verdict verdict = KEEP;
        if (commit->bridge)
            verdict = KEEP; /* leaving out blocks would make the entries that bridging saves */
        else if (commit->parent && memcmp(block, commit->below + at * LSMT_SECTOR, step * LSMT_SECTOR) == 0)
            verdict = SAME;
        else if (bytes_are_zero(block, step * LSMT_SECTOR))
            verdict = ZERO;
        if (at && verdict != run) {
            int rc = put_run(commit, sector + start, at - start, commit->data + start * LSMT_SECTOR, run);
            if (rc)
                return rc;
            start = at;
        }
        run = verdict;
        at += step;
    }
    return put_run(commit, sector + start, sectors - start, commit->data + start * LSMT_SECTOR, run);
}

static int read_part(struct commit *commit, struct stack *stack, void *buffer, uint64_t sector, uint64_t sectors)
{
    int rc = stack_read(stack, buffer, sectors * LSMT_SECTOR, sector * LSMT_SECTOR, false);
    if (rc == -EBADMSG)
        return fault_set(commit->fault, EBADMSG, "zfile.block.crc", "a block of a layer is damaged");
    return rc ? fault_set(commit->fault, -rc, "layers", "cannot be read: %s", strerror(-rc)) : 0;
}

/* [sector, end) is mapped by the stack, as zeros or data. */
static int copy_range(struct commit *commit, uint64_t sector, uint64_t end, bool zeroed)
{
    while (sector < end) {
        uint64_t part = end - sector < PIECE ? end - sector : PIECE;
        if (part == PIECE && !zeroed)
            part -= (sector + part) % BLOCK;
        int rc = commit->parent ? read_part(commit, commit->parent, commit->below, sector, part) : 0;
        if (!rc && !zeroed)
            rc = read_part(commit, commit->stack, commit->data, sector, part);
        if (!rc && zeroed)
            memset(commit->data, 0, part * LSMT_SECTOR);
        if (!rc)
            rc = put_data(commit, sector, part);
        if (rc)
            return rc;
        sector += part;
        if (commit->progress && !commit->progress(commit->opaque, sector * LSMT_SECTOR))
            return fault_set(commit->fault, ECANCELED, "progress", "stopped");
    }
    return 0;
}

/* A gap to the next segment that is narrow enough is stored as data, so that two segments become one. */
static int bridge_gap(struct commit *commit, uint64_t begin, uint64_t end)
{
    int rc = read_part(commit, commit->parent ? commit->parent : commit->stack, commit->data, begin, end - begin);
    if (rc)
        return rc;
    commit->result->data_bytes += (end - begin) * LSMT_SECTOR;
    return writer_add(commit->writer, begin, end - begin, commit->data, commit->fault);
}

/* A bridged commit stores short zeroed segments as data. */
static bool stays_zero(const struct segment *s, uint64_t bridge)
{
    return seg_zeroed(s) && (!bridge || seg_length(s) >= PIECE);
}

static int copy_all(struct commit *commit, const struct index *flat, uint64_t limit, uint64_t max_entries)
{
    uint64_t last = 0;
    struct index_cursor cursor = {0, 0};
    struct segment s;
    for (bool first = true; index_at(flat, &cursor, &s); cursor.slot++, first = false) {
        uint64_t begin = seg_offset(&s), end = seg_end(&s) < limit ? seg_end(&s) : limit;
        if (begin >= limit)
            break;
        int rc = 0;
        if (!first && begin > last && begin - last <= commit->bridge)
            rc = bridge_gap(commit, last, begin);
        if (!rc && commit->bridge && stays_zero(&s, commit->bridge))
            rc = put_run(commit, begin, end - begin, NULL, ZERO);
        else if (!rc)
            rc = copy_range(commit, begin, end, stays_zero(&s, commit->bridge));
        if (rc)
            return rc;
        if (writer_entries(commit->writer) > max_entries)
            return fault_set(commit->fault, EOVERFLOW, "layers", "more than %llu segments in one layer",
                             (unsigned long long)max_entries);
        last = end;
    }
    return 0;
}

/* Segments that touch join, but pieces of PIECE sectors do not fill an entry to the last sector. */
static uint64_t entries_with_bridge(const struct index *flat, uint64_t bridge)
{
    const uint64_t entry = LSMT_MAX_LENGTH / PIECE * PIECE;
    uint64_t entries = 0, run = 0, last = 0;
    struct index_cursor cursor = {0, 0};
    struct segment s;
    for (bool first = true; index_at(flat, &cursor, &s); cursor.slot++, first = false) {
        uint64_t gap = seg_offset(&s) - last;
        if (!first && gap <= bridge)
            run += gap;
        if ((!first && gap > bridge) || stays_zero(&s, bridge))
            entries += (run + entry - 1) / entry, run = 0;
        if (stays_zero(&s, bridge))
            entries++;
        else
            run += seg_length(&s);
        last = seg_end(&s);
    }
    return entries + (run + entry - 1) / entry;
}

/* The narrowest bridge that is enough. */
static int choose_bridge(struct commit *commit, const struct index *flat, uint64_t max_entries)
{
    if (!commit->parent && commit->keep_zeros)
        return fault_set(commit->fault, EINVAL, "parent", "more than %llu segments: gaps can be filled only with it",
                         (unsigned long long)max_entries);
    for (commit->bridge = 1; commit->bridge < PIECE; commit->bridge *= 2)
        if (entries_with_bridge(flat, commit->bridge) <= max_entries)
            return 0;
    return fault_set(commit->fault, EINVAL, "layers", "more than %llu segments even when gaps are filled",
                     (unsigned long long)max_entries);
}

/* One attempt, into an empty file. */
static int commit_pass(struct commit *commit, const struct index *flat, int fd, const struct writer_options *options,
                       uint64_t max_entries)
{
    memset(commit->result, 0, sizeof *commit->result);
    int rc = writer_new(fd, options, &commit->writer, commit->fault);
    if (rc)
        return rc;
    rc = copy_all(commit, flat, options->virtual_size / LSMT_SECTOR, max_entries);
    if (!rc)
        rc = writer_finish(commit->writer, &commit->result->file_size, commit->fault);
    if (!rc)
        commit->result->entries = writer_entries(commit->writer);
    writer_free(commit->writer);
    return rc;
}

int stack_commit(struct stack *stack, struct stack *parent, bool keep_zeros, int fd,
                 const struct writer_options *options, uint64_t max_entries, progress_t progress,
                 void *opaque, struct commit_result *result, struct fault *fault)
{
    struct commit commit = {.stack = stack, .parent = parent, .keep_zeros = keep_zeros, .progress = progress,
                            .opaque = opaque, .result = result, .fault = fault};
    struct index *flat = stack_flatten(stack);
    commit.data = malloc(PIECE * LSMT_SECTOR);
    commit.below = malloc(PIECE * LSMT_SECTOR);
    int rc = flat && commit.data && commit.below ? 0 : fault_set(fault, ENOMEM, "memory", "out of memory");
    if (!rc)
        rc = commit_pass(&commit, flat, fd, options, max_entries);
    if (rc == -EOVERFLOW && !(rc = choose_bridge(&commit, flat, max_entries))) {
        if (ftruncate(fd, 0))
            rc = fault_set(fault, errno, "file", "cannot be truncated: %s", strerror(errno));
        else
            rc = commit_pass(&commit, flat, fd, options, max_entries);
    }
    index_unref(flat);
    free(commit.data), free(commit.below);
    return rc;
}
