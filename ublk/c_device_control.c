/* Control commands are io_uring commands, too. Some block for long (START_DEV until all requests are fetched and the
 * partition table is read), so each caller gets a ring of its own; rings are kept, because liburing before 2.9 does not
 * unmap all of a ring with large entries. */
#include "c_device_control.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct control_ring {
    struct control_ring *next;
    struct io_uring ring;
};

struct control {
    int fd;
    pthread_mutex_t lock;
    struct control_ring *idle;
};

int control_open(struct control **out)
{
    struct control *control = calloc(1, sizeof *control);
    if (!control)
        return -ENOMEM;
    control->fd = open(UBLK_CONTROL, O_RDWR | O_CLOEXEC);
    if (control->fd < 0) {
        int rc = -errno;
        free(control);
        return rc;
    }
    pthread_mutex_init(&control->lock, NULL);
    *out = control;
    return 0;
}

void control_close(struct control *control)
{
    while (control->idle) {
        struct control_ring *ring = control->idle;
        control->idle = ring->next;
        io_uring_queue_exit(&ring->ring);
        free(ring);
    }
    close(control->fd);
    pthread_mutex_destroy(&control->lock);
    free(control);
}

static struct control_ring *take_ring(struct control *control, int *rc)
{
    pthread_mutex_lock(&control->lock);
    struct control_ring *ring = control->idle;
    if (ring)
        control->idle = ring->next;
    pthread_mutex_unlock(&control->lock);
    if (ring)
        return ring;
    if (!(ring = calloc(1, sizeof *ring))) {
        *rc = -ENOMEM;
        return NULL;
    }
    if ((*rc = io_uring_queue_init(2, &ring->ring, IORING_SETUP_SQE128))) {
        free(ring);
        return NULL;
    }
    return ring;
}

static int run_command(struct control_ring *ring, int fd, uint32_t op, const struct ublk_ctrl_cmd *command)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->ring);
    struct io_uring_cqe *cqe;
    int rc;
    if (!sqe)
        return -EBUSY;
    memset(sqe, 0, sizeof *sqe + 64); /* large entries are twice as long */
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = fd;
    sqe->cmd_op = op;
    memcpy(sqe->cmd, command, sizeof *command);
    do
        rc = io_uring_submit_and_wait(&ring->ring, 1);
    while (rc == -EINTR);
    if (rc >= 0 && (rc = io_uring_wait_cqe(&ring->ring, &cqe)) == 0) {
        rc = cqe->res;
        io_uring_cqe_seen(&ring->ring, cqe);
    }
    return rc;
}

int control_command(struct control *control, uint32_t op, struct ublk_ctrl_cmd command)
{
    int rc = 0;
    struct control_ring *ring = take_ring(control, &rc);
    if (!ring)
        return rc;
    rc = run_command(ring, control->fd, op, &command);
    pthread_mutex_lock(&control->lock);
    ring->next = control->idle;
    control->idle = ring;
    pthread_mutex_unlock(&control->lock);
    return rc;
}
