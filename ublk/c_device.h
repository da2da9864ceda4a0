/* The ublk front end: images as /dev/ublkbN, served from threads of our own over io_uring.
 *
 * All functions that return int give 0 or a negative errno, and may block: call them without the GIL, and never from a
 * thread that serves a queue.
 */
#ifndef AENV_DEVICE_H
#define AENV_DEVICE_H

#include <stdint.h>

#include "block.h"

struct ublk_front;
struct ublk_device;

struct ublk_options {
    unsigned queues, depth; /* of each device; a thread per queue */
    uint64_t owner;         /* marks the devices of this server in the kernel, so that its successor finds them */
};

/* What the kernel knows of a device of ours. */
struct ublk_found {
    uint32_t number;
    unsigned state; /* enum ublk_state */
};

/* -ENOENT, -EACCES …: there is no ublk for us here. -EOPNOTSUPP: the kernel is too old. */
int ublk_front_open(const struct ublk_options *options, struct ublk_front **out);
void ublk_front_close(struct ublk_front *front); /* no device of it may be left */
uint64_t ublk_front_features(const struct ublk_front *front);

/* A device that the kernel knows and whose threads wait for requests, but without an image and a size. */
int ublk_device_prepare(struct ublk_front *front, struct ublk_device **out);
/* Gives it an image; then /dev/ublkbN is there. After an error the device is still to be removed. */
int ublk_device_start(struct ublk_device *device, struct block_device *image);
/* Takes over a device whose server was killed. Whoever waits for it goes on. */
int ublk_device_recover(struct ublk_front *front, uint32_t number, struct block_device *image,
                        struct ublk_device **out);
/* The image has another size. -EOPNOTSUPP before Linux 6.16. */
int ublk_device_resize(struct ublk_device *device);
/* Whoever has it open gets errors from then on. Afterwards no request uses the image. Frees `device`. */
void ublk_device_remove(struct ublk_device *device);
uint32_t ublk_device_number(const struct ublk_device *device);

/* The state of a device with our mark; -ENODEV if there is none, -EPERM if it is somebody else's. */
int ublk_front_find(struct ublk_front *front, uint32_t number, struct ublk_found *out);
/* Stops and deletes a device that nobody serves. */
int ublk_front_delete(struct ublk_front *front, uint32_t number);

#endif
