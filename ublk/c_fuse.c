#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include "c_fuse.h"

#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse_lowlevel.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#define SECTOR 512u
#define LARGEST (1u << 20) /* bytes of one request */
#define FOREVER 86400.0    /* seconds the kernel may believe our attributes; a change is told to it */
#define ROOT_MODE (S_IFDIR | 0711)

#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#endif

/* The answer to OPEN. Written out here because libfuse 3.14 cannot set the newest flag (Linux 6.2): without it the
 * kernel lets only one write at a time into a file. */
struct open_out {
    uint64_t fh;
    uint32_t open_flags, padding;
};
_Static_assert(sizeof(struct open_out) == 16, "fuse_open_out");
enum { OPEN_DIRECT_IO = 1, OPEN_KEEP_CACHE = 2, OPEN_NOFLUSH = 32, OPEN_PARALLEL_DIRECT_WRITES = 64 };

struct file {
    struct file *next;
    char *name;
    struct block_device *device;
    fuse_ino_t ino;
    bool cached;
    uid_t uid;
    gid_t gid;
    mode_t mode;
    unsigned opens;
    struct timespec since;
    pthread_mutex_t partial; /* held while part of a sector is written */
};

struct fuse_front {
    struct fuse_session *session;
    char *directory;
    pthread_t thread;
    pthread_mutex_t lock; /* the list, and `opens` of its files */
    pthread_cond_t closed;
    struct file *files;
    fuse_ino_t next_ino; /* never used twice: the kernel's caches cannot mix up two images */
};

/* --- buffers of the worker threads, which libfuse starts and ends ---------------------------------------------- */

static pthread_key_t buffer_key;
static pthread_once_t buffer_once = PTHREAD_ONCE_INIT;

static void make_buffer_key(void) { pthread_key_create(&buffer_key, free); }

static char *thread_buffer(void)
{
    void *buffer;
    pthread_once(&buffer_once, make_buffer_key);
    if ((buffer = pthread_getspecific(buffer_key)))
        return buffer;
    if (posix_memalign(&buffer, 4096, LARGEST + 2 * SECTOR))
        return NULL;
    if (pthread_setspecific(buffer_key, buffer)) {
        free(buffer);
        return NULL;
    }
    return buffer;
}

/* --- files ----------------------------------------------------------------------------------------------------- */

static struct fuse_front *front_of(fuse_req_t req) { return fuse_req_userdata(req); }
static struct file *file_of(struct fuse_file_info *info) { return (struct file *)(uintptr_t)info->fh; }

static struct file *find_name(struct fuse_front *front, const char *name)
{
    struct file *file = front->files;
    while (file && strcmp(file->name, name) != 0)
        file = file->next;
    return file;
}

static struct file *find_ino(struct fuse_front *front, fuse_ino_t ino)
{
    struct file *file = front->files;
    while (file && file->ino != ino)
        file = file->next;
    return file;
}

static void fill_attributes(const struct file *file, struct stat *out)
{
    uint64_t size = file->device->size(file->device);
    *out = (struct stat){
        .st_ino = file->ino, .st_mode = S_IFREG | file->mode, .st_nlink = 1, .st_uid = file->uid, .st_gid = file->gid,
        .st_size = (off_t)size, .st_blksize = 4096, .st_blocks = (blkcnt_t)(size / SECTOR),
        .st_mtim = file->since, .st_ctim = file->since, .st_atim = file->since,
    };
}

static void op_init(void *opaque, struct fuse_conn_info *connection)
{
    (void)opaque;
    connection->max_write = LARGEST;
    connection->max_background = 256;
    connection->congestion_threshold = 192;
    connection->want |= connection->capable & (FUSE_CAP_ASYNC_DIO | FUSE_CAP_PARALLEL_DIROPS);
    /* Without this the kernel asks for a truncation by itself, and op_setattr refuses it. */
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC;
    /* Splicing costs two more system calls for each request; blocks are small and lie in several layers. */
    connection->want &= ~(unsigned)(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    struct fuse_front *front = front_of(req);
    /* No entry time-out: a name can go and come back as another image. */
    struct fuse_entry_param entry = {.attr_timeout = FOREVER};
    pthread_mutex_lock(&front->lock);
    struct file *file = parent == FUSE_ROOT_ID ? find_name(front, name) : NULL;
    if (file) {
        entry.ino = file->ino;
        fill_attributes(file, &entry.attr);
    }
    pthread_mutex_unlock(&front->lock);
    if (file)
        fuse_reply_entry(req, &entry);
    else
        fuse_reply_err(req, ENOENT);
}

static bool attributes_of(struct fuse_front *front, fuse_ino_t ino, struct stat *out)
{
    if (ino == FUSE_ROOT_ID) {
        *out = (struct stat){.st_ino = ino, .st_mode = ROOT_MODE, .st_nlink = 2};
        return true;
    }
    pthread_mutex_lock(&front->lock);
    struct file *file = find_ino(front, ino);
    if (file)
        fill_attributes(file, out);
    pthread_mutex_unlock(&front->lock);
    return file;
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct stat attributes;
    (void)info;
    if (attributes_of(front_of(req), ino, &attributes))
        fuse_reply_attr(req, &attributes, FOREVER);
    else
        fuse_reply_err(req, ESTALE);
}

/* Times are accepted and forgotten; the size is changed by the control socket only. */
static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *wanted, int which, struct fuse_file_info *info)
{
    struct stat attributes;
    (void)info;
    if (!attributes_of(front_of(req), ino, &attributes))
        fuse_reply_err(req, ESTALE);
    else if (which & FUSE_SET_ATTR_SIZE && wanted->st_size != attributes.st_size)
        fuse_reply_err(req, EPERM);
    else if (which & (FUSE_SET_ATTR_MODE | FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID))
        fuse_reply_err(req, EPERM);
    else
        fuse_reply_attr(req, &attributes, FOREVER);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct fuse_front *front = front_of(req);
    (void)info; /* a read-only image may be opened for writing: QEMU does so even for private mappings */
    pthread_mutex_lock(&front->lock);
    struct file *file = find_ino(front, ino);
    if (file)
        file->opens++;
    pthread_mutex_unlock(&front->lock);
    if (!file) {
        fuse_reply_err(req, ESTALE);
        return;
    }
    struct open_out out = {.fh = (uintptr_t)file, .open_flags = OPEN_NOFLUSH};
    out.open_flags |= file->cached ? OPEN_KEEP_CACHE : OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES;
    if (fuse_reply_buf(req, (const char *)&out, sizeof out) == -ENOENT) { /* the opener was interrupted */
        pthread_mutex_lock(&front->lock);
        file->opens--;
        pthread_mutex_unlock(&front->lock);
    }
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct fuse_front *front = front_of(req);
    (void)ino;
    pthread_mutex_lock(&front->lock);
    if (--file_of(info)->opens == 0)
        pthread_cond_broadcast(&front->closed);
    pthread_mutex_unlock(&front->lock);
    fuse_reply_err(req, 0);
}

/* --- input and output ------------------------------------------------------------------------------------------ */

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t length, off_t offset, struct fuse_file_info *info)
{
    struct block_device *device = file_of(info)->device;
    uint64_t size = device->size(device), at = (uint64_t)offset;
    char *buffer = thread_buffer();
    (void)ino;
    if (!buffer || length > LARGEST) {
        fuse_reply_err(req, buffer ? EINVAL : ENOMEM);
        return;
    }
    if (at >= size) {
        fuse_reply_buf(req, NULL, 0);
        return;
    }
    length = length < size - at ? length : size - at;
    size_t head = at % SECTOR, whole = (head + length + SECTOR - 1) / SECTOR * SECTOR;
    int rc = device->read(device, buffer, whole, at - head);
    if (rc)
        fuse_reply_err(req, -rc);
    else
        fuse_reply_buf(req, buffer + head, length);
}

/* `data` NULL: zeros. Sectors that are written in part are read first. */
static int write_partial(struct file *file, const char *data, size_t length, uint64_t at)
{
    struct block_device *device = file->device;
    size_t head = at % SECTOR, whole = (head + length + SECTOR - 1) / SECTOR * SECTOR;
    char *buffer = thread_buffer();
    if (!buffer)
        return -ENOMEM;
    pthread_mutex_lock(&file->partial);
    int rc = device->read(device, buffer, whole, at - head);
    if (!rc && data)
        memcpy(buffer + head, data, length);
    else if (!rc)
        memset(buffer + head, 0, length);
    if (!rc)
        rc = device->write(device, buffer, whole, at - head);
    pthread_mutex_unlock(&file->partial);
    return rc;
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t length, off_t offset,
                     struct fuse_file_info *info)
{
    struct file *file = file_of(info);
    uint64_t size = file->device->size(file->device), at = (uint64_t)offset;
    int rc;
    (void)ino;
    if (file->device->read_only)
        rc = -EROFS;
    else if (at > size || length > size - at)
        rc = -ENOSPC; /* as a block device answers */
    else if (length > LARGEST)
        rc = -EINVAL;
    else if (at % SECTOR || length % SECTOR)
        rc = write_partial(file, data, length, at);
    else
        rc = file->device->write(file->device, data, length, at);
    if (rc)
        fuse_reply_err(req, -rc);
    else
        fuse_reply_write(req, length);
}

static int discard(struct file *file, uint64_t at, uint64_t length)
{
    uint64_t begin = (at + SECTOR - 1) / SECTOR * SECTOR, end = (at + length) / SECTOR * SECTOR;
    if (begin >= end)
        return length ? write_partial(file, NULL, length, at) : 0;
    int rc = begin > at ? write_partial(file, NULL, begin - at, at) : 0;
    if (!rc && at + length > end)
        rc = write_partial(file, NULL, at + length - end, end);
    return rc ? rc : file->device->discard(file->device, begin, end - begin);
}

static void op_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length,
                         struct fuse_file_info *info)
{
    struct file *file = file_of(info);
    uint64_t size = file->device->size(file->device), at = (uint64_t)offset, left = (uint64_t)length;
    int rc = 0;
    (void)ino;
    if (file->device->read_only)
        rc = -EROFS;
    else if (mode & ~(FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
        rc = -EOPNOTSUPP;
    else if (!(mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)))
        rc = -EOPNOTSUPP; /* space cannot be set aside in a layer that only grows */
    else if (at < size)
        rc = discard(file, at, left < size - at ? left : size - at);
    fuse_reply_err(req, -rc);
}

static void op_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *info)
{
    struct block_device *device = file_of(info)->device;
    (void)ino, (void)data_only;
    fuse_reply_err(req, -device->flush(device));
}

static size_t add_entry(fuse_req_t req, char *out, size_t room, const char *name, fuse_ino_t ino, mode_t mode, off_t next)
{
    struct stat attributes = {.st_ino = ino, .st_mode = mode};
    return fuse_add_direntry(req, out, room, name, &attributes, next);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t length, off_t offset, struct fuse_file_info *info)
{
    struct fuse_front *front = front_of(req);
    char *buffer = thread_buffer();
    size_t used = 0, part = 0, room = length < LARGEST ? length : LARGEST;
    (void)ino, (void)info;
    if (!buffer) {
        fuse_reply_err(req, ENOMEM);
        return;
    }
    if (offset == 0)
        used += add_entry(req, buffer, room, ".", FUSE_ROOT_ID, S_IFDIR, 1);
    /* The list has the newest first, and the offset of an entry is its inode: one that goes does not move the others. */
    pthread_mutex_lock(&front->lock);
    for (struct file *file = front->files; file; file = file->next) {
        if (offset > 1 && file->ino >= (fuse_ino_t)offset)
            continue;
        part = add_entry(req, buffer + used, room - used, file->name, file->ino, S_IFREG, (off_t)file->ino);
        if (part > room - used)
            break;
        used += part;
    }
    pthread_mutex_unlock(&front->lock);
    fuse_reply_buf(req, buffer, used);
}

static const struct fuse_lowlevel_ops OPERATIONS = {
    .init = op_init, .lookup = op_lookup, .getattr = op_getattr, .setattr = op_setattr, .open = op_open,
    .release = op_release, .read = op_read, .write = op_write, .fsync = op_fsync, .fallocate = op_fallocate,
    .readdir = op_readdir,
};

/* --- life ------------------------------------------------------------------------------------------------------ */

static void *serve(void *opaque)
{
    struct fuse_front *front = opaque;
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    /* Memory for our writes must not wait for writes to a file system on one of our own images. Threads started from
     * here inherit it. Without the privilege it fails, and then such a file system cannot be mounted either. */
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    fuse_loop_cfg_set_clone_fd(config, 1);
    fuse_loop_cfg_set_max_threads(config, 32);
    fuse_loop_cfg_set_idle_threads(config, 8);
    fuse_session_loop_mt(front->session, config);
    fuse_loop_cfg_destroy(config);
    return NULL;
}

static int start_thread(struct fuse_front *front)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are for the thread that runs Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&front->thread, NULL, serve, front);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -rc;
}

int fuse_front_start(const char *directory, struct fuse_front **out)
{
    char options[] = "allow_other,default_permissions,fsname=aenv-blockd,subtype=aenv";
    char *arguments[] = {"aenv-blockd", "-o", options, NULL};
    struct fuse_args args = FUSE_ARGS_INIT(3, arguments);
    struct fuse_front *front = calloc(1, sizeof *front);
    struct statfs status;
    if (!front)
        return -ENOMEM;
    while (statfs(directory, &status) && errno == ENOTCONN) /* stat() would be answered from the kernel's cache */
        if (umount2(directory, MNT_DETACH))
            break;
    pthread_mutex_init(&front->lock, NULL);
    pthread_cond_init(&front->closed, NULL);
    front->next_ino = FUSE_ROOT_ID + 1;
    front->directory = strdup(directory);
    front->session = fuse_session_new(&args, &OPERATIONS, sizeof OPERATIONS, front);
    fuse_opt_free_args(&args);
    int rc = !front->directory ? -ENOMEM : front->session ? 0 : -EINVAL;
    if (!rc && fuse_session_mount(front->session, directory)) {
        rc = -EACCES;
        fuse_session_destroy(front->session);
    } else if (!rc && (rc = start_thread(front))) {
        fuse_session_unmount(front->session);
        fuse_session_destroy(front->session);
    }
    if (rc) {
        free(front->directory);
        free(front);
    } else {
        *out = front;
    }
    return rc;
}

static void free_file(struct file *file)
{
    pthread_mutex_destroy(&file->partial);
    free(file->name);
    free(file);
}

int fuse_front_add(struct fuse_front *front, const struct fuse_image *image)
{
    struct file *file = calloc(1, sizeof *file);
    if (!file || !(file->name = strdup(image->name))) {
        free(file);
        return -ENOMEM;
    }
    pthread_mutex_init(&file->partial, NULL);
    file->device = image->device;
    file->cached = image->cached;
    file->uid = image->uid, file->gid = image->gid, file->mode = image->mode & 0777;
    clock_gettime(CLOCK_REALTIME, &file->since);
    pthread_mutex_lock(&front->lock);
    int rc = find_name(front, image->name) ? -EEXIST : 0;
    if (!rc) {
        file->ino = front->next_ino++;
        file->next = front->files;
        front->files = file;
    }
    pthread_mutex_unlock(&front->lock);
    if (rc)
        free_file(file);
    return rc;
}

static struct timespec milliseconds_from_now(unsigned milliseconds)
{
    struct timespec when;
    clock_gettime(CLOCK_REALTIME, &when);
    uint64_t nanoseconds = (uint64_t)when.tv_nsec + milliseconds * 1000000ull;
    return (struct timespec){when.tv_sec + (time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
}

int fuse_front_remove(struct fuse_front *front, const char *name, unsigned patience)
{
    struct timespec until = milliseconds_from_now(patience);
    struct file **link = &front->files, *file;
    pthread_mutex_lock(&front->lock);
    while ((file = find_name(front, name)) && file->opens &&
           pthread_cond_timedwait(&front->closed, &front->lock, &until) == 0)
        ; /* the file may be gone after a wait: look again */
    int rc = !file ? -ENOENT : file->opens ? -EBUSY : 0;
    if (!rc) {
        while (*link != file)
            link = &(*link)->next;
        *link = file->next;
    }
    pthread_mutex_unlock(&front->lock);
    if (rc)
        return rc;
    /* The kernel drops the inode with its cached pages. It may have forgotten the name already. */
    fuse_lowlevel_notify_delete(front->session, FUSE_ROOT_ID, file->ino, name, strlen(name));
    free_file(file);
    return 0;
}

int fuse_front_opens(struct fuse_front *front, const char *name)
{
    pthread_mutex_lock(&front->lock);
    struct file *file = find_name(front, name);
    int opens = file ? (int)file->opens : -ENOENT;
    pthread_mutex_unlock(&front->lock);
    return opens;
}

int fuse_front_resized(struct fuse_front *front, const char *name)
{
    pthread_mutex_lock(&front->lock);
    struct file *file = find_name(front, name);
    fuse_ino_t ino = file ? file->ino : 0;
    pthread_mutex_unlock(&front->lock);
    if (!ino)
        return -ENOENT;
    fuse_lowlevel_notify_inval_inode(front->session, ino, 0, 0); /* -ENOENT: the kernel does not know it yet */
    return 0;
}

void fuse_front_stop(struct fuse_front *front)
{
    fuse_session_exit(front->session);
    umount2(front->directory, MNT_FORCE); /* wakes the readers with ENODEV, even if it fails because files are open */
    fuse_session_unmount(front->session);
    pthread_join(front->thread, NULL);
    fuse_session_destroy(front->session);
    while (front->files) {
        struct file *file = front->files;
        front->files = file->next;
        free_file(file);
    }
    pthread_cond_destroy(&front->closed);
    pthread_mutex_destroy(&front->lock);
    free(front->directory);
    free(front);
}
