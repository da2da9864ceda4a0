/* Plain files as sources, and the tar wrapper of OCI blobs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lsmt.h"
#include "lsmt_scratch.h"

/* Alignment for O_DIRECT that every block device and file system of today accepts. */
#define DIRECT_ALIGN 4096u
#define SMALLEST_FILE 1024u /* a ZFile's header and trailer */

struct file_source {
    struct source source;
    int fd, direct_fd; /* direct_fd < 0: the file system has no O_DIRECT */
    uint64_t base;
};

static int file_read_direct(struct file_source *file, void *buffer, size_t length, uint64_t offset)
{
    uint64_t begin = offset & ~(uint64_t)(DIRECT_ALIGN - 1);
    uint64_t end = (offset + length + DIRECT_ALIGN - 1) & ~(uint64_t)(DIRECT_ALIGN - 1);
    bool aligned = begin == offset && end == offset + length && ((uintptr_t)buffer & (DIRECT_ALIGN - 1)) == 0;
    char *target = aligned ? buffer : scratch_buffer(SCRATCH_DIRECT, end - begin);
    size_t got = 0;
    if (!target)
        return -ENOMEM;
    while (got < offset - begin + length) {
        ssize_t done = pread(file->direct_fd, target + got, end - begin - got, (off_t)(begin + got));
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -errno;
        if (done == 0)
            return -ENODATA;
        got += (size_t)done;
    }
    if (!aligned)
        memcpy(buffer, target + (offset - begin), length);
    return 0;
}

static int file_read(struct source *source, void *buffer, size_t length, uint64_t offset, bool direct)
{
    struct file_source *file = (struct file_source *)source;
    if (offset > source->size || length > source->size - offset)
        return -ENODATA;
    offset += file->base;
    if (direct && file->direct_fd >= 0) {
        int rc = file_read_direct(file, buffer, length, offset);
        if (rc != -EINVAL) /* EINVAL: a device with larger blocks than DIRECT_ALIGN */
            return rc;
    }
    int rc = read_fully(file->fd, buffer, length, offset);
    if (rc == 0 && direct)
        posix_fadvise(file->fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
    return rc;
}

static void file_close(struct source *source)
{
    struct file_source *file = (struct file_source *)source;
    close(file->fd);
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    free(file);
}

struct source *source_file(int fd, const char *path, uint64_t base, uint64_t size)
{
    struct file_source *file = calloc(1, sizeof *file);
    if (!file) {
        close(fd);
        return NULL;
    }
    file->source = (struct source){file_read, file_close, size};
    file->fd = fd;
    file->base = base;
    file->direct_fd = path ? open(path, O_RDONLY | O_DIRECT | O_CLOEXEC) : -1;
    return &file->source;
}

/* --- tar ----------------------------------------------------------------------------------------------------- */

static int parse_octal(const char *text, size_t length, uint64_t *value)
{
    *value = 0;
    size_t i = 0;
    while (i < length && text[i] == ' ')
        i++;
    for (; i < length && text[i] >= '0' && text[i] <= '7'; i++)
        *value = *value << 3 | (uint64_t)(text[i] - '0');
    return i < length && text[i] && text[i] != ' ' ? -EBADMSG : 0;
}

static bool tar_checksum_holds(const uint8_t block[512])
{
    uint64_t stored, sum = 0;
    for (int i = 0; i < 512; i++)
        sum += i >= 148 && i < 156 ? ' ' : block[i];
    return parse_octal((const char *)block + 148, 8, &stored) == 0 && stored == sum;
}

/* The `size` of a pax header's records ("<length> size=<bytes>\n"); 0 if there is none. */
static int pax_size(const char *records, size_t length, uint64_t *size, struct fault *fault)
{
    char text[513];
    memcpy(text, records, length);
    text[length] = 0;
    for (char *at = text; *at;) {
        char *key, *end;
        unsigned long record = strtoul(at, &key, 10);
        if (key == at || *key != ' ' || record < 5 || record > (size_t)(text + length - at) || at[record - 1] != '\n')
            return fault_set(fault, EBADMSG, "tar.pax.record", "a malformed pax record");
        if (strncmp(key + 1, "size=", 5) == 0) {
            errno = 0;
            *size = strtoull(key + 6, &end, 10);
            if (end == key + 6 || *end != '\n' || errno)
                return fault_set(fault, EBADMSG, "tar.pax.size", "not a number");
        }
        at += record;
    }
    return 0;
}

static int tar_locate(int fd, uint64_t file_size, uint64_t *base, uint64_t *size, struct fault *fault)
{
    uint8_t block[3][512];
    uint64_t member = 0, pax = 0;
    int rc = read_fully(fd, block, sizeof block, 0);
    if (rc)
        return fault_set(fault, EBADMSG, "tar.header", "the file ends inside it");
    if (!tar_checksum_holds(block[0]))
        return fault_set(fault, EBADMSG, "tar.checksum", "does not match the header");
    if (block[0][156] != 'x') {
        *base = 512;
        rc = parse_octal((char *)block[0] + 124, 12, &member);
    } else {
        *base = 1536;
        rc = parse_octal((char *)block[0] + 124, 12, &pax);
        if (rc || pax > 512)
            return fault_set(fault, EBADMSG, "tar.pax.length", "a pax header of more than one block");
        if (memcmp(block[2] + 257, "ustar", 5) != 0)
            return fault_set(fault, EBADMSG, "tar.member.magic", "not \"ustar\": the layer was never finished");
        if (!tar_checksum_holds(block[2]))
            return fault_set(fault, EBADMSG, "tar.member.checksum", "does not match the header");
        if ((rc = pax_size((char *)block[1], pax, &member, fault)))
            return rc;
        if (!member)
            rc = parse_octal((char *)block[2] + 124, 12, &member);
    }
    if (rc)
        return fault_set(fault, EBADMSG, "tar.size", "not an octal number");
    if (!member || member > file_size - *base)
        return fault_set(fault, EBADMSG, "tar.size", "%llu bytes do not fit in a file of %llu",
                         (unsigned long long)member, (unsigned long long)file_size);
    *size = member;
    return 0;
}

int source_open(const char *path, struct source **out, char kind[16], struct fault *fault)
{
    struct stat status;
    uint8_t head[512] = {0};
    uint64_t base = 0, size;
    int rc, fd = open(path, O_RDONLY | O_CLOEXEC);
    kind[0] = 0;
    if (fd < 0)
        return fault_set(fault, errno, "path", "cannot open %s: %s", path, strerror(errno));
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) {
        close(fd);
        return fault_set(fault, EINVAL, "path", "%s is not a regular file", path);
    }
    size = (uint64_t)status.st_size;
    if (size < SMALLEST_FILE || read_fully(fd, head, sizeof head, 0)) {
        close(fd);
        return fault_set(fault, EBADMSG, "file", "%llu bytes are too few for a layer", (unsigned long long)size);
    }
    if (memcmp(head + 257, "ustar", 5) == 0 && (rc = tar_locate(fd, size, &base, &size, fault))) {
        close(fd);
        return rc;
    }
    struct source *file = source_file(fd, path, base, size);
    if (!file)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    bool zfile = false;
    if ((rc = file->read(file, head, sizeof head, 0, false)))
        rc = fault_set(fault, EBADMSG, "file", "%llu bytes are too few for a layer", (unsigned long long)size);
    else if ((zfile = memcmp(head, "ZFile", 5) == 0))
        rc = source_zfile(file, out, fault);
    else
        *out = file;
    snprintf(kind, 16, "%s%s", base ? "tar+" : "", zfile ? "zfile" : "lsmt");
    if (rc)
        file->close(file);
    return rc;
}
