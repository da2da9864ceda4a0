/* The kernel's ublk interface (include/uapi/linux/ublk_cmd.h), written down here because distributions' headers are
 * older than their kernels. The numbers are part of the ABI. */
#ifndef AENV_DEVICE_UAPI_H
#define AENV_DEVICE_UAPI_H

#include <linux/ioctl.h>
#include <stdint.h>

#define UBLK_CONTROL "/dev/ublk-control"

/* --- control commands: IORING_OP_URING_CMD on UBLK_CONTROL, `struct ublk_ctrl_cmd` in a 128-byte SQE ------------- */

struct ublk_ctrl_cmd {
    uint32_t dev_id;
    uint16_t queue_id; /* UINT16_MAX: not of a queue */
    uint16_t len;
    uint64_t addr;
    uint64_t data;
    uint16_t dev_path_len, pad;
    uint32_t reserved;
};
_Static_assert(sizeof(struct ublk_ctrl_cmd) == 32, "ublksrv_ctrl_cmd");

#define UBLK_CMD_GET_DEV_INFO _IOR('u', 0x02, struct ublk_ctrl_cmd)
#define UBLK_CMD_ADD_DEV _IOWR('u', 0x04, struct ublk_ctrl_cmd)
#define UBLK_CMD_DEL_DEV _IOWR('u', 0x05, struct ublk_ctrl_cmd)
#define UBLK_CMD_START_DEV _IOWR('u', 0x06, struct ublk_ctrl_cmd)
#define UBLK_CMD_STOP_DEV _IOWR('u', 0x07, struct ublk_ctrl_cmd)
#define UBLK_CMD_SET_PARAMS _IOWR('u', 0x08, struct ublk_ctrl_cmd)
#define UBLK_CMD_GET_PARAMS _IOR('u', 0x09, struct ublk_ctrl_cmd)
#define UBLK_CMD_START_RECOVERY _IOWR('u', 0x10, struct ublk_ctrl_cmd)
#define UBLK_CMD_END_RECOVERY _IOWR('u', 0x11, struct ublk_ctrl_cmd)
#define UBLK_CMD_GET_FEATURES _IOR('u', 0x13, struct ublk_ctrl_cmd)
#define UBLK_CMD_DEL_DEV_ASYNC _IOR('u', 0x14, struct ublk_ctrl_cmd)
#define UBLK_CMD_UPDATE_SIZE _IOWR('u', 0x15, struct ublk_ctrl_cmd)

/* Features of the kernel, and flags of a device. */
#define UBLK_F_USER_RECOVERY (1ull << 3)
#define UBLK_F_USER_RECOVERY_REISSUE (1ull << 4) /* requests of a dead server are given to the next one */
#define UBLK_F_CMD_IOCTL_ENCODE (1ull << 6)
#define UBLK_F_USER_COPY (1ull << 7) /* data is read from and written to the character device */
#define UBLK_F_UPDATE_SIZE (1ull << 10)
#define UBLK_F_NO_AUTO_PART_SCAN (1ull << 18)

enum ublk_state { UBLK_DEAD = 0, UBLK_LIVE = 1, UBLK_QUIESCED = 2, UBLK_FAIL_IO = 3 };

struct ublk_dev_info {
    uint16_t nr_hw_queues, queue_depth, state, pad0;
    uint32_t max_io_buf_bytes, dev_id;
    int32_t server_pid;
    uint32_t pad1;
    uint64_t flags;
    uint64_t server_flags; /* ours; the kernel only keeps it */
    uint32_t owner_uid, owner_gid;
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct ublk_dev_info) == 64, "ublksrv_ctrl_dev_info");

#define UBLK_PARAM_BASIC (1u << 0)
#define UBLK_PARAM_DISCARD (1u << 1)
#define UBLK_ATTR_READ_ONLY (1u << 0)
#define UBLK_ATTR_VOLATILE_CACHE (1u << 2) /* without it no flush ever arrives */
#define UBLK_ATTR_FUA (1u << 3)

/* The part of ublk_params that we set; its `len` tells the kernel where it ends. */
struct ublk_params {
    uint32_t len, types;
    struct {
        uint32_t attributes;
        uint8_t logical_shift, physical_shift, io_opt_shift, io_min_shift;
        uint32_t max_sectors, chunk_sectors;
        uint64_t dev_sectors, virt_boundary_mask;
    } basic;
    struct {
        uint32_t alignment, granularity, max_sectors, max_write_zeroes_sectors;
        uint16_t max_segments, reserved;
    } discard;
};
_Static_assert(sizeof(struct ublk_params) == 64, "ublk_params with basic and discard");
#define UBLK_PARAMS_LENGTH 60 /* without the padding at the end: what follows there is another parameter */

/* --- data commands on /dev/ublkcN: `struct ublk_io_cmd` in an ordinary SQE --------------------------------------- */

struct ublk_io_cmd {
    uint16_t queue, tag;
    int32_t result;
    uint64_t addr;
};
_Static_assert(sizeof(struct ublk_io_cmd) == 16, "ublksrv_io_cmd");

#define UBLK_IO_FETCH _IOWR('u', 0x20, struct ublk_io_cmd)
#define UBLK_IO_COMMIT_AND_FETCH _IOWR('u', 0x21, struct ublk_io_cmd)
_Static_assert(UBLK_IO_COMMIT_AND_FETCH == 0xc0107521 && UBLK_CMD_ADD_DEV == 0xc0207504, "ioctl encoding");

/* One request, in memory that the kernel maps for us to read. */
struct ublk_io_desc {
    uint32_t op_flags; /* operation in bits 0 to 7 */
    uint32_t sectors;
    uint64_t start_sector;
    uint64_t addr;
};
_Static_assert(sizeof(struct ublk_io_desc) == 24, "ublksrv_io_desc");

enum ublk_op { UBLK_READ = 0, UBLK_WRITE = 1, UBLK_FLUSH = 2, UBLK_DISCARD = 3, UBLK_WRITE_ZEROES = 5 };
#define UBLK_OP_MASK 0xffu
#define UBLK_OP_FUA (1u << 13)

#define UBLK_MAX_DEPTH 4096u /* the descriptors of queue q lie at q * UBLK_MAX_DEPTH of them */

/* USER_COPY: where the data of a request is in the character device. */
static inline uint64_t ublk_data_offset(unsigned queue, unsigned tag)
{
    return 0x80000000ull + ((uint64_t)queue << 41) + ((uint64_t)tag << 25);
}

#endif
