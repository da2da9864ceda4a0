/* The FUSE front end: one directory, one regular file per image. The connection to the kernel lives as long as somebody
 * holds its descriptors; a server that is given those of a dead one goes on where that ended. */
#ifndef AENV_FUSE_H
#define AENV_FUSE_H

#include <sys/types.h>

#include "block.h"

#define FUSE_FRONT_KEPT 9 /* descriptors of a connection at most */

struct fuse_front;

struct fuse_image {
    const char *name;
    struct block_device *device;
    bool cached; /* keep pages of the file in the page cache; else the kernel caches nothing */
    uid_t uid;
    gid_t gid;
    mode_t mode;
    uint64_t ino;     /* 0: draw one. The kernel knows the file by it, also after a restart */
    uint64_t made_at; /* nanoseconds since 1970: with other times the kernel would drop its cached pages */
};

/* All give 0 or a negative errno. */
/* Mounts; or, with the descriptors of a connection that is still alive and `record`, takes that over. They are the
 * caller's; duplicates are used. Takes away what a killed server left mounted there. No request is answered before
 * fuse_front_serve. */
int fuse_front_start(const char *directory, const char *record, const int *kept, unsigned kept_count,
                     struct fuse_front **out);
/* Begin to answer requests, with those that a dead server has not answered. */
int fuse_front_serve(struct fuse_front *front);
bool fuse_front_resumed(const struct fuse_front *front); /* it is a connection taken over */
void fuse_front_id(const struct fuse_front *front, uint64_t out[2]); /* of the connection */
/* What somebody must hold so that the connection survives. They stay the front's. Gives their number. */
unsigned fuse_front_descriptors(const struct fuse_front *front, int out[FUSE_FRONT_KEPT]);

int fuse_front_add(struct fuse_front *front, const struct fuse_image *image, uint64_t *ino);
/* -EBUSY if somebody has the file open, still after `patience` milliseconds (the kernel tells of a close a little later
 * than close() returns). Afterwards no request uses the device. */
int fuse_front_remove(struct fuse_front *front, const char *name, unsigned patience);
int fuse_front_opens(struct fuse_front *front, const char *name); /* how many have it open */
int fuse_front_resized(struct fuse_front *front, const char *name);
void fuse_front_stop(struct fuse_front *front); /* unmounts; open files fail from then on */

#endif
