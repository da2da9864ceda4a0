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
#include <sys/resource.h>
#include <unistd.h>

#include "c_device_uapi.h"

#define SECTOR 512u
#define PAGE 4096u
#define EARLY (256u << 10) /* bytes after which finished requests are handed over although more are waiting */
#define KEPT (64u << 10)   /* bytes of a request whose buffer an idle queue does not keep */
#define LONG (128u << 10)  /* bytes from which a write waits for the disk, and a read is worth a look whether it did */
#define MOST_HELP 32       /* reads and writes of one queue that are with the workers at a time */
#define COLD_BATCHES 16
#define IDLE_SECONDS 1
enum { WAKE = UBLK_MAX_DEPTH, IDLE }; /* user data of requests that are no tags */

struct request {
    struct job job; /* first: a job is turned back into its request */
    struct queue *queue;
    unsigned tag;
    int result;
};

/* A list of jobs, first in first out. */
struct jobs {
    struct job *first, **last;
};

struct queue {
    struct queue_options options;
    unsigned long thread;
    struct io_uring ring;
    const struct ublk_io_desc *descriptors;
    size_t descriptors_length;
    char *buffer;                /* of this thread, LARGEST bytes */
    unsigned fetched, helped;    /* tags that are with the kernel, and with the workers or waiting for them */
    unsigned moving;             /* reads and writes among those that are with the workers */
    struct jobs backlog;
    size_t finished;             /* bytes of requests whose end the kernel has not been told yet */
    unsigned cold;               /* batches for which reads are given to workers, because one had to wait for a disk */
    bool used, timing;           /* since the last look if the queue is idle; the next look is arranged */
    int wake_fd;
    uint64_t wake_count;
    pthread_mutex_t lock; /* `done`, and `ready` */
    pthread_cond_t changed;
    struct job *done;
    int ready; /* 1: all is fetched; negative: an error */
    struct request requests[];
};

/* --- talking to the kernel --------------------------------------------------------------------------------------- */

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
    struct ublk_io_cmd command = {.queue = (uint16_t)queue->options.number, .tag = (uint16_t)tag, .result = result};
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
    struct __kernel_timespec period = {.tv_sec = IDLE_SECONDS};
    struct io_uring_sqe *sqe = next_sqe(queue);
    io_uring_prep_timeout(sqe, &period, 0, 0);
    sqe->user_data = IDLE;
    queue->timing = true;
}

/* --- data -------------------------------------------------------------------------------------------------------- */

/* Between `buffer` and the request's pages, through the character device. */
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

/* From the page cache into the request's pages. False: the bytes must be read. */
static bool read_lent(struct queue *queue, unsigned tag, size_t length, uint64_t offset)
{
    struct block_device *image = *queue->options.image;
    struct target target = {queue, tag, length};
    return image->lend(image, length, offset, send_lent, &target) == 0;
}

/* Not lent: page faults read a cold file in small pieces. */
static int read_data(struct queue *queue, unsigned tag, char *buffer, size_t length, uint64_t offset)
{
    struct block_device *image = *queue->options.image;
    int rc = image->read(image, buffer, length, offset);
    if (!rc)
        rc = move_data(queue, tag, buffer, length, true);
    return rc ? rc : (int)length;
}

static int write_data(struct queue *queue, unsigned tag, char *buffer, size_t length, uint64_t offset)
{
    struct block_device *image = *queue->options.image;
    int rc = move_data(queue, tag, buffer, length, false);
    if (!rc)
        rc = image->write(image, buffer, length, offset);
    return rc ? rc : (int)length;
}

/* --- requests ---------------------------------------------------------------------------------------------------- */

static unsigned op_of(const struct ublk_io_desc *descriptor) { return descriptor->op_flags & UBLK_OP_MASK; }
static uint64_t offset_of(const struct ublk_io_desc *descriptor) { return descriptor->start_sector * SECTOR; }
static uint64_t length_of(const struct ublk_io_desc *descriptor) { return (uint64_t)descriptor->sectors * SECTOR; }

/* Gives what the kernel expects: bytes of a read or write, else 0; or a negative errno. */
static int perform(struct queue *queue, unsigned tag, char *buffer)
{
    const struct ublk_io_desc *descriptor = &queue->descriptors[tag];
    struct block_device *image = *queue->options.image;
    uint64_t offset = offset_of(descriptor), length = length_of(descriptor);
    int result = -EOPNOTSUPP;
    switch (op_of(descriptor)) {
    case UBLK_READ:
        return length > LARGEST ? -EINVAL : read_data(queue, tag, buffer, length, offset);
    case UBLK_WRITE:
        result = length > LARGEST ? -EINVAL : write_data(queue, tag, buffer, length, offset);
        break;
    case UBLK_DISCARD:
    case UBLK_WRITE_ZEROES:
        result = image->discard(image, offset, length);
        break;
    case UBLK_FLUSH:
        return image->flush(image);
    }
    if (result >= 0 && descriptor->op_flags & UBLK_OP_FUA) {
        int rc = image->flush(image);
        result = rc ? rc : result;
    }
    return result;
}

/* In a worker: the queue's thread serves other requests meanwhile. */
static void help(struct job *job, char *buffer)
{
    struct request *request = (struct request *)job;
    struct queue *queue = request->queue;
    uint64_t one = 1;
    request->result = perform(queue, request->tag, buffer);
    pthread_mutex_lock(&queue->lock);
    bool first = !queue->done;
    job->next = queue->done;
    queue->done = job;
    /* The queue's thread takes the whole list. It does not end before it has taken this one: the lock is held until the
     * last use of the queue. */
    if (first)
        (void)!write(queue->wake_fd, &one, sizeof one);
    pthread_mutex_unlock(&queue->lock);
}

static bool moves_data(const struct queue *queue, unsigned tag) { return op_of(&queue->descriptors[tag]) <= UBLK_WRITE; }

static void ask_for_help(struct queue *queue, unsigned tag)
{
    struct request *request = &queue->requests[tag];
    *request = (struct request){{NULL, help}, queue, tag, 0};
    queue->helped++;
    /* A layer that answers late, or not at all, must not take all workers. Flushes never wait behind it. */
    if (moves_data(queue, tag) && queue->moving >= MOST_HELP) {
        *queue->backlog.last = &request->job;
        queue->backlog.last = &request->job.next;
        return;
    }
    queue->moving += moves_data(queue, tag);
    workers_give(queue->options.workers, &request->job);
}

static void take_from_backlog(struct queue *queue)
{
    struct job *job = queue->backlog.first;
    if (!job || queue->moving >= MOST_HELP)
        return;
    if (!(queue->backlog.first = job->next))
        queue->backlog.last = &queue->backlog.first;
    queue->moving++;
    workers_give(queue->options.workers, job);
}

static void commit_helped(struct queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    struct job *job = queue->done;
    queue->done = NULL;
    pthread_mutex_unlock(&queue->lock);
    while (job) {
        struct request *request = (struct request *)job;
        job = job->next;
        queue->helped--;
        queue->moving -= moves_data(queue, request->tag);
        commit(queue, request->tag, request->result);
        take_from_backlog(queue);
    }
}

/* Whether this thread should not do it itself: it would wait. `more`: other requests would wait, too. */
static bool needs_help(struct queue *queue, unsigned tag, bool more)
{
    const struct ublk_io_desc *descriptor = &queue->descriptors[tag];
    switch (op_of(descriptor)) {
    case UBLK_READ:
        return queue->cold && (more || length_of(descriptor) >= LONG);
    case UBLK_WRITE:
        return descriptor->op_flags & UBLK_OP_FUA || length_of(descriptor) >= LONG;
    case UBLK_FLUSH:
        return true;
    }
    return descriptor->op_flags & UBLK_OP_FUA;
}

/* How often this thread has waited for something. */
static long waits(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nvcsw;
}

static bool read_at_once(struct queue *queue, unsigned tag, size_t length, uint64_t offset)
{
    long before = length >= LONG ? waits() : 0;
    if (!read_lent(queue, tag, length, offset))
        return false;
    if (length >= LONG && waits() != before)
        queue->cold = COLD_BATCHES;
    return true;
}

static void serve_request(struct queue *queue, unsigned tag, bool more)
{
    const struct ublk_io_desc *descriptor = &queue->descriptors[tag];
    uint64_t length = length_of(descriptor);
    bool read = op_of(descriptor) == UBLK_READ && length <= LARGEST;
    if (needs_help(queue, tag, more)) {
        ask_for_help(queue, tag);
    } else if (!read) {
        commit(queue, tag, perform(queue, tag, queue->buffer));
        queue->used |= length > KEPT;
    } else if (read_at_once(queue, tag, length, offset_of(descriptor))) {
        commit(queue, tag, (int)length);
        queue->finished += length;
    } else {
        ask_for_help(queue, tag); /* compressed, remote, or damaged: it takes long */
    }
}

/* A large request leaves its buffer in memory, too much for thousands of idle devices. */
static void look_if_idle(struct queue *queue)
{
    queue->timing = false;
    if (queue->used) {
        queue->used = false;
        arm_idle(queue);
    } else {
        madvise(queue->buffer, LARGEST, MADV_DONTNEED);
    }
}

static void handle(struct queue *queue, const struct io_uring_cqe *cqe, bool more)
{
    if (cqe->user_data == WAKE) {
        arm_wake(queue);
        commit_helped(queue);
    } else if (cqe->user_data == IDLE) {
        look_if_idle(queue);
    } else {
        queue->fetched--;
        if (cqe->res == 0) /* else the device has been stopped (-ENODEV) and the tag is not ours any more */
            serve_request(queue, (unsigned)cqe->user_data, more);
        if (queue->finished >= EARLY) {
            io_uring_submit(&queue->ring);
            queue->finished = 0;
        }
    }
}

static void handle_all(struct queue *queue)
{
    struct io_uring_cqe *cqe;
    unsigned head, seen = 0, ready = io_uring_cq_ready(&queue->ring);
    bool several = ready > 1;
    long before = several ? waits() : 0;
    queue->finished = 0;
    io_uring_for_each_cqe(&queue->ring, head, cqe) {
        handle(queue, cqe, several);
        seen++;
    }
    io_uring_cq_advance(&queue->ring, seen);
    if (queue->cold)
        queue->cold--;
    if (several && waits() != before)
        queue->cold = COLD_BATCHES;
    if (queue->used && !queue->timing)
        arm_idle(queue);
}

static void serve(struct queue *queue)
{
    while (queue->fetched || queue->helped) {
        int rc = io_uring_submit_and_wait(&queue->ring, 1);
        if (rc < 0 && rc != -EINTR && rc != -EBUSY && rc != -EAGAIN)
            return; /* the ring is gone: so is the device */
        handle_all(queue);
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
    if (queue->buffer)
        munmap(queue->buffer, LARGEST);
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
    if (!(queue->buffer = thread_buffer_map()))
        return -ENOMEM;
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
    queue->backlog.last = &queue->backlog.first;
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
