/* The connection to the kernel: descriptors, worker threads, and how a new server takes them over. What requests mean
 * is not known here. */
#ifndef AENV_FUSE_SESSION_H
#define AENV_FUSE_SESSION_H

#define FUSE_USE_VERSION 312
#include <fuse3/fuse_lowlevel.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "c_fuse_record.h"

#define REQUEST_LARGEST (1u << 20) /* bytes of data of one request */

struct connection;

struct connection_plan {
    const char *directory, *record_path;
    const int *kept; /* descriptors of a living connection, the first one first */
    unsigned kept_count;
    const struct fuse_lowlevel_ops *operations;
    uint64_t first_ino;
    void *opaque; /* what fuse_req_userdata gives */
};

/* 0 or a negative errno. */
int connection_open(const struct connection_plan *plan, struct connection **out);
int connection_serve(struct connection *connection);
void connection_stop(struct connection *connection); /* unmounts, waits for the workers */
void connection_free(struct connection *connection);

struct fuse_session *connection_session(const struct connection *connection);
struct fuse_record *connection_record(const struct connection *connection);
bool connection_resumed(const struct connection *connection);
unsigned connection_descriptors(const struct connection *connection, int *out, unsigned room);

/* Of the request that the calling thread works on. */
uint64_t request_number(void); /* the same when the kernel sends it again */
bool request_is_resent(void);
/* Goes on with `body` in a thread of its own, which may wait for long; the request is answered there, without
 * `request_buffer`. False: too many wait already. */
bool request_park(struct connection *connection, void (*body)(void *argument), void *argument);
char *request_buffer(void); /* for an answer: REQUEST_LARGEST and 1024 bytes, page-aligned. Lies over the request's data */

#endif
