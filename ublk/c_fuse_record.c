#define _GNU_SOURCE
#include "c_fuse_record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

int record_open(const char *path, struct fuse_record **out)
{
    int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600), rc = 0;
    void *mapped = MAP_FAILED;
    if (fd < 0)
        return -errno;
    /* With its blocks set aside: a full disk must not become a SIGBUS. */
    if ((rc = -posix_fallocate(fd, 0, sizeof **out)) == 0) {
        mapped = mmap(NULL, sizeof **out, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        rc = mapped == MAP_FAILED ? -errno : 0;
    }
    close(fd);
    if (!rc)
        *out = mapped;
    return rc;
}

void record_close(struct fuse_record *record)
{
    if (record)
        munmap(record, sizeof *record);
}

int record_reset(struct fuse_record *record, uint64_t first_ino)
{
    record->magic = 0;
    atomic_thread_fence(memory_order_seq_cst);
    memset(record, 0, sizeof *record);
    if (getrandom(record->id, sizeof record->id, 0) != sizeof record->id)
        return -EIO;
    record->next_ino = first_ino;
    return 0;
}

int record_is_valid(const struct fuse_record *record)
{
    return record->magic == RECORD_MAGIC && record->init_length && record->init_length <= RECORD_REQUEST;
}

static struct fuse_handle *find(struct fuse_record *record, uint64_t fh)
{
    for (unsigned i = 0; i < RECORD_HANDLES; i++)
        if (record->handles[i].fh == fh)
            return &record->handles[i];
    return NULL;
}

int record_has_handle(struct fuse_record *record, uint64_t fh) { return find(record, fh) != NULL; }

/* What the kernel sees of a killed process' stores is a prefix of them as long as the compiler keeps their order:
 * `fh` makes an entry valid, and is written last. */
int record_add_handle(struct fuse_record *record, uint64_t fh, uint64_t ino)
{
    struct fuse_handle *free_one = find(record, 0);
    if (!free_one)
        return -ENFILE;
    free_one->ino = ino;
    atomic_signal_fence(memory_order_seq_cst);
    *(volatile uint64_t *)&free_one->fh = fh;
    return 0;
}

int record_remove_handle(struct fuse_record *record, uint64_t fh)
{
    struct fuse_handle *handle = fh ? find(record, fh) : NULL;
    if (!handle)
        return -ENOENT;
    *(volatile uint64_t *)&handle->fh = 0;
    return 0;
}

unsigned record_count_handles(const struct fuse_record *record, uint64_t ino)
{
    unsigned count = 0;
    for (unsigned i = 0; i < RECORD_HANDLES; i++)
        count += record->handles[i].fh && record->handles[i].ino == ino;
    return count;
}
