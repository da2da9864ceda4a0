#define _GNU_SOURCE
#include "c_fuse.h"

#include <errno.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "c_fuse_session.h"

#define SECTOR 512u
#define FOREVER 86400.0 /* seconds the kernel may believe our attributes; a change is told to it */
#define ROOT_MODE (S_IFDIR | 0711)
#define BUCKETS 1024u

/* The answer to OPEN. Written out here because libfuse 3.14 cannot set the newest flag (Linux 6.2): without it the
 * kernel lets only one write at a time into a file. */
struct open_out {
    uint64_t fh;
    uint32_t open_flags, padding;
};
_Static_assert(sizeof(struct open_out) == 16, "fuse_open_out");
enum { OPEN_DIRECT_IO = 1, OPEN_KEEP_CACHE = 2, OPEN_NOFLUSH = 32, OPEN_PARALLEL_DIRECT_WRITES = 64 };

struct file {
    struct file *next, *same_bucket;
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
    struct connection *connection;
    struct fuse_session *session;
    struct fuse_record *record;
    /* `table` guards list and buckets; `lock`, which is taken before it, the record and `opens` of files. A file that
     * is open is not removed: requests for it use it without a lock. */
    pthread_rwlock_t table;
    pthread_mutex_t lock;
    pthread_cond_t closed;
    struct file *files;
    struct file *buckets[BUCKETS];
};

/* --- files ----------------------------------------------------------------------------------------------------- */

static struct fuse_front *front_of(fuse_req_t req) { return fuse_req_userdata(req); }

static struct file *find_name(struct fuse_front *front, const char *name)
{
    struct file *file = front->files;
    while (file && strcmp(file->name, name) != 0)
        file = file->next;
    return file;
}

static struct file *find_ino(struct fuse_front *front, fuse_ino_t ino)
{
    struct file *file = front->buckets[ino % BUCKETS];
    while (file && file->ino != ino)
        file = file->same_bucket;
    return file;
}

/* The file that an open description belongs to. Found by its inode: a pointer would mean nothing to the next server. */
static struct file *file_of(fuse_req_t req, fuse_ino_t ino)
{
    struct fuse_front *front = front_of(req);
    pthread_rwlock_rdlock(&front->table);
    struct file *file = find_ino(front, ino);
    pthread_rwlock_unlock(&front->table);
    if (!file)
        fuse_reply_err(req, ESTALE);
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
    connection->max_write = REQUEST_LARGEST;
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
    pthread_rwlock_rdlock(&front->table);
    struct file *file = parent == FUSE_ROOT_ID ? find_name(front, name) : NULL;
    if (file) {
        entry.ino = file->ino;
        fill_attributes(file, &entry.attr);
    }
    pthread_rwlock_unlock(&front->table);
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
    pthread_rwlock_rdlock(&front->table);
    struct file *file = find_ino(front, ino);
    if (file)
        fill_attributes(file, out);
    pthread_rwlock_unlock(&front->table);
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

/* Counts an open description, once also if its request comes again after a crash. Gives the file, or NULL and why. */
static struct file *count_open(struct fuse_front *front, fuse_ino_t ino, int *rc)
{
    uint64_t fh = request_number();
    pthread_mutex_lock(&front->lock);
    pthread_rwlock_rdlock(&front->table);
    struct file *file = find_ino(front, ino);
    pthread_rwlock_unlock(&front->table);
    *rc = !file ? -ESTALE : 0;
    if (file && !(request_is_resent() && record_has_handle(front->record, fh)) &&
        (*rc = record_add_handle(front->record, fh, ino)) == 0)
        file->opens++;
    pthread_mutex_unlock(&front->lock);
    return *rc ? NULL : file;
}

static void count_close(struct fuse_front *front, fuse_ino_t ino, uint64_t fh)
{
    pthread_mutex_lock(&front->lock);
    pthread_rwlock_rdlock(&front->table);
    struct file *file = find_ino(front, ino);
    pthread_rwlock_unlock(&front->table);
    if (record_remove_handle(front->record, fh) == 0 && file && --file->opens == 0)
        pthread_cond_broadcast(&front->closed);
    pthread_mutex_unlock(&front->lock);
}

static void op_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    struct fuse_front *front = front_of(req);
    int rc;
    (void)info; /* a read-only image may be opened for writing: QEMU does so even for private mappings */
    struct file *file = count_open(front, ino, &rc);
    if (!file) {
        fuse_reply_err(req, -rc);
        return;
    }
    struct open_out out = {.fh = request_number(), .open_flags = OPEN_NOFLUSH};
    out.open_flags |= file->cached ? OPEN_KEEP_CACHE : OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES;
    if (fuse_reply_buf(req, (const char *)&out, sizeof out) == -ENOENT) /* the opener was interrupted */
        count_close(front, ino, out.fh);
}

static void op_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *info)
{
    count_close(front_of(req), ino, info->fh);
    fuse_reply_err(req, 0);
}

/* --- input and output ------------------------------------------------------------------------------------------ */

/* A read that waits for a remote layer. The file stays: it is open as long as one of its reads is not answered. */
struct slow_read {
    fuse_req_t req;
    struct block_device *device;
    size_t head, length, whole;
    uint64_t at;
};

static void read_slowly(void *argument)
{
    struct slow_read slow = *(struct slow_read *)argument;
    void *buffer;
    free(argument);
    if (posix_memalign(&buffer, 4096, slow.whole)) {
        fuse_reply_err(slow.req, ENOMEM);
        return;
    }
    int rc = slow.device->read(slow.device, buffer, slow.whole, slow.at - slow.head);
    if (rc)
        fuse_reply_err(slow.req, -rc);
    else
        fuse_reply_buf(slow.req, (char *)buffer + slow.head, slow.length);
    free(buffer);
}

/* False: this thread must wait. */
static bool park_read(struct slow_read read)
{
    struct slow_read *slow = malloc(sizeof *slow);
    if (!slow)
        return false;
    *slow = read;
    if (request_park(front_of(read.req)->connection, read_slowly, slow))
        return true;
    free(slow);
    return false;
}

static void op_read(fuse_req_t req, fuse_ino_t ino, size_t length, off_t offset, struct fuse_file_info *info)
{
    struct file *file = file_of(req, ino);
    (void)info;
    if (!file)
        return;
    struct block_device *device = file->device;
    uint64_t size = device->size(device), at = (uint64_t)offset;
    char *buffer = request_buffer();
    if (length > REQUEST_LARGEST) {
        fuse_reply_err(req, EINVAL);
        return;
    }
    if (at >= size) {
        fuse_reply_buf(req, NULL, 0);
        return;
    }
    length = length < size - at ? length : size - at;
    size_t head = at % SECTOR, whole = (head + length + SECTOR - 1) / SECTOR * SECTOR;
    int rc = device->read_now(device, buffer, whole, at - head);
    if (rc == -EAGAIN) {
        if (park_read((struct slow_read){req, device, head, length, whole, at}))
            return;
        rc = device->read(device, buffer, whole, at - head);
    }
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
    void *memory;
    if (posix_memalign(&memory, 4096, whole))
        return -ENOMEM;
    char *buffer = memory;
    pthread_mutex_lock(&file->partial);
    int rc = device->read(device, buffer, whole, at - head);
    if (!rc && data)
        memcpy(buffer + head, data, length);
    else if (!rc)
        memset(buffer + head, 0, length);
    if (!rc)
        rc = device->write(device, buffer, whole, at - head);
    pthread_mutex_unlock(&file->partial);
    free(memory);
    return rc;
}

static void op_write(fuse_req_t req, fuse_ino_t ino, const char *data, size_t length, off_t offset,
                     struct fuse_file_info *info)
{
    struct file *file = file_of(req, ino);
    int rc;
    (void)info;
    if (!file)
        return;
    uint64_t size = file->device->size(file->device), at = (uint64_t)offset;
    if (file->device->read_only)
        rc = -EROFS;
    else if (at > size || length > size - at)
        rc = -ENOSPC; /* as a block device answers */
    else if (length > REQUEST_LARGEST)
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
    struct file *file = file_of(req, ino);
    int rc = 0;
    (void)info;
    if (!file)
        return;
    uint64_t size = file->device->size(file->device), at = (uint64_t)offset, left = (uint64_t)length;
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
    struct file *file = file_of(req, ino);
    (void)info, (void)data_only;
    if (file)
        fuse_reply_err(req, -file->device->flush(file->device));
}

static size_t add_entry(fuse_req_t req, char *out, size_t room, const char *name, fuse_ino_t ino, mode_t mode, off_t next)
{
    struct stat attributes = {.st_ino = ino, .st_mode = mode};
    return fuse_add_direntry(req, out, room, name, &attributes, next);
}

static void op_readdir(fuse_req_t req, fuse_ino_t ino, size_t length, off_t offset, struct fuse_file_info *info)
{
    struct fuse_front *front = front_of(req);
    char *buffer = request_buffer();
    size_t used = 0, part = 0, room = length < REQUEST_LARGEST ? length : REQUEST_LARGEST;
    (void)ino, (void)info;
    if (offset == 0)
        used += add_entry(req, buffer, room, ".", FUSE_ROOT_ID, S_IFDIR, 1);
    /* The list has the newest first, and the offset of an entry is its inode: one that goes does not move the others. */
    pthread_rwlock_rdlock(&front->table);
    for (struct file *file = front->files; file; file = file->next) {
        if (offset > 1 && file->ino >= (fuse_ino_t)offset)
            continue;
        part = add_entry(req, buffer + used, room - used, file->name, file->ino, S_IFREG, (off_t)file->ino);
        if (part > room - used)
            break;
        used += part;
    }
    pthread_rwlock_unlock(&front->table);
    fuse_reply_buf(req, buffer, used);
}

static const struct fuse_lowlevel_ops OPERATIONS = {
    .init = op_init, .lookup = op_lookup, .getattr = op_getattr, .setattr = op_setattr, .open = op_open,
    .release = op_release, .read = op_read, .write = op_write, .fsync = op_fsync, .fallocate = op_fallocate,
    .readdir = op_readdir,
};

/* --- life ------------------------------------------------------------------------------------------------------ */

int fuse_front_start(const char *directory, const char *record, const int *kept, unsigned kept_count,
                     struct fuse_front **out)
{
    struct fuse_front *front = calloc(1, sizeof *front);
    if (!front)
        return -ENOMEM;
    pthread_rwlock_init(&front->table, NULL);
    pthread_mutex_init(&front->lock, NULL);
    pthread_cond_init(&front->closed, NULL);
    struct connection_plan plan = {
        .directory = directory, .record_path = record, .kept = kept, .kept_count = kept_count,
        .operations = &OPERATIONS, .first_ino = FUSE_ROOT_ID + 1, .opaque = front,
    };
    int rc = connection_open(&plan, &front->connection);
    if (rc) {
        free(front);
        return rc;
    }
    front->session = connection_session(front->connection);
    front->record = connection_record(front->connection);
    *out = front;
    return 0;
}

int fuse_front_serve(struct fuse_front *front) { return connection_serve(front->connection); }
bool fuse_front_resumed(const struct fuse_front *front) { return connection_resumed(front->connection); }
void fuse_front_id(const struct fuse_front *front, uint64_t out[2]) { memcpy(out, front->record->id, 16); }

unsigned fuse_front_descriptors(const struct fuse_front *front, int out[FUSE_FRONT_KEPT])
{
    return connection_descriptors(front->connection, out, FUSE_FRONT_KEPT);
}

static void free_file(struct file *file)
{
    pthread_mutex_destroy(&file->partial);
    free(file->name);
    free(file);
}

/* With `lock` held. */
static int insert(struct fuse_front *front, struct file *file)
{
    struct fuse_record *record = front->record;
    if (find_name(front, file->name) || (file->ino && find_ino(front, file->ino)))
        return -EEXIST;
    if (!file->ino)
        file->ino = record->next_ino++; /* never used twice: the kernel's caches cannot mix up two images */
    else if (file->ino >= record->next_ino)
        record->next_ino = file->ino + 1;
    file->opens = record_count_handles(record, file->ino);
    struct file **link = &front->files;
    while (*link && (*link)->ino > file->ino)
        link = &(*link)->next;
    pthread_rwlock_wrlock(&front->table);
    file->next = *link;
    *link = file;
    file->same_bucket = front->buckets[file->ino % BUCKETS];
    front->buckets[file->ino % BUCKETS] = file;
    pthread_rwlock_unlock(&front->table);
    return 0;
}

/* With `lock` held. */
static void take_out(struct fuse_front *front, struct file *file)
{
    struct file **link = &front->files, **same = &front->buckets[file->ino % BUCKETS];
    pthread_rwlock_wrlock(&front->table);
    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
    while (*same != file)
        same = &(*same)->same_bucket;
    *same = file->same_bucket;
    pthread_rwlock_unlock(&front->table);
}

int fuse_front_add(struct fuse_front *front, const struct fuse_image *image, uint64_t *ino)
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
    file->ino = image->ino;
    file->since = (struct timespec){(time_t)(image->made_at / 1000000000u), (long)(image->made_at % 1000000000u)};
    pthread_mutex_lock(&front->lock);
    int rc = insert(front, file);
    pthread_mutex_unlock(&front->lock);
    if (rc)
        free_file(file);
    else
        *ino = file->ino;
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
    struct file *file;
    pthread_mutex_lock(&front->lock);
    while ((file = find_name(front, name)) && file->opens &&
           pthread_cond_timedwait(&front->closed, &front->lock, &until) == 0)
        ; /* the file may be gone after a wait: look again */
    int rc = !file ? -ENOENT : file->opens ? -EBUSY : 0;
    if (!rc)
        take_out(front, file);
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
    connection_stop(front->connection);
    connection_free(front->connection);
    while (front->files) {
        struct file *file = front->files;
        front->files = file->next;
        free_file(file);
    }
    pthread_cond_destroy(&front->closed);
    pthread_mutex_destroy(&front->lock);
    pthread_rwlock_destroy(&front->table);
    free(front);
}
