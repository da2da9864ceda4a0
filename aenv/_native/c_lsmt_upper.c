/* Writable layers: an append-only data file and an index file of checked records.
 *
 * A write appends its data, then its record. Both are in the page cache when the write returns, so a killed server
 * loses nothing. After a power loss the records behind the last barrier are kept as far as they and their data are
 * whole; a flush makes everything before it whole.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lsmt_scratch.h"
#include "lsmt_upper.h"

#ifndef RELEASE_FROM /* tests use small numbers */
#define RELEASE_FROM (8u << 20) /* bytes of dead data that are worth a short stop */
#define SHORTEN_FROM (1u << 16) /* records of an index file that may be worth rewriting */
#define DIRECT_FROM (128u << 10) /* bytes of a write that goes past the page cache */
#endif
#define DIRECT_ALIGN 4096u
#define RESERVED (16u << 20) /* bytes of the file that are allocated ahead for writes past the page cache */

int sync_directory(const char *path)
{
    char *copy = strdup(path);
    if (!copy)
        return -ENOMEM;
    int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(copy);
    if (fd < 0)
        return -errno;
    int rc = fsync(fd) ? -errno : 0;
    close(fd);
    return rc;
}

static int create_file(const char *path, const struct lsmt_header *header)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int rc = write_fully(fd, header, sizeof *header, 0);
    close(fd);
    if (rc)
        unlink(path);
    return rc;
}

int upper_create(const char *data, const char *index, uint64_t virtual_size, const char *uuid, const char *parent_uuid,
                 struct fault *fault)
{
    struct lsmt_header header;
    uint32_t seed;
    if (!virtual_size || virtual_size % LSMT_SECTOR || virtual_size / LSMT_SECTOR > LSMT_MAX_SECTORS)
        return fault_set(fault, EINVAL, "virtual_size", "%llu bytes", (unsigned long long)virtual_size);
    int rc = text_check(uuid, parent_uuid, NULL, fault);
    if (rc)
        return rc;
    if ((rc = journal_header(&header, virtual_size, uuid, parent_uuid, &seed)) || (rc = create_file(index, &header)))
        return fault_set(fault, -rc, "index", "cannot create %s: %s", index, strerror(-rc));
    header_fill(&header, LSMT_IS_HEADER | LSMT_IS_DATA, virtual_size, uuid, parent_uuid, NULL);
    if ((rc = create_file(data, &header))) {
        unlink(index);
        return fault_set(fault, -rc, "data", "cannot create %s: %s", data, strerror(-rc));
    }
    return 0;
}

static bool is_sealed(int fd, uint64_t data_end)
{
    struct stat status;
    struct lsmt_header trailer;
    struct fault ignored;
    return fstat(fd, &status) == 0 && (uint64_t)status.st_size >= data_end + LSMT_BLOCK &&
           read_fully(fd, &trailer, sizeof trailer, (uint64_t)status.st_size - LSMT_BLOCK) == 0 &&
           header_check(&trailer, ROLE_TRAILER, &ignored) == 0 && trailer.index_offset == data_end;
}

static int write_map(const struct map *map, int fd, uint32_t seed, uint64_t *records)
{
    struct map_cursor cursor = {0, 0};
    const struct segment *s;
    int rc = 0;
    for (*records = 0; !rc && (s = map_at(map, &cursor)); cursor.at++, ++*records) {
        struct record record = record_make(seed, *records, RECORD_SEGMENT, *s, 0);
        rc = write_fully(fd, &record, sizeof record, LSMT_BLOCK + *records * sizeof record);
    }
    struct record record = record_make(seed, *records, RECORD_BARRIER, (struct segment){LSMT_NO_OFFSET, *records}, 0);
    if (!rc)
        rc = write_fully(fd, &record, sizeof record, LSMT_BLOCK + (*records)++ * sizeof record);
    return !rc && fdatasync(fd) ? -errno : rc;
}

/* The new index file, durable, under a name of its own; gives its descriptor. */
static int prepare_index(struct upper *upper, const char *path, uint32_t *seed, uint64_t *records)
{
    struct lsmt_header header;
    int rc = journal_header(&header, upper->virtual_size, upper->header.uuid, upper->header.parent_uuid, seed);
    if (unlink(path) && errno != ENOENT)
        return -errno;
    if (rc || (rc = create_file(path, &header)))
        return rc;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if ((rc = write_map(&upper->map, fd, *seed, records))) {
        close(fd);
        unlink(path);
    }
    return rc ? rc : fd;
}

static int replace_index(struct upper *upper)
{
    char *path;
    uint32_t seed;
    uint64_t records;
    /* The new file's barrier says that all data is durable. */
    if (fdatasync(upper->data_fd)) {
        upper->failed = errno;
        return -upper->failed;
    }
    if (asprintf(&path, "%s.new", upper->index_path) < 0)
        return -ENOMEM;
    int fd = prepare_index(upper, path, &seed, &records);
    int rc = fd < 0 ? fd : rename(path, upper->index_path) ? -errno : 0;
    if (!rc) {
        close(upper->index_fd);
        upper->index_fd = fd;
        upper->seed = seed;
        upper->records = upper->synced = records;
        /* If the old name comes back after a power loss, what is written from here on is gone. */
        if ((rc = sync_directory(path)))
            upper->failed = -rc;
    } else if (fd >= 0) {
        unlink(path);
        close(fd);
    }
    free(path);
    return rc;
}

/* Writes the map as a new index file with checksums, which takes the old one's place. All data counts as durable, after
 * a flush. Nothing may be written meanwhile. */
static int rewrite_index(struct upper *upper, struct fault *fault)
{
    int rc = replace_index(upper);
    return rc ? fault_set(fault, -rc, "index", "cannot be rewritten: %s", strerror(-rc)) : 0;
}

/* Cuts what is not part of the layer, so that later records cannot bring it back. */
static int cut_tail(struct upper *upper, struct upper_recovery *recovery)
{
    struct stat data, index;
    uint64_t index_end = LSMT_BLOCK + upper->records * sizeof(struct record);
    if (fstat(upper->data_fd, &data) || fstat(upper->index_fd, &index))
        return -errno;
    recovery->cut_data_bytes = (uint64_t)data.st_size > upper->data_end ? (uint64_t)data.st_size - upper->data_end : 0;
    if ((uint64_t)index.st_size != index_end &&
        (ftruncate(upper->index_fd, (off_t)index_end) || fdatasync(upper->index_fd)))
        return -errno;
    if ((uint64_t)data.st_size != upper->data_end &&
        (ftruncate(upper->data_fd, (off_t)upper->data_end) || fdatasync(upper->data_fd)))
        return -errno;
    return 0;
}

static void data_died(void *opaque, uint64_t moffset, uint64_t sectors)
{
    space_dead(&((struct upper *)opaque)->space, moffset, sectors);
}

static int by_moffset(const void *a, const void *b)
{
    uint64_t x = seg_moffset(a), y = seg_moffset(b);
    return x < y ? -1 : x > y;
}

static uint64_t live_sectors(const struct map *map)
{
    struct map_cursor cursor = {0, 0};
    const struct segment *s;
    uint64_t sectors = 0;
    for (; (s = map_at(map, &cursor)); cursor.at++)
        sectors += seg_zeroed(s) ? 0 : seg_length(s);
    return sectors;
}

/* After an open, what no segment uses is free, as soon as nothing else than the map can be replayed. */
static int find_space(struct upper *upper, struct fault *fault)
{
    uint64_t live = live_sectors(&upper->map) * LSMT_SECTOR, begin = LSMT_BLOCK / LSMT_SECTOR;
    if (upper->data_end - LSMT_BLOCK - live < RELEASE_FROM)
        return 0;
    int rc = replace_index(upper);
    if (rc && upper->failed)
        return fault_set(fault, -rc, "index", "cannot be rewritten: %s", strerror(-rc));
    if (rc)
        return 0; /* a full disk must not keep the layer from being opened: it goes on growing */
    size_t count = 0;
    struct segment *segments = malloc((upper->map.count + 1) * sizeof *segments);
    if (!segments)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    struct map_cursor cursor = {0, 0};
    for (const struct segment *s; (s = map_at(&upper->map, &cursor)); cursor.at++)
        if (!seg_zeroed(s))
            segments[count++] = *s;
    qsort(segments, count, sizeof *segments, by_moffset);
    for (size_t i = 0; i < count; i++) {
        if (seg_moffset(&segments[i]) > begin)
            space_dead(&upper->space, begin, seg_moffset(&segments[i]) - begin);
        begin = seg_moffset(&segments[i]) + seg_length(&segments[i]);
    }
    free(segments);
    space_flush_begin(&upper->space);
    space_flush_end(&upper->space, true);
    space_flush_end(&upper->space, true);
    space_release(&upper->space);
    return 0;
}

static int open_files(struct upper *upper, struct fault *fault)
{
    upper->data_fd = open(upper->data_path, O_RDWR | O_CLOEXEC);
    if (upper->data_fd < 0)
        return fault_set(fault, errno, "data", "cannot open %s: %s", upper->data_path, strerror(errno));
    upper->index_fd = open(upper->index_path, O_RDWR | O_CLOEXEC);
    if (upper->index_fd < 0)
        return fault_set(fault, errno, "index", "cannot open %s: %s", upper->index_path, strerror(errno));
    upper->direct_fd = open(upper->data_path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    if (flock(upper->data_fd, LOCK_EX | LOCK_NB))
        return fault_set(fault, EBUSY, "data", "%s is open for writing already", upper->data_path);
    return 0;
}

static int load(struct upper *upper, struct upper_recovery *recovery, struct fault *fault)
{
    struct journal journal;
    int rc = open_files(upper, fault);
    if (rc || (rc = journal_load(upper->data_fd, upper->index_fd, &journal, fault)))
        return rc;
    upper->header = journal.header;
    upper->map = journal.map;
    upper->seed = journal.seed;
    upper->virtual_size = journal.virtual_size;
    upper->data_end = journal.data_end;
    upper->records = journal.records;
    if (is_sealed(upper->data_fd, upper->data_end))
        return fault_set(fault, EEXIST, "data", "%s is sealed", upper->data_path);
    recovery->records = journal.records;
    recovery->cut_records = journal.checked ? journal.file_records - journal.records : 0;
    if (!journal.checked && (rc = rewrite_index(upper, fault)))
        return rc;
    if ((rc = cut_tail(upper, recovery)))
        return fault_set(fault, -rc, "data", "the torn end cannot be cut: %s", strerror(-rc));
    upper->map.dead = data_died;
    upper->map.opaque = upper;
    return find_space(upper, fault);
}

int upper_open(const char *data, const char *index, struct upper **out, struct upper_recovery *recovery,
               struct fault *fault)
{
    struct upper *upper = calloc(1, sizeof *upper);
    pthread_rwlockattr_t attributes;
    if (!upper)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    upper->data_fd = upper->index_fd = upper->direct_fd = -1;
    pthread_mutex_init(&upper->append, NULL);
    pthread_mutex_init(&upper->flushing, NULL);
    pthread_mutex_init(&upper->reserving, NULL);
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&upper->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    upper->data_path = strdup(data);
    upper->index_path = strdup(index);
    int rc = upper->data_path && upper->index_path ? 0 : fault_set(fault, ENOMEM, "memory", "out of memory");
    if (rc || (rc = load(upper, recovery, fault))) {
        upper_close(upper);
        return rc;
    }
    *out = upper;
    return 0;
}

void upper_close(struct upper *upper)
{
    if (!upper)
        return;
    if (upper->data_fd >= 0) {
        if (upper->reserved && !upper->frozen) /* a frozen layer is cut when it is sealed; if this fails, by the next open */
            (void)!ftruncate(upper->data_fd, (off_t)upper->data_end);
        flock(upper->data_fd, LOCK_UN); /* a frozen layer's duplicate would hold the lock for ever */
        close(upper->data_fd);
    }
    if (upper->index_fd >= 0)
        close(upper->index_fd);
    if (upper->direct_fd >= 0)
        close(upper->direct_fd);
    view_close(&upper->view);
    map_free(&upper->map);
    space_free(&upper->space);
    pthread_mutex_destroy(&upper->append);
    pthread_mutex_destroy(&upper->flushing);
    pthread_mutex_destroy(&upper->reserving);
    pthread_rwlock_destroy(&upper->lock);
    free(upper->data_path), free(upper->index_path), free(upper);
}

/* With `append` held. A record that could not be written is overwritten by the next one. */
static int put_record(struct upper *upper, enum record_kind kind, struct segment entry, uint32_t crc)
{
    struct record record = record_make(upper->seed, upper->records, kind, entry, crc);
    int rc = write_fully(upper->index_fd, &record, sizeof record, LSMT_BLOCK + upper->records * sizeof record);
    if (!rc)
        upper->records++;
    return rc;
}

static int put_segment(struct upper *upper, struct segment segment, uint32_t crc)
{
    int rc = put_record(upper, RECORD_SEGMENT, segment, crc);
    if (rc)
        return rc;
    pthread_rwlock_wrlock(&upper->lock);
    rc = map_insert(&upper->map, segment);
    pthread_rwlock_unlock(&upper->lock);
    if (rc)
        upper->records--; /* the next record takes the place of the one that is not in the map */
    return rc;
}

static int may_write(struct upper *upper, uint64_t offset, uint64_t length)
{
    uint64_t size = upper->virtual_size;
    if (offset % LSMT_SECTOR || length % LSMT_SECTOR || offset > size || length > size - offset)
        return -EINVAL;
    if (upper->frozen)
        return -EROFS;
    return -upper->failed;
}

/* A place in the data file, in bytes, that is nobody else's. */
static uint64_t allocate(struct upper *upper, size_t length, uint64_t align)
{
    uint64_t at;
    pthread_mutex_lock(&upper->append);
    if (space_take(&upper->space, length / LSMT_SECTOR, align / LSMT_SECTOR, &at)) {
        at *= LSMT_SECTOR;
    } else {
        uint64_t pad = (align - upper->data_end % align) % align;
        if (pad)
            space_dead(&upper->space, upper->data_end / LSMT_SECTOR, pad / LSMT_SECTOR);
        at = upper->data_end + pad;
        upper->data_end = at + length;
    }
    pthread_mutex_unlock(&upper->append);
    return at;
}

/* The log would fill the page cache with pages that nobody reads (a guest has its own cache), until writers are held
 * back to the pace of the kernel's write-back. Small writes stay in it: there it is faster. */
static int write_direct(struct upper *upper, const void *buffer, size_t length, uint64_t at)
{
    if ((uintptr_t)buffer % DIRECT_ALIGN == 0)
        return write_fully(upper->direct_fd, buffer, length, at);
    void *aligned = scratch_buffer(SCRATCH_DIRECT, length);
    if (!aligned)
        return -ENOMEM;
    memcpy(aligned, buffer, length);
    return write_fully(upper->direct_fd, aligned, length, at);
}

/* File systems let only one write at a time extend a file or allocate blocks past the page cache. If there is no room,
 * the write itself will tell. */
static void reserve(struct upper *upper, uint64_t at, size_t length)
{
    uint64_t end = at + length;
    if (end <= upper->reserved)
        return;
    pthread_mutex_lock(&upper->reserving);
    uint64_t begin = at > upper->reserved ? at : upper->reserved;
    if (end > upper->reserved && fallocate(upper->data_fd, 0, (off_t)begin, (off_t)(end - begin + RESERVED)) == 0)
        upper->reserved = end + RESERVED;
    pthread_mutex_unlock(&upper->reserving);
}

static int write_piece(struct upper *upper, const void *buffer, size_t length, uint64_t offset)
{
    bool direct = upper->direct_fd >= 0 && length >= DIRECT_FROM && length % DIRECT_ALIGN == 0;
    uint64_t at = allocate(upper, length, direct ? DIRECT_ALIGN : LSMT_SECTOR);
    if (direct)
        reserve(upper, at, length);
    int rc = direct ? write_direct(upper, buffer, length, at) : -EINVAL;
    if (rc == -EINVAL) /* small, or a device with larger blocks than DIRECT_ALIGN */
        rc = write_fully(upper->data_fd, buffer, length, at);
    if (rc)
        return rc;
    uint32_t crc = data_crc(upper->seed, buffer, length);
    struct segment segment = seg_make(offset / LSMT_SECTOR, length / LSMT_SECTOR, at / LSMT_SECTOR, false, 0);
    pthread_mutex_lock(&upper->append);
    rc = put_segment(upper, segment, crc);
    pthread_mutex_unlock(&upper->append);
    return rc;
}

int upper_write(struct upper *upper, const void *buffer, size_t length, uint64_t offset)
{
    const char *bytes = buffer;
    int rc = may_write(upper, offset, length);
    if (!rc && length && bytes_are_zero(buffer, length))
        return upper_discard(upper, offset, length);
    while (!rc && length) {
        size_t piece = length < LSMT_MAX_LENGTH * LSMT_SECTOR ? length : LSMT_MAX_LENGTH * LSMT_SECTOR;
        rc = write_piece(upper, bytes, piece, offset);
        bytes += piece, offset += piece, length -= piece;
    }
    return rc;
}

int upper_discard(struct upper *upper, uint64_t offset, uint64_t length)
{
    int rc = may_write(upper, offset, length);
    uint64_t sector = offset / LSMT_SECTOR, left = length / LSMT_SECTOR;
    while (!rc && left) {
        uint64_t piece = left < LSMT_MAX_LENGTH ? left : LSMT_MAX_LENGTH;
        pthread_mutex_lock(&upper->append);
        rc = put_segment(upper, seg_make(sector, piece, upper->data_end / LSMT_SECTOR, true, 0), 0);
        pthread_mutex_unlock(&upper->append);
        sector += piece, left -= piece;
    }
    return rc;
}

/* Not when the files are made: nobody relies on an empty layer, and a disk waits for it. */
static int sync_names(struct upper *upper)
{
    int rc = upper->named ? 0 : sync_directory(upper->data_path);
    if (rc && rc != -ENOENT) /* gone with its directory: it has no name that could be kept */
        return rc;
    upper->named = true;
    return 0;
}

static int flush_locked(struct upper *upper)
{
    int rc = sync_names(upper);
    if (rc)
        return rc;
    pthread_mutex_lock(&upper->append);
    uint64_t records = upper->records;
    bool clean = records == upper->synced;
    if (!clean)
        space_flush_begin(&upper->space);
    pthread_mutex_unlock(&upper->append);
    if (upper->failed)
        return -upper->failed;
    if (clean)
        return 0;
    /* The kernel forgets which pages it could not write: after one failure nothing can be promised any more. */
    if (fdatasync(upper->data_fd) || fdatasync(upper->index_fd)) {
        upper->failed = errno;
        return -upper->failed;
    }
    /* The barrier itself need not be durable: it saves checking the data again, and proves damage. */
    pthread_mutex_lock(&upper->append);
    upper->synced = records;
    bool alone = upper->records == records;
    bool barrier = put_record(upper, RECORD_BARRIER, (struct segment){LSMT_NO_OFFSET, records}, 0) == 0;
    if (barrier && alone)
        upper->synced = upper->records;
    space_flush_end(&upper->space, barrier);
    pthread_mutex_unlock(&upper->append);
    return 0;
}

int upper_flush(struct upper *upper)
{
    pthread_mutex_lock(&upper->flushing);
    int rc = flush_locked(upper);
    pthread_mutex_unlock(&upper->flushing);
    return rc;
}

bool upper_wants_release(struct upper *upper)
{
    pthread_mutex_lock(&upper->append);
    bool wants = upper->space.waiting.sectors * LSMT_SECTOR >= RELEASE_FROM ||
                 (upper->records >= SHORTEN_FROM && upper->records / 4 > upper->map.count);
    pthread_mutex_unlock(&upper->append);
    return wants && !upper->frozen;
}

int upper_release(struct upper *upper)
{
    space_release(&upper->space);
    if (upper->records < SHORTEN_FROM || upper->records / 4 <= upper->map.count)
        return 0;
    return replace_index(upper); /* if there is no room, the long index file goes on being right */
}

int upper_resize(struct upper *upper, uint64_t virtual_size)
{
    if (!virtual_size || virtual_size % LSMT_SECTOR || virtual_size / LSMT_SECTOR > LSMT_MAX_SECTORS)
        return -EINVAL;
    if (upper->frozen)
        return -EROFS;
    pthread_mutex_lock(&upper->append);
    int rc = put_record(upper, RECORD_RESIZE, (struct segment){LSMT_NO_OFFSET, virtual_size / LSMT_SECTOR}, 0);
    if (!rc)
        upper->virtual_size = virtual_size;
    pthread_mutex_unlock(&upper->append);
    if (rc || (rc = upper_flush(upper)))
        return rc;
    /* Other readers know only the headers; ours believe the record. */
    uint64_t at = offsetof(struct lsmt_header, virtual_size);
    upper->header.virtual_size = virtual_size;
    rc = write_fully(upper->data_fd, &virtual_size, sizeof virtual_size, at);
    return rc ? rc : write_fully(upper->index_fd, &virtual_size, sizeof virtual_size, at);
}

int upper_read_at(struct upper *upper, void *buffer, size_t length, uint64_t moffset)
{
    return read_fully(upper->data_fd, buffer, length, moffset);
}

const void *upper_lend(struct upper *upper, size_t length, uint64_t moffset)
{
    return view_at(&upper->view, upper->data_fd, moffset, length);
}

uint64_t upper_virtual_size(const struct upper *upper) { return upper->virtual_size; }
pthread_rwlock_t *upper_lock(struct upper *upper) { return &upper->lock; }
const struct map *upper_map(const struct upper *upper) { return &upper->map; }

uint64_t upper_data_end(struct upper *upper)
{
    pthread_mutex_lock(&upper->append);
    uint64_t end = upper->data_end;
    pthread_mutex_unlock(&upper->append);
    return end;
}

uint64_t upper_segments(struct upper *upper)
{
    pthread_rwlock_rdlock(&upper->lock);
    uint64_t count = upper->map.count;
    pthread_rwlock_unlock(&upper->lock);
    return count;
}
