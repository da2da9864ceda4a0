/* libfuse parses requests and writes answers; which descriptor they come from, the threads and the begin of a session
 * are ours: libfuse cannot go on with a connection that another process began. */
#define _GNU_SOURCE
#include "c_fuse_session.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILE_SYSTEM "fuse.aenv"
#define CLONES 8u /* descriptors the workers read from: each has a lock and a list of unanswered requests of its own */
#define WORKERS_MOST 32u
#define WORKERS_IDLE 8u
#define PARKED_MOST 512u /* requests that wait for the network */
#define PARKED_STACK (256u << 10) /* bytes */
#define HEADER_ROOM 4096u /* in front of a request's data */
#define REQUEST_ROOM (REQUEST_LARGEST + HEADER_ROOM)
/* An answer may lie over its own request, which is no longer needed then, and be a little longer than asked for. */
#define WORKER_ROOM (REQUEST_ROOM + 4096u)

/* Linux 6.9; the headers of Debian 12 are older. */
#define NOTIFY_RESEND 7
#define HAS_RESEND (1u << 7) /* bit 39: in flags2 */
#define UNIQUE_RESEND (1ull << 63)
#ifndef FUSE_INIT_EXT
#define FUSE_INIT_EXT (1u << 30)
#endif
#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

struct connection {
    struct fuse_session *session; /* owns `device` */
    struct fuse_record *record;
    char *directory;
    void *opaque;
    int device;
    int clones[CLONES];
    bool resumed;
    pthread_mutex_t lock; /* the counters */
    pthread_cond_t ended;
    unsigned workers, idle, started, parked;
    bool stopping;
};

/* What the calling thread works on. */
static __thread struct {
    int device; /* an answer must go to the descriptor that its request came from */
    bool swallow;
    const struct fuse_in_header *request;
    char *buffer;
} current = {.device = -1};

uint64_t request_number(void) { return current.request->unique & ~UNIQUE_RESEND; }
bool request_is_resent(void) { return current.request->unique & UNIQUE_RESEND; }
char *request_buffer(void) { return current.buffer; }

static ssize_t write_answer(int fd, struct iovec *parts, int count, void *opaque)
{
    ssize_t length = 0;
    (void)opaque;
    if (!current.swallow)
        return writev(current.device >= 0 ? current.device : fd, parts, count);
    for (int i = 0; i < count; i++)
        length += (ssize_t)parts[i].iov_len;
    return length;
}

static ssize_t read_request(int fd, void *buffer, size_t length, void *opaque)
{
    (void)opaque;
    return read(fd, buffer, length);
}

static void process(struct connection *connection, int device, void *request, size_t length)
{
    struct fuse_buf buffer = {.mem = request, .size = length};
    current.device = device;
    current.request = request;
    fuse_session_process_buf(connection->session, &buffer);
    current.device = -1;
}

/* --- begin ----------------------------------------------------------------------------------------------------- */

/* Asking the mount itself could wait for ever: its connection may be alive without anybody who answers. */
static bool is_mounted(const char *directory)
{
    char *line = NULL, place[4096], type[64];
    size_t room = 0;
    bool found = false;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    while (mounts && getline(&line, &room, mounts) > 0) {
        const char *rest = strstr(line, " - ");
        if (rest && sscanf(line, "%*s %*s %*s %*s %4095s", place) == 1 && sscanf(rest, " - %63s", type) == 1)
            found |= strcmp(place, directory) == 0 && strcmp(type, FILE_SYSTEM) == 0;
    }
    free(line);
    if (mounts)
        fclose(mounts);
    return found;
}

static int start_session(struct connection *connection, const struct fuse_lowlevel_ops *operations)
{
    static const struct fuse_custom_io IO = {.writev = write_answer, .read = read_request};
    char *arguments[] = {"aenv-blockd", NULL};
    struct fuse_args args = FUSE_ARGS_INIT(1, arguments);
    connection->session = fuse_session_new(&args, operations, sizeof *operations, connection->opaque);
    fuse_opt_free_args(&args);
    if (!connection->session)
        return -EINVAL;
    int rc = fuse_session_custom_io(connection->session, &IO, connection->device);
    if (rc) { /* the device is not its own yet */
        fuse_session_destroy(connection->session);
        connection->session = NULL;
    }
    return rc;
}

static bool is_init(const char *request, size_t length)
{
    struct fuse_in_header header;
    uint32_t major; /* the first field of a body that grows from version to version */
    if (length < sizeof header + sizeof major || length > RECORD_REQUEST)
        return false;
    memcpy(&header, request, sizeof header);
    memcpy(&major, request + sizeof header, sizeof major);
    return header.opcode == FUSE_INIT && header.len == length && major == FUSE_KERNEL_VERSION;
}

/* The kernel's INIT makes a session of libfuse ready; `swallow`: the kernel has had its answer, from a dead server. */
static int greet(struct connection *connection, bool swallow)
{
    struct fuse_record *record = connection->record;
    char copy[RECORD_REQUEST];
    memcpy(copy, record->init, record->init_length);
    current.swallow = swallow;
    process(connection, connection->device, copy, record->init_length);
    current.swallow = false;
    return fuse_session_exited(connection->session) ? -EPROTO : 0;
}

static int take_init(struct connection *connection)
{
    struct fuse_record *record = connection->record;
    char *buffer = malloc(REQUEST_ROOM); /* the kernel refuses to read into less */
    ssize_t length = buffer ? read(connection->device, buffer, REQUEST_ROOM) : -1;
    int rc = length < 0 ? -errno : is_init(buffer, (size_t)length) ? 0 : -EPROTO;
    if (!rc) {
        struct {
            struct fuse_in_header header;
            uint32_t major, minor, readahead, flags, flags2;
        } init = {.flags = 0};
        memcpy(&init, buffer, (size_t)length < sizeof init ? (size_t)length : sizeof init);
        record->resend = init.flags & FUSE_INIT_EXT && init.flags2 & HAS_RESEND;
        memcpy(record->init, buffer, (size_t)length);
        record->init_length = (uint32_t)length;
        rc = greet(connection, false);
    }
    if (!rc)
        record->magic = RECORD_MAGIC;
    free(buffer);
    return rc;
}

static int mount_new(struct connection *connection, const struct connection_plan *plan)
{
    char options[128];
    while (is_mounted(plan->directory) && umount2(plan->directory, MNT_DETACH) == 0)
        ;
    int rc = record_reset(connection->record, plan->first_ino);
    if (rc)
        return rc;
    connection->device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (connection->device < 0)
        return -EACCES;
    if ((rc = start_session(connection, plan->operations)))
        return rc;
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
             connection->device);
    if (mount("aenv-blockd", plan->directory, FILE_SYSTEM, MS_NOSUID | MS_NODEV | MS_NOEXEC, options))
        return -EACCES;
    if ((rc = take_init(connection)))
        umount2(plan->directory, MNT_DETACH);
    return rc;
}

static int duplicate(int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return copy < 0 ? -errno : copy;
}

static int take_over(struct connection *connection, const struct connection_plan *plan)
{
    int rc = connection->device = duplicate(plan->kept[0]);
    if (rc >= 0 && (rc = start_session(connection, plan->operations)) == 0)
        rc = greet(connection, true);
    for (unsigned i = 0; rc >= 0 && i < CLONES && i + 1 < plan->kept_count; i++)
        rc = connection->clones[i] = duplicate(plan->kept[i + 1]);
    connection->resumed = rc >= 0;
    return rc < 0 ? rc : 0;
}

static int clone_device(int device)
{
    uint32_t source = (uint32_t)device;
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (ioctl(fd, FUSE_DEV_IOC_CLONE, &source)) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

static int complete_clones(struct connection *connection)
{
    for (unsigned i = 0; i < CLONES; i++)
        if (connection->clones[i] < 0 && (connection->clones[i] = clone_device(connection->device)) < 0)
            return connection->clones[i];
    return 0;
}

/* An aborted connection (somebody has unmounted it by force) is no use to anybody. */
static bool can_take_over(const struct connection *connection, const struct connection_plan *plan)
{
    const struct fuse_record *record = connection->record;
    struct pollfd state = {.fd = plan->kept_count ? plan->kept[0] : -1, .events = POLLIN};
    return plan->kept_count && record_is_valid(record) && is_init(record->init, record->init_length) &&
           is_mounted(plan->directory) && poll(&state, 1, 0) >= 0 && !(state.revents & (POLLERR | POLLNVAL));
}

/* Closes what this process has of the connection; it lives on if somebody else holds it. */
static void let_go(struct connection *connection)
{
    for (unsigned i = 0; i < CLONES; i++) {
        if (connection->clones[i] >= 0)
            close(connection->clones[i]);
        connection->clones[i] = -1;
    }
    if (connection->session)
        fuse_session_destroy(connection->session); /* closes the device, too */
    else if (connection->device >= 0)
        close(connection->device);
    connection->session = NULL;
    connection->device = -1;
}

int connection_open(const struct connection_plan *plan, struct connection **out)
{
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection)
        return -ENOMEM;
    pthread_mutex_init(&connection->lock, NULL);
    pthread_cond_init(&connection->ended, NULL);
    connection->device = -1;
    connection->opaque = plan->opaque;
    for (unsigned i = 0; i < CLONES; i++)
        connection->clones[i] = -1;
    connection->directory = strdup(plan->directory);
    int rc = connection->directory ? record_open(plan->record_path, &connection->record) : -ENOMEM;
    if (!rc && (!can_take_over(connection, plan) || take_over(connection, plan))) {
        /* Who uses the old mount is lost; who comes need not be. */
        let_go(connection);
        rc = mount_new(connection, plan);
    }
    if (!rc)
        rc = complete_clones(connection);
    if (rc)
        connection_free(connection);
    else
        *out = connection;
    return rc;
}

/* --- workers --------------------------------------------------------------------------------------------------- */

static int start_worker(struct connection *connection);

/* One less waits for requests: if none is left, another one starts, so that slow reads do not hold up the others. */
static void begin_request(struct connection *connection)
{
    pthread_mutex_lock(&connection->lock);
    bool more = --connection->idle == 0 && connection->workers < WORKERS_MOST && !connection->stopping;
    if (more)
        start_worker(connection); /* without one more it is only slower */
    pthread_mutex_unlock(&connection->lock);
}

/* Gives false if the worker is not needed any longer. */
static bool end_request(struct connection *connection)
{
    pthread_mutex_lock(&connection->lock);
    bool stay = connection->idle < WORKERS_IDLE && !connection->stopping;
    connection->idle += stay;
    pthread_mutex_unlock(&connection->lock);
    return stay;
}

static void work_on(struct connection *connection, int device, char *memory)
{
    for (;;) {
        ssize_t length = read(device, memory, REQUEST_ROOM);
        if (length < 0 && (errno == ENOENT || errno == EINTR || errno == EAGAIN))
            continue; /* ENOENT: its caller has given up just now */
        if (length <= 0) { /* ENODEV: unmounted */
            pthread_mutex_lock(&connection->lock);
            connection->idle--;
            pthread_mutex_unlock(&connection->lock);
            return;
        }
        begin_request(connection);
        process(connection, device, memory, (size_t)length);
        if (!end_request(connection))
            return;
    }
}

static void *work(void *opaque)
{
    struct connection *connection = opaque;
    pthread_mutex_lock(&connection->lock);
    int device = connection->clones[connection->started++ % CLONES];
    pthread_mutex_unlock(&connection->lock);
    /* Memory for our writes must not wait for writes to a file system on one of our own images. Without the privilege
     * it fails, and then such a file system cannot be mounted either. */
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    /* Locked, as nothing may be swapped out that is needed to write; and populated, because a kill while the kernel
     * must find a page for a request's data would make it an I/O error. */
    char *memory = mmap(NULL, WORKER_ROOM, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory != MAP_FAILED) {
        mlock(memory, WORKER_ROOM);
        current.buffer = memory + HEADER_ROOM;
        work_on(connection, device, memory);
        munmap(memory, WORKER_ROOM);
    } else {
        pthread_mutex_lock(&connection->lock);
        connection->idle--;
        pthread_mutex_unlock(&connection->lock);
    }
    pthread_mutex_lock(&connection->lock);
    if (--connection->workers == 0)
        pthread_cond_broadcast(&connection->ended);
    pthread_mutex_unlock(&connection->lock);
    return NULL;
}

/* `stack`: bytes, 0 for the usual ones. */
static int start_thread(void *(*body)(void *), void *argument, size_t stack)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (stack)
        pthread_attr_setstacksize(&attributes, stack);
    sigfillset(&all); /* signals are for the thread that runs Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&thread, &attributes, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -rc;
}

/* With `lock` held. */
static int start_worker(struct connection *connection)
{
    int rc = start_thread(work, connection, 0);
    if (!rc)
        connection->workers++, connection->idle++;
    return rc;
}

struct parked {
    struct connection *connection;
    int device;
    void (*body)(void *argument);
    void *argument;
};

static void *run_parked(void *opaque)
{
    struct parked parked = *(struct parked *)opaque;
    free(opaque);
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    current.device = parked.device;
    parked.body(parked.argument);
    pthread_mutex_lock(&parked.connection->lock);
    if (--parked.connection->parked == 0)
        pthread_cond_broadcast(&parked.connection->ended);
    pthread_mutex_unlock(&parked.connection->lock);
    return NULL;
}

bool request_park(struct connection *connection, void (*body)(void *argument), void *argument)
{
    struct parked *parked = malloc(sizeof *parked);
    if (!parked)
        return false;
    *parked = (struct parked){connection, current.device, body, argument};
    pthread_mutex_lock(&connection->lock);
    bool room = connection->parked < PARKED_MOST;
    connection->parked += room;
    pthread_mutex_unlock(&connection->lock);
    if (room && start_thread(run_parked, parked, PARKED_STACK) == 0)
        return true;
    pthread_mutex_lock(&connection->lock);
    connection->parked -= room;
    pthread_mutex_unlock(&connection->lock);
    free(parked);
    return false;
}

/* Puts all that was read and not answered back into the queue, whichever descriptor it was read from. */
static int send_again(int device)
{
    struct fuse_out_header notice = {.len = sizeof notice, .error = NOTIFY_RESEND};
    return write(device, &notice, sizeof notice) == sizeof notice ? 0 : -errno;
}

int connection_serve(struct connection *connection)
{
    int rc = 0;
    if (connection->resumed && connection->record->resend && (rc = send_again(connection->device)))
        return rc;
    pthread_mutex_lock(&connection->lock);
    for (unsigned i = 0; i < CLONES && !rc; i++)
        rc = start_worker(connection);
    pthread_mutex_unlock(&connection->lock);
    return rc;
}

/* --- end ------------------------------------------------------------------------------------------------------- */

void connection_stop(struct connection *connection)
{
    pthread_mutex_lock(&connection->lock);
    connection->stopping = true;
    pthread_mutex_unlock(&connection->lock);
    fuse_session_exit(connection->session);
    umount2(connection->directory, MNT_FORCE); /* wakes the readers with ENODEV, even if it fails: files are open */
    umount2(connection->directory, MNT_DETACH);
    pthread_mutex_lock(&connection->lock);
    while (connection->workers || connection->parked)
        pthread_cond_wait(&connection->ended, &connection->lock);
    pthread_mutex_unlock(&connection->lock);
    connection->record->magic = 0;
}

void connection_free(struct connection *connection)
{
    let_go(connection);
    record_close(connection->record);
    pthread_cond_destroy(&connection->ended);
    pthread_mutex_destroy(&connection->lock);
    free(connection->directory);
    free(connection);
}

struct fuse_session *connection_session(const struct connection *connection) { return connection->session; }
struct fuse_record *connection_record(const struct connection *connection) { return connection->record; }
bool connection_resumed(const struct connection *connection) { return connection->resumed; }

unsigned connection_descriptors(const struct connection *connection, int *out, unsigned room)
{
    unsigned count = 0;
    if (room > count)
        out[count++] = connection->device;
    /* Without RESEND the requests a dead server has read must end with its descriptors: they would wait for ever. */
    for (unsigned i = 0; connection->record->resend && i < CLONES && count < room; i++)
        out[count++] = connection->clones[i];
    return count;
}
