/* The data plane: one thread and one ring for each queue of a device. */
#ifndef AENV_DEVICE_QUEUE_H
#define AENV_DEVICE_QUEUE_H

#include "block.h"
#include "c_device_workers.h"

struct queue;

struct queue_options {
    int fd; /* of the character device; stays the caller's */
    unsigned number, depth;
    struct block_device *const *image; /* read when a request comes: a prepared device has none yet */
    struct workers *workers;
};

/* Returns when all requests are fetched, which is what the kernel waits for before it starts a device. */
int queue_start(const struct queue_options *options, struct queue **out);
/* Waits until the kernel has taken all requests back (STOP_DEV). Frees `queue`. */
void queue_join(struct queue *queue);

#endif
