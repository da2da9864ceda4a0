/* Run by test_power.py: writes to an image and logs what reaches the kernel, so that a power loss can be played.
 *
 * Linked with --wrap for each call below. The trace is a row of `struct event`, each followed by `length` bytes of data.
 * Block contents are one 32-bit number, repeated; WRITE_BEGIN and the like tell what the image was asked and answered.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lsmt.h"

#define BLOCKS 64
#define BLOCK 4096

enum { PWRITE, SYNC, TRUNCATE, RENAME, UNLINK, WRITE_BEGIN, WRITE_END, FLUSH_END, CREATED };

struct event {
    uint32_t kind;
    uint32_t pad;
    uint64_t file, offset, length; /* file: inode; for the image's own events, the block and its value */
};

static FILE *trace;

static void put(uint32_t kind, uint64_t file, uint64_t offset, const void *data, uint64_t length)
{
    struct event event = {kind, 0, file, offset, length};
    if (!trace)
        return;
    fwrite(&event, sizeof event, 1, trace);
    fwrite(data, 1, length, trace);
}

static uint64_t inode(int fd)
{
    struct stat status;
    return fstat(fd, &status) ? 0 : status.st_ino;
}

ssize_t __real_pwrite(int fd, const void *data, size_t length, off_t offset);
int __real_fdatasync(int fd);
int __real_ftruncate(int fd, off_t length);
int __real_rename(const char *from, const char *to);

ssize_t __wrap_pwrite(int fd, const void *data, size_t length, off_t offset)
{
    put(PWRITE, inode(fd), (uint64_t)offset, data, length);
    return __real_pwrite(fd, data, length, offset);
}

int __wrap_fdatasync(int fd)
{
    int rc = __real_fdatasync(fd);
    put(SYNC, inode(fd), 0, NULL, 0);
    return rc;
}

int __wrap_ftruncate(int fd, off_t length)
{
    put(TRUNCATE, inode(fd), (uint64_t)length, NULL, 0);
    return __real_ftruncate(fd, length);
}

int __wrap_rename(const char *from, const char *to)
{
    struct stat status;
    assert(stat(from, &status) == 0);
    put(RENAME, status.st_ino, 0, to, strlen(to));
    return __real_rename(from, to);
}

int main(int count, char **arguments)
{
    char data[512], index[512];
    uint32_t block[BLOCK / 4];
    struct fault fault;
    struct upper *upper;
    struct upper_recovery recovery;
    struct image *image;
    struct stat status;
    assert(count == 4);
    srandom((unsigned)atoi(arguments[3]));
    snprintf(data, sizeof data, "%s/data", arguments[1]);
    snprintf(index, sizeof index, "%s/index", arguments[1]);
    trace = fopen(arguments[2], "w");
    if (upper_create(data, index, BLOCKS * BLOCK, "01234567-89ab-cdef-0123-456789abcdef", NULL, &fault) ||
        upper_open(data, index, &upper, &recovery, &fault) || image_new(NULL, upper, false, &image, &fault)) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        return 1;
    }
    assert(stat(data, &status) == 0);
    put(CREATED, status.st_ino, 0, data, strlen(data));
    assert(stat(index, &status) == 0);
    put(CREATED, status.st_ino, 0, index, strlen(index));
    for (uint32_t value = 1; value < 1200; value++) {
        uint64_t at = (uint64_t)random() % BLOCKS;
        bool discard = random() % 8 == 0;
        for (unsigned i = 0; i < BLOCK / 4; i++)
            block[i] = value;
        put(WRITE_BEGIN, at, discard ? 0 : value, NULL, 0);
        assert((discard ? image_discard(image, at * BLOCK, BLOCK) : image_write(image, block, BLOCK, at * BLOCK)) == 0);
        put(WRITE_END, at, discard ? 0 : value, NULL, 0);
        if (random() % 12 == 0) {
            assert(image_flush(image) == 0);
            put(FLUSH_END, 0, 0, NULL, 0);
        }
    }
    image_free(image);
    fclose(trace);
    assert(stat(data, &status) == 0);
    printf("%lld\n", (long long)status.st_size);
    return 0;
}
