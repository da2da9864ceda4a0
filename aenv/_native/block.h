/* What a front end (FUSE, ublk) sees of an image: a block device. All calls may come from any thread at any time
 * between creation and destruction of the device. They return 0 or a negative errno. */
#ifndef AENV_BLOCK_H
#define AENV_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Gets bytes that stay valid and unchanged while it runs. Only the kernel may touch them: what cannot be read gives EFAULT
 * in a system call, and a signal otherwise. */
typedef int (*lend_t)(void *opaque, const struct iovec *pieces, int count);

struct block_device {
    int (*read)(struct block_device *device, void *buffer, size_t length, uint64_t offset);
    int (*write)(struct block_device *device, const void *buffer, size_t length, uint64_t offset);
    int (*discard)(struct block_device *device, uint64_t offset, uint64_t length); /* reads as zeros afterwards */
    int (*flush)(struct block_device *device);
    /* A read without a copy. -EOPNOTSUPP: not of these bytes; else what `use` gives. Fall back to `read` after errors. */
    int (*lend)(struct block_device *device, size_t length, uint64_t offset, lend_t use, void *opaque);
    /* As `read`, but -EAGAIN where that would wait for a remote layer; its bytes are on their way then. */
    int (*read_now)(struct block_device *device, void *buffer, size_t length, uint64_t offset);
    uint64_t (*size)(struct block_device *device);
    bool read_only;
};

#endif
