/* The FUSE front end: one directory, one regular file per image. */
#ifndef AENV_FUSE_H
#define AENV_FUSE_H

#include <sys/types.h>

#include "block.h"

struct fuse_front;

struct fuse_image {
    const char *name;
    struct block_device *device;
    bool cached; /* keep pages of the file in the page cache; else the kernel caches nothing */
    uid_t uid;
    gid_t gid;
    mode_t mode;
};

/* All give 0 or a negative errno. */
/* Takes away what a killed server left mounted there. */
int fuse_front_start(const char *directory, struct fuse_front **out);
int fuse_front_add(struct fuse_front *front, const struct fuse_image *image);
/* -EBUSY if somebody has the file open, still after `patience` milliseconds (the kernel tells of a close a little later
 * than close() returns). Afterwards no request uses the device. */
int fuse_front_remove(struct fuse_front *front, const char *name, unsigned patience);
int fuse_front_opens(struct fuse_front *front, const char *name); /* how many have it open */
int fuse_front_resized(struct fuse_front *front, const char *name);
void fuse_front_stop(struct fuse_front *front); /* unmounts; open files fail from then on */

#endif
