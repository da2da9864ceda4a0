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
#include "lsmt_view.h"

/* Alignment for O_DIRECT that every block device and file system of today accepts. */
#define DIRECT_ALIGN 4096u
#define SMALLEST_FILE 1024u /* a ZFile's header and trailer */

struct file_source {
    struct source source;
    int fd, direct_fd; /* direct_fd < 0: the file system has no O_DIRECT */
    struct view view;
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
    view_close(&file->view);
    close(file->fd);
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    free(file);
}

struct source *source_file(int fd, const char *path, uint64_t size)
{
    struct file_source *file = calloc(1, sizeof *file);
    if (!file) {
        close(fd);
        return NULL;
    }
    file->source = (struct source){file_read, file_close, size, false};
    file->fd = fd;
    file->direct_fd = path ? open(path, O_RDONLY | O_DIRECT | O_CLOEXEC) : -1;
    return &file->source;
}

/* --- windows ------------------------------------------------------------------------------------------------- */

struct window {
    struct source source, *inner;
    uint64_t base;
};

static int window_read(struct source *source, void *buffer, size_t length, uint64_t offset, bool direct)
{
    struct window *window = (struct window *)source;
    if (offset > source->size || length > source->size - offset)
        return -ENODATA;
    return window->inner->read(window->inner, buffer, length, offset + window->base, direct);
}

static void window_close(struct source *source)
{
    struct window *window = (struct window *)source;
    window->inner->close(window->inner);
    free(window);
}

static struct source *source_window(struct source *inner, uint64_t base, uint64_t size)
{
    struct window *window = calloc(1, sizeof *window);
    if (!window)
        return NULL;
    *window = (struct window){{window_read, window_close, size, inner->remote}, inner, base};
    return &window->source;
}

const void *source_lend(struct source *source, size_t length, uint64_t offset)
{
    if (offset > source->size || length > source->size - offset)
        return NULL;
    if (source->read == window_read) {
        struct window *window = (struct window *)source;
        return source_lend(window->inner, length, offset + window->base);
    }
    struct file_source *file = (struct file_source *)source;
    return source->read == file_read ? view_at(&file->view, file->fd, offset, length) : NULL;
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

static int tar_locate(struct source *file, uint64_t *base, uint64_t *size, struct fault *fault)
{
    uint8_t block[3][512];
    uint64_t member = 0, pax = 0;
    int rc = file->read(file, block, sizeof block, 0, false);
    if (rc)
        return rc == -ENODATA ? fault_set(fault, EBADMSG, "tar.header", "the file ends inside it")
                              : fault_set(fault, -rc, "tar.header", "cannot be read");
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
    if (!member || member > file->size - *base)
        return fault_set(fault, EBADMSG, "tar.size", "%llu bytes do not fit in a file of %llu",
                         (unsigned long long)member, (unsigned long long)file->size);
    *size = member;
    return 0;
}

/* Takes over `*source`, which may be another one afterwards. */
static int unwrap_tar(struct source **source, const uint8_t head[512], struct fault *fault)
{
    uint64_t base = 0, size = 0;
    if (memcmp(head + 257, "ustar", 5) != 0)
        return 0;
    int rc = tar_locate(*source, &base, &size, fault);
    if (rc)
        return rc;
    struct source *window = source_window(*source, base, size);
    if (!window)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    *source = window;
    return 1;
}

static int read_head(struct source *source, uint8_t head[512], struct fault *fault)
{
    int rc = source->size < SMALLEST_FILE ? -ENODATA : source->read(source, head, 512, 0, false);
    if (rc == -ENODATA)
        return fault_set(fault, EBADMSG, "file", "%llu bytes are too few for a layer", (unsigned long long)source->size);
    return rc ? fault_set(fault, -rc, "file", "cannot be read: %s", strerror(-rc)) : 0;
}

int source_unwrap(struct source *source, struct source **out, char kind[16], struct fault *fault)
{
    uint8_t head[512];
    int tar = 0, rc = read_head(source, head, fault);
    kind[0] = 0;
    if (!rc && (tar = unwrap_tar(&source, head, fault)) < 0)
        rc = tar;
    if (!rc && tar)
        rc = read_head(source, head, fault);
    bool zfile = !rc && memcmp(head, "ZFile", 5) == 0;
    if (zfile)
        rc = source_zfile(source, out, fault);
    else if (!rc)
        *out = source;
    snprintf(kind, 16, "%s%s", tar > 0 ? "tar+" : "", zfile ? "zfile" : "lsmt");
    if (rc)
        source->close(source);
    return rc;
}

int source_open(const char *path, struct source **out, char kind[16], struct fault *fault)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fault_set(fault, errno, "path", "cannot open %s: %s", path, strerror(errno));
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) {
        close(fd);
        return fault_set(fault, EINVAL, "path", "%s is not a regular file", path);
    }
    struct source *file = source_file(fd, path, (uint64_t)status.st_size);
    if (!file)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    return source_unwrap(file, out, kind, fault);
}
