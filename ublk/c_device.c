#define _GNU_SOURCE
#include "c_device.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "c_device_control.h"
#include "c_device_queue.h"
#include "c_device_uapi.h"

#define SECTOR 512u
#define SECTOR_SHIFT 9
#define PAGE_SHIFT 12
#define DISCARD_MOST (1u << 23) /* sectors of one discard: 4 GiB */
#define WORKERS 512 /* at most, of all devices; made when they are needed */
#define RECOVERY_TRIES 10000 /* of a millisecond: the kernel may take that long to notice the end of a large process */
#define ANY_DEVICE UINT32_MAX
/* USER_COPY is as old as GET_FEATURES (Linux 6.5): no kernel that can be asked lacks it. */
#define WANTED_FLAGS \
    (UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE | UBLK_F_CMD_IOCTL_ENCODE | UBLK_F_USER_COPY)
#define USEFUL_FLAGS (UBLK_F_UPDATE_SIZE | UBLK_F_NO_AUTO_PART_SCAN)

struct ublk_front {
    struct ublk_options options;
    struct control *control;
    struct workers *workers;
    uint64_t features;
};

struct ublk_device {
    struct ublk_front *front;
    struct block_device *image;
    struct ublk_dev_info info;
    int fd; /* of the character device */
    unsigned queues;
    struct queue *queue[];
};

/* --- control ----------------------------------------------------------------------------------------------------- */

static int command(struct ublk_front *front, uint32_t op, uint32_t number, uint64_t data, void *argument, size_t length)
{
    struct ublk_ctrl_cmd built = {
        .dev_id = number, .queue_id = UINT16_MAX, .len = (uint16_t)length, .addr = (uintptr_t)argument, .data = data,
    };
    return control_command(front->control, op, built);
}

int ublk_front_open(const struct ublk_options *options, struct ublk_front **out)
{
    struct ublk_front *front = calloc(1, sizeof *front);
    if (!front)
        return -ENOMEM;
    front->options = *options;
    int rc = control_open(&front->control);
    if (rc) {
        free(front);
        return rc;
    }
    rc = command(front, UBLK_CMD_GET_FEATURES, ANY_DEVICE, 0, &front->features, sizeof front->features);
    if (rc || (front->features & WANTED_FLAGS) != WANTED_FLAGS)
        rc = rc == -EPERM || rc == -EACCES ? rc : -EOPNOTSUPP;
    if (!rc)
        rc = workers_start(WORKERS, &front->workers);
    if (rc) {
        control_close(front->control);
        free(front);
    } else {
        *out = front;
    }
    return rc;
}

void ublk_front_close(struct ublk_front *front)
{
    workers_end(front->workers);
    control_close(front->control);
    free(front);
}

uint64_t ublk_front_features(const struct ublk_front *front) { return front->features; }

static int get_info(struct ublk_front *front, uint32_t number, struct ublk_dev_info *info)
{
    int rc = command(front, UBLK_CMD_GET_DEV_INFO, number, 0, info, sizeof *info);
    return rc ? rc : info->server_flags == front->options.owner ? 0 : -EPERM;
}

static int delete(struct ublk_front *front, uint32_t number)
{
    /* DEL_DEV waits until nobody has the block device open any more. */
    int rc = command(front, UBLK_CMD_DEL_DEV_ASYNC, number, 0, NULL, 0);
    return rc == -EOPNOTSUPP ? command(front, UBLK_CMD_DEL_DEV, number, 0, NULL, 0) : rc;
}

int ublk_front_find(struct ublk_front *front, uint32_t number, struct ublk_found *out)
{
    struct ublk_dev_info info;
    int rc = get_info(front, number, &info);
    if (!rc)
        *out = (struct ublk_found){number, info.state};
    return rc;
}

int ublk_front_delete(struct ublk_front *front, uint32_t number)
{
    struct ublk_dev_info info;
    int rc = get_info(front, number, &info);
    if (rc)
        return rc;
    command(front, UBLK_CMD_STOP_DEV, number, 0, NULL, 0);
    return delete(front, number);
}

/* --- devices ----------------------------------------------------------------------------------------------------- */

static int open_char_device(uint32_t number)
{
    char path[32];
    snprintf(path, sizeof path, "/dev/ublkc%u", number);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static struct ublk_device *new_device(struct ublk_front *front, const struct ublk_dev_info *info)
{
    struct ublk_device *device = calloc(1, sizeof *device + info->nr_hw_queues * sizeof *device->queue);
    if (device) {
        device->front = front;
        device->info = *info;
        device->fd = -1;
    }
    return device;
}

static int start_queues(struct ublk_device *device)
{
    struct queue_options options = {
        .depth = device->info.queue_depth,
        .image = &device->image, .workers = device->front->workers,
    };
    int rc = 0;
    if ((device->fd = open_char_device(device->info.dev_id)) < 0)
        return device->fd;
    options.fd = device->fd;
    for (; !rc && device->queues < device->info.nr_hw_queues; device->queues += rc == 0) {
        options.number = device->queues;
        rc = queue_start(&options, &device->queue[device->queues]);
    }
    return rc;
}

/* With the queues serving until the kernel has taken back their requests. */
static void stop_queues(struct ublk_device *device)
{
    command(device->front, UBLK_CMD_STOP_DEV, device->info.dev_id, 0, NULL, 0);
    for (unsigned i = 0; i < device->queues; i++)
        queue_join(device->queue[i]);
    if (device->fd >= 0)
        close(device->fd);
}

int ublk_device_prepare(struct ublk_front *front, struct ublk_device **out)
{
    struct ublk_dev_info info = {
        .nr_hw_queues = (uint16_t)front->options.queues, .queue_depth = (uint16_t)front->options.depth,
        .max_io_buf_bytes = LARGEST, .dev_id = ANY_DEVICE, .server_flags = front->options.owner,
        .flags = WANTED_FLAGS | (front->features & USEFUL_FLAGS),
    };
    int rc = command(front, UBLK_CMD_ADD_DEV, ANY_DEVICE, 0, &info, sizeof info);
    if (rc)
        return rc;
    struct ublk_device *device = new_device(front, &info);
    if (!device) {
        delete(front, info.dev_id);
        return -ENOMEM;
    }
    if ((rc = start_queues(device)))
        ublk_device_remove(device);
    else
        *out = device;
    return rc;
}

static int set_params(struct ublk_device *device)
{
    struct block_device *image = device->image;
    struct ublk_params params = {
        .len = UBLK_PARAMS_LENGTH, .types = UBLK_PARAM_BASIC | UBLK_PARAM_DISCARD,
        .basic = {
            .attributes = image->read_only ? UBLK_ATTR_READ_ONLY : UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA,
            .logical_shift = SECTOR_SHIFT, .physical_shift = PAGE_SHIFT, .io_min_shift = PAGE_SHIFT,
            .io_opt_shift = PAGE_SHIFT, .max_sectors = LARGEST / SECTOR, .dev_sectors = image->size(image) / SECTOR,
        },
        .discard = {
            .granularity = 1u << PAGE_SHIFT, .max_sectors = DISCARD_MOST, .max_write_zeroes_sectors = DISCARD_MOST,
            .max_segments = 1, /* the kernel takes no other number */
        },
    };
    if (image->read_only)
        params.types = UBLK_PARAM_BASIC;
    return command(device->front, UBLK_CMD_SET_PARAMS, device->info.dev_id, 0, &params, UBLK_PARAMS_LENGTH);
}

int ublk_device_start(struct ublk_device *device, struct block_device *image)
{
    device->image = image;
    int rc = set_params(device);
    return rc ? rc : command(device->front, UBLK_CMD_START_DEV, device->info.dev_id, (uint64_t)getpid(), NULL, 0);
}

/* The kernel refuses until the last reference of the killed process to the character device is gone. */
static int start_recovery(struct ublk_front *front, uint32_t number)
{
    int rc = -EBUSY;
    for (int i = 0; rc == -EBUSY && i < RECOVERY_TRIES; i++) {
        if (i)
            usleep(1000);
        rc = command(front, UBLK_CMD_START_RECOVERY, number, 0, NULL, 0);
    }
    return rc;
}

int ublk_device_recover(struct ublk_front *front, uint32_t number, struct block_device *image,
                        struct ublk_device **out)
{
    struct ublk_dev_info info;
    int rc = get_info(front, number, &info);
    if (rc || (rc = start_recovery(front, number)))
        return rc;
    struct ublk_device *device = new_device(front, &info);
    if (!device)
        return -ENOMEM;
    device->image = image;
    if (!(rc = start_queues(device)))
        rc = command(front, UBLK_CMD_END_RECOVERY, number, (uint64_t)getpid(), NULL, 0);
    if (rc)
        ublk_device_remove(device);
    else
        *out = device;
    return rc;
}

int ublk_device_resize(struct ublk_device *device)
{
    uint64_t sectors = device->image->size(device->image) / SECTOR;
    if (!(device->front->features & UBLK_F_UPDATE_SIZE))
        return -EOPNOTSUPP;
    return command(device->front, UBLK_CMD_UPDATE_SIZE, device->info.dev_id, sectors, NULL, 0);
}

void ublk_device_remove(struct ublk_device *device)
{
    stop_queues(device);
    delete(device->front, device->info.dev_id);
    free(device);
}

uint32_t ublk_device_number(const struct ublk_device *device) { return device->info.dev_id; }
