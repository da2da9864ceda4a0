#define _GNU_SOURCE
#include "c_device_queue.h"

#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "c_device_uapi.h"

#define SECTOR 512u
#define PAGE 4096u
#define STRIDE (LARGEST + PAGE) /* from buffer to buffer: at a power of two they would share the entries of a TLB */
#define EARLY (256u << 10)   /* bytes after which finished requests are handed over although more are waiting */
#define KEPT (64u << 10)     /* bytes of a buffer that an idle queue keeps */
#define IDLE_SECONDS 1
enum { WAKE = UBLK_MAX_DEPTH, IDLE }; /* user data of requests that are no tags */

struct request {
    struct job job; /* first: a job is turned back into its request */
    struct queue *queue;
    unsigned tag;
    int result; /* what the kernel gets if the flush succeeds */
};

struct queue {
    struct queue_options options;
    unsigned long thread;
    struct io_uring ring;
    const struct ublk_io_desc *descriptors;
    size_t descriptors_length;
    char *buffers; /* copy: one for each tag, by the kernel's side of the contract; else one */
    size_t buffers_length;
    unsigned fetched, offloaded; /* tags that are with the kernel, and with the workers */
    size_t finished;             /* bytes of requests whose end the kernel has not been told yet */
    bool used, timing;           /* since the last look; the look is arranged */
    int wake_fd;
    uint64_t wake_count;
    pthread_mutex_t lock; /* `done`, and `ready` */
    pthread_cond_t changed;
    struct job *done;
    int ready; /* 1: all is fetched; negative: an error */
    struct request requests[];
};

/* --- talking to the kernel --------------------------------------------------------------------------------------- */

static char *buffer_of(struct queue *queue, unsigned tag)
{
    return queue->options.user_copy ? queue->buffers : queue->buffers + (size_t)tag * STRIDE;
}

static struct io_uring_sqe *next_sqe(struct queue *queue)
{
    struct io_uring_sqe *sqe;
    while (!(sqe = io_uring_get_sqe(&queue->ring)))
        io_uring_submit(&queue->ring);
    return sqe;
}

static void give_to_kernel(struct queue *queue, uint32_t op, unsigned tag, int result)
{
    struct io_uring_sqe *sqe = next_sqe(queue);
    uint64_t addr = queue->options.user_copy ? 0 : (uintptr_t)buffer_of(queue, tag);
    struct ublk_io_cmd command = {(uint16_t)queue->options.number, (uint16_t)tag, result, addr};
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->cmd_op = op;
    sqe->user_data = tag;
    memcpy(sqe->cmd, &command, sizeof command);
    queue->fetched++;
}

static void commit(struct queue *queue, unsigned tag, int result)
{
    give_to_kernel(queue, UBLK_IO_COMMIT_AND_FETCH, tag, result);
}

static void arm_wake(struct queue *queue)
{
    struct io_uring_sqe *sqe = next_sqe(queue);
    io_uring_prep_read(sqe, queue->wake_fd, &queue->wake_count, sizeof queue->wake_count, 0);
    sqe->user_data = WAKE;
}

static void arm_idle(struct queue *queue)
{
    static struct __kernel_timespec period = {.tv_sec = IDLE_SECONDS};
    struct io_uring_sqe *sqe = next_sqe(queue);
    io_uring_prep_timeout(sqe, &period, 0, 0);
    sqe->user_data = IDLE;
    queue->timing = true;
}

/* --- requests ---------------------------------------------------------------------------------------------------- */

/* Data between `buffer` and the request's pages, through the character device. */
static int move_data(struct queue *queue, unsigned tag, char *buffer, size_t length, bool to_kernel)
{
    uint64_t base = ublk_data_offset(queue->options.number, tag);
    size_t done = 0;
    while (done < length) {
        off_t at = (off_t)(base + done);
        ssize_t n = to_kernel ? pwrite(queue->options.fd, buffer + done, length - done, at)
                              : pread(queue->options.fd, buffer + done, length - done, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n ? -errno : -EIO;
        done += (size_t)n;
    }
    return 0;
}

struct target {
    struct queue *queue;
    unsigned tag;
    size_t length;
};

static int send_lent(void *opaque, const struct iovec *pieces, int count)
{
    const struct target *target = opaque;
    off_t at = (off_t)ublk_data_offset(target->queue->options.number, target->tag);
    ssize_t sent;
    do
        sent = pwritev(target->queue->options.fd, pieces, count, at);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)target->length ? 0 : -EFAULT;
}

static int read_request(struct queue *queue, unsigned tag, size_t length, uint64_t offset)
{
    struct block_device *image = *queue->options.image;
    char *buffer = buffer_of(queue, tag);
    struct target target = {queue, tag, length};
    if (queue->options.user_copy && image->lend(image, length, offset, send_lent, &target) == 0)
        return (int)length;
    int rc = image->read(image, buffer, length, offset);
    if (!rc && queue->options.user_copy)
        rc = move_data(queue, tag, buffer, length, true);
    return rc ? rc : (int)length;
}

static int write_request(struct queue *queue, unsigned tag, size_t length, uint64_t offset)
{
    struct block_device *image = *queue->options.image;
    char *buffer = buffer_of(queue, tag);
    int rc = queue->options.user_copy ? move_data(queue, tag, buffer, length, false) : 0;
    if (!rc)
        rc = image->write(image, buffer, length, offset);
    return rc ? rc : (int)length;
}

/* In a worker: the queue's thread serves other requests while the disk is waited for. */
static void flush_job(struct job *job)
{
    struct request *request = (struct request *)job;
    struct queue *queue = request->queue;
    struct block_device *image = *queue->options.image;
    int rc = image->flush(image);
    uint64_t one = 1;
    if (rc)
        request->result = rc;
    pthread_mutex_lock(&queue->lock);
    bool first = !queue->done;
    job->next = queue->done;
    queue->done = job;
    pthread_mutex_unlock(&queue->lock);
    if (first) /* the queue's thread takes the whole list, and does not end before it has */
        (void)!write(queue->wake_fd, &one, sizeof one);
}

static void flush_then_commit(struct queue *queue, unsigned tag, int result)
{
    struct request *request = &queue->requests[tag];
    *request = (struct request){{NULL, flush_job}, queue, tag, result};
    queue->offloaded++;
    workers_give(queue->options.workers, &request->job);
}

static void commit_flushed(struct queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    struct job *job = queue->done;
    queue->done = NULL;
    pthread_mutex_unlock(&queue->lock);
    while (job) {
        struct request *request = (struct request *)job;
        job = job->next;
        queue->offloaded--;
        commit(queue, request->tag, request->result);
    }
}

static void serve_request(struct queue *queue, unsigned tag)
{
    const struct ublk_io_desc *descriptor = &queue->descriptors[tag];
    struct block_device *image = *queue->options.image;
    uint64_t offset = descriptor->start_sector * SECTOR, length = (uint64_t)descriptor->sectors * SECTOR;
    unsigned op = descriptor->op_flags & UBLK_OP_MASK;
    int result = -EOPNOTSUPP;
    if (op == UBLK_FLUSH) {
        flush_then_commit(queue, tag, 0);
        return;
    }
    if ((op == UBLK_READ || op == UBLK_WRITE) && length > LARGEST)
        result = -EINVAL;
    else if (op == UBLK_READ)
        result = read_request(queue, tag, length, offset);
    else if (op == UBLK_WRITE)
        result = write_request(queue, tag, length, offset);
    else if (op == UBLK_DISCARD || op == UBLK_WRITE_ZEROES)
        result = image->discard(image, offset, length);
    if (op <= UBLK_WRITE) {
        queue->finished += length;
        queue->used |= length > KEPT;
    }
    if (result >= 0 && descriptor->op_flags & UBLK_OP_FUA)
        flush_then_commit(queue, tag, result);
    else
        commit(queue, tag, result);
}

/* A large request leaves its buffer in memory, too much for thousands of idle devices. */
static void look_if_idle(struct queue *queue)
{
    queue->timing = false;
    if (queue->used) {
        queue->used = false;
        arm_idle(queue);
    } else {
        madvise(queue->buffers, queue->buffers_length, MADV_DONTNEED);
    }
}

static void handle(struct queue *queue, const struct io_uring_cqe *cqe)
{
    if (cqe->user_data == WAKE) {
        arm_wake(queue);
        commit_flushed(queue);
    } else if (cqe->user_data == IDLE) {
        look_if_idle(queue);
    } else {
        queue->fetched--;
        if (cqe->res == 0) /* else the device has been stopped (-ENODEV) and the tag is not ours any more */
            serve_request(queue, (unsigned)cqe->user_data);
        if (queue->finished >= EARLY) {
            io_uring_submit(&queue->ring);
            queue->finished = 0;
        }
    }
}

static void serve(struct queue *queue)
{
    struct io_uring_cqe *cqe;
    while (queue->fetched || queue->offloaded) {
        unsigned head, seen = 0;
        int rc = io_uring_submit_and_wait(&queue->ring, 1);
        if (rc < 0 && rc != -EINTR && rc != -EBUSY && rc != -EAGAIN)
            return; /* the ring is gone: so is the device */
        queue->finished = 0;
        io_uring_for_each_cqe(&queue->ring, head, cqe) {
            handle(queue, cqe);
            seen++;
        }
        io_uring_cq_advance(&queue->ring, seen);
        if (queue->used && !queue->timing)
            arm_idle(queue);
    }
}

/* --- life -------------------------------------------------------------------------------------------------------- */

static int open_ring(struct queue *queue)
{
    struct io_uring_params params = {
        /* The kernel hands requests over when this thread asks, not in the midst of its work. */
        .flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CQSIZE,
        .cq_entries = 2 * (queue->options.depth + 2),
    };
    int rc = io_uring_queue_init_params(queue->options.depth + 2, &queue->ring, &params);
    if (rc)
        return rc;
    io_uring_register_ring_fd(&queue->ring); /* saves a look-up for each call; it works without, too */
    if ((rc = io_uring_register_files(&queue->ring, &queue->options.fd, 1)))
        io_uring_queue_exit(&queue->ring);
    return rc;
}

static void tell_ready(struct queue *queue, int ready)
{
    pthread_mutex_lock(&queue->lock);
    queue->ready = ready;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

static void *run(void *opaque)
{
    struct queue *queue = opaque;
    int rc = open_ring(queue); /* by this thread: it is the single issuer */
    if (rc) {
        tell_ready(queue, rc);
        return NULL;
    }
    for (unsigned tag = 0; tag < queue->options.depth; tag++)
        give_to_kernel(queue, UBLK_IO_FETCH, tag, 0);
    arm_wake(queue);
    rc = io_uring_submit(&queue->ring);
    tell_ready(queue, rc < 0 ? rc : 1);
    if (rc >= 0)
        serve(queue);
    io_uring_queue_exit(&queue->ring);
    return NULL;
}

static void free_queue(struct queue *queue)
{
    if (queue->descriptors)
        munmap((void *)queue->descriptors, queue->descriptors_length);
    if (queue->buffers)
        munmap(queue->buffers, queue->buffers_length);
    if (queue->wake_fd >= 0)
        close(queue->wake_fd);
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

static int map_memory(struct queue *queue)
{
    const struct queue_options *options = &queue->options;
    off_t at = (off_t)(options->number * (UBLK_MAX_DEPTH * sizeof(struct ublk_io_desc)));
    queue->descriptors_length = (options->depth * sizeof(struct ublk_io_desc) + PAGE - 1) / PAGE * PAGE;
    void *mapped = mmap(NULL, queue->descriptors_length, PROT_READ, MAP_SHARED | MAP_POPULATE, options->fd, at);
    if (mapped == MAP_FAILED)
        return -errno;
    queue->descriptors = mapped;
    queue->buffers_length = (size_t)STRIDE * (options->user_copy ? 1 : options->depth);
    mapped = mmap(NULL, queue->buffers_length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED)
        return -errno;
    queue->buffers = mapped;
    queue->wake_fd = eventfd(0, EFD_CLOEXEC);
    return queue->wake_fd < 0 ? -errno : 0;
}

int queue_start(const struct queue_options *options, struct queue **out)
{
    struct queue *queue = calloc(1, sizeof *queue + options->depth * sizeof *queue->requests);
    if (!queue)
        return -ENOMEM;
    queue->options = *options;
    queue->wake_fd = -1;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    int rc = map_memory(queue);
    if (!rc && !(rc = thread_start(run, queue, &queue->thread))) {
        pthread_mutex_lock(&queue->lock);
        while (!queue->ready)
            pthread_cond_wait(&queue->changed, &queue->lock);
        rc = queue->ready < 0 ? queue->ready : 0;
        pthread_mutex_unlock(&queue->lock);
        if (rc)
            pthread_join(queue->thread, NULL);
    }
    if (rc)
        free_queue(queue);
    else
        *out = queue;
    return rc;
}

void queue_join(struct queue *queue)
{
    pthread_join(queue->thread, NULL);
    free_queue(queue);
}
