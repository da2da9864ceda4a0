/* The end of a writable layer: frozen in memory, sealed on disk; and reading one without changing it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lsmt_index.h"
#include "lsmt_upper.h"

#define ENTRIES_PIECE 4096u /* entries written at once */

static struct layer *as_layer(int data_fd, const char *path, uint64_t data_end, uint64_t virtual_size,
                              const struct lsmt_header *header, uint64_t entries)
{
    struct layer_info info = {0};
    int fd = fcntl(data_fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return NULL;
    struct source *source = source_file(fd, path, data_end);
    if (!source)
        return NULL;
    header_info(header, &info);
    snprintf(info.kind, sizeof info.kind, "writable");
    info.virtual_size = virtual_size;
    info.index_entries = entries;
    info.data_bytes = data_end - LSMT_BLOCK;
    struct layer *layer = layer_new(source, &info);
    if (!layer)
        source->close(source);
    return layer;
}

int upper_freeze(struct upper *upper, struct layer **layer, struct index **index)
{
    upper->frozen = true;
    if (!(*index = map_freeze(&upper->map)))
        return -ENOMEM;
    *layer = as_layer(upper->data_fd, upper->data_path, upper->data_end, upper->virtual_size, &upper->header,
                      (*index)->count);
    if (!*layer) {
        index_unref(*index);
        upper->frozen = false;
        return -ENOMEM;
    }
    return 0;
}

void upper_thaw(struct upper *upper) { upper->frozen = false; }

static int write_piece(struct upper *upper, const struct segment *piece, size_t entries, uint64_t number)
{
    return write_fully(upper->data_fd, piece, entries * sizeof *piece, upper->data_end + number * sizeof *piece);
}

/* The map as the index on disk; gives the number of its entries. */
static int write_entries(struct upper *upper, uint64_t *count)
{
    struct segment piece[ENTRIES_PIECE];
    struct map_cursor cursor = {0, 0};
    const struct segment *s;
    size_t have = 0;
    *count = 0;
    for (; (s = map_at(&upper->map, &cursor)); cursor.at++) {
        if (have && seg_join(&piece[have - 1], s))
            continue;
        if (have == ENTRIES_PIECE) {
            int rc = write_piece(upper, piece, have, *count);
            if (rc)
                return rc;
            *count += have, have = 0;
        }
        piece[have++] = *s;
    }
    int rc = write_piece(upper, piece, have, *count);
    *count += have;
    return rc;
}

static int write_seal(struct upper *upper)
{
    struct lsmt_header trailer;
    uint64_t count, end = upper->data_end;
    int rc = ftruncate(upper->data_fd, (off_t)end) ? -errno : write_entries(upper, &count);
    if (rc)
        return rc;
    end += (count * sizeof(struct segment) + LSMT_SECTOR - 1) / LSMT_SECTOR * LSMT_SECTOR;
    header_fill(&trailer, LSMT_IS_DATA | LSMT_SEALED, upper->virtual_size, upper->header.uuid,
                upper->header.parent_uuid, NULL);
    memcpy(trailer.user_tag, upper->header.user_tag, LSMT_TAG);
    trailer.index_offset = upper->data_end;
    trailer.index_size = count;
    /* The trailer says that all before it is there: it must not reach the disk first. */
    if (ftruncate(upper->data_fd, (off_t)end) || fdatasync(upper->data_fd))
        return -errno;
    rc = write_fully(upper->data_fd, &trailer, sizeof trailer, end);
    return !rc && fdatasync(upper->data_fd) ? -errno : rc;
}

int upper_seal(struct upper *upper, struct fault *fault)
{
    if (upper->failed)
        return fault_set(fault, upper->failed, "data", "an earlier flush failed: %s", strerror(upper->failed));
    upper->frozen = true;
    int rc = write_seal(upper);
    /* The layer may have other names: it is complete even if this one has gone, with its directory or without. */
    if (!rc && unlink(upper->index_path) && errno != ENOENT)
        rc = -errno;
    if (!rc && (rc = sync_directory(upper->index_path)) == -ENOENT)
        rc = 0;
    return rc ? fault_set(fault, -rc, "data", "%s cannot be sealed: %s", upper->data_path, strerror(-rc)) : 0;
}

int layer_open_writable(const char *data, const char *index_path, struct layer **out, struct index **index,
                        struct fault *fault)
{
    struct journal journal;
    int data_fd = open(data, O_RDONLY | O_CLOEXEC), index_fd = open(index_path, O_RDONLY | O_CLOEXEC), rc;
    if (data_fd < 0 || index_fd < 0)
        rc = fault_set(fault, errno, data_fd < 0 ? "data" : "index", "cannot open: %s", strerror(errno));
    else
        rc = journal_load(data_fd, index_fd, &journal, fault);
    if (!rc) {
        *index = map_freeze(&journal.map);
        *out = *index ? as_layer(data_fd, data, journal.data_end, journal.virtual_size, &journal.header,
                                 (*index)->count) : NULL;
        map_free(&journal.map);
        if (!*out) {
            index_unref(*index);
            rc = fault_set(fault, ENOMEM, "memory", "out of memory");
        }
    }
    if (data_fd >= 0)
        close(data_fd);
    if (index_fd >= 0)
        close(index_fd);
    return rc;
}
