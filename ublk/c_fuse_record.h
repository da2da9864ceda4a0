/* What of a FUSE connection must outlive its server: a file that is mapped, so that a kill -9 at any point leaves it
 * whole. It belongs to one connection; the files' names and layers lie elsewhere. */
#ifndef AENV_FUSE_RECORD_H
#define AENV_FUSE_RECORD_H

#include <stdint.h>

#define RECORD_MAGIC 0x31726573756661ull
#define RECORD_HANDLES 65536u /* open files at a time */
#define RECORD_REQUEST 512u   /* bytes: the kernel's INIT is much shorter */

struct fuse_handle {
    uint64_t fh; /* 0: free */
    uint64_t ino;
};

struct fuse_record {
    uint64_t magic; /* written last: without it the rest means nothing */
    uint64_t id[2]; /* drawn for each connection */
    uint64_t next_ino;
    uint32_t resend; /* the kernel can send again what a dead server has read and not answered */
    uint32_t init_length;
    char init[RECORD_REQUEST]; /* the request with which the kernel began the connection */
    char reserved[4096 - 4 * 8 - 2 * 4 - RECORD_REQUEST];
    struct fuse_handle handles[RECORD_HANDLES];
};
_Static_assert(sizeof(struct fuse_record) == 4096 + RECORD_HANDLES * 16, "handles begin on a page of their own");

/* Maps the file, which is made if it is not there. 0 or a negative errno. */
int record_open(const char *path, struct fuse_record **out);
void record_close(struct fuse_record *record);
/* Begins with a new connection. */
int record_reset(struct fuse_record *record, uint64_t first_ino);
int record_is_valid(const struct fuse_record *record);

/* The number of an open file is the number of its OPEN request: the kernel uses none twice, and a request that comes
 * again after a crash finds what it has done already. -ENFILE if there are too many. */
int record_has_handle(struct fuse_record *record, uint64_t fh);
int record_add_handle(struct fuse_record *record, uint64_t fh, uint64_t ino);
int record_remove_handle(struct fuse_record *record, uint64_t fh); /* -ENOENT: is gone already */
unsigned record_count_handles(const struct fuse_record *record, uint64_t ino);

#endif
