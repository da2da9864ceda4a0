/* The two files of a layer in the chunk cache: its data, sparse, and the map, which says which chunks are whole.
 *
 * A record of the map holds the CRC of a chunk and a check of itself. It is written after the data and wiped before a hole
 * is punched; neither is synced. A killed process leaves both in the page cache in that order. After a power loss any
 * mixture is possible, and the CRC, which is checked at the first read after each start, finds what does not fit. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lsmt_cache_state.h"

#define MAP_HEADER 4096u
static const char MAGIC[8] = {'A', 'E', 'N', 'V', 'C', 'H', 'K', '1'};

struct map_header {
    char magic[8];
    uint64_t size;
    uint32_t chunk_size, seed;
    char name[CACHE_NAME];
    uint8_t pad[MAP_HEADER - 188];
    uint32_t crc;
} __attribute__((packed));
_Static_assert(sizeof(struct map_header) == MAP_HEADER, "map header");

struct record {
    uint32_t crc, check; /* both 0: the chunk is absent */
};

static uint32_t chunk_crc(const struct remote *remote, const void *bytes, size_t length)
{
    return crc32c_raw(~remote->seed, bytes, length);
}

/* The seed is drawn when the file is made: records of an earlier file in the same disk blocks do not hold. */
static uint32_t record_check(const struct remote *remote, uint64_t number, uint32_t crc)
{
    struct {
        uint64_t number;
        uint32_t crc, seed;
    } content = {number, crc, remote->seed};
    return crc32c_raw(~0u, &content, sizeof content) | 1;
}

static int write_record(struct remote *remote, uint64_t number, bool present)
{
    uint32_t crc = atomic_load_explicit(&remote->chunk[number].crc, memory_order_relaxed);
    struct record record = {0};
    if (present)
        record = (struct record){crc, record_check(remote, number, crc)};
    return write_fully(remote->map_fd, &record, sizeof record, MAP_HEADER + number * sizeof record);
}

static void punch(struct remote *remote, uint64_t from, uint64_t to)
{
    uint64_t at = from << remote->shift;
    fallocate(remote->data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
              (off_t)((to - from) << remote->shift));
}

static void path_of(const struct cache *cache, const char *name, const char *suffix, char out[4096])
{
    snprintf(out, 4096, "%s/%s%s", cache->directory, name, suffix);
}

void remote_unlink(struct cache *cache, const char *name)
{
    char path[4096];
    path_of(cache, name, ".map", path);
    unlink(path);
    path_of(cache, name, ".data", path);
    unlink(path);
}

void remote_close_files(struct remote *remote)
{
    if (remote->file)
        remote->file->close(remote->file);
    if (remote->data_fd >= 0)
        close(remote->data_fd);
    if (remote->map_fd >= 0)
        close(remote->map_fd);
    remote->file = NULL;
    remote->data_fd = remote->map_fd = -1;
}

static int open_files(struct remote *remote, int flags)
{
    char path[4096];
    path_of(remote->cache, remote->name, ".map", path);
    remote->map_fd = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    path_of(remote->cache, remote->name, ".data", path);
    remote->data_fd = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    int rc = remote->map_fd < 0 || remote->data_fd < 0 ? -errno : 0;
    int fd = rc ? -1 : fcntl(remote->data_fd, F_DUPFD_CLOEXEC, 0);
    if (!rc && (fd < 0 || !(remote->file = source_file(fd, path, remote->size))))
        rc = fd < 0 ? -errno : -ENOMEM;
    if (rc)
        remote_close_files(remote);
    return rc;
}

int remote_open_files(struct remote *remote) { return open_files(remote, 0); }

static struct remote *remote_new(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size)
{
    struct remote *remote;
    if (posix_memalign((void **)&remote, 64, sizeof *remote)) /* the counters have a cache line each */
        return NULL;
    memset(remote, 0, sizeof *remote);
    remote->cache = cache;
    remote->size = size;
    remote->chunk_size = chunk_size;
    remote->shift = (uint32_t)__builtin_ctz(chunk_size);
    remote->chunks = (size + chunk_size - 1) >> remote->shift;
    remote->data_fd = remote->map_fd = -1;
    snprintf(remote->name, sizeof remote->name, "%s", name);
    if (!(remote->chunk = calloc(remote->chunks, sizeof *remote->chunk))) {
        free(remote);
        return NULL;
    }
    return remote;
}

void remote_free(struct remote *remote)
{
    remote_close_files(remote);
    free(remote->chunk);
    free(remote);
}

static uint32_t header_crc(const struct map_header *header)
{
    return crc32c_raw(~0u, header, offsetof(struct map_header, crc));
}

int remote_create(struct cache *cache, const char *name, uint64_t size, uint32_t chunk_size, struct remote **out)
{
    struct map_header header = {.size = size, .chunk_size = chunk_size};
    struct remote *remote = remote_new(cache, name, size, chunk_size);
    if (!remote)
        return -ENOMEM;
    remote_unlink(cache, name);
    int rc = open_files(remote, O_CREAT | O_EXCL);
    if (!rc && getrandom(&remote->seed, sizeof remote->seed, 0) < 0)
        rc = -errno;
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    memcpy(header.name, remote->name, sizeof header.name);
    header.seed = remote->seed;
    header.crc = header_crc(&header);
    if (!rc && (ftruncate(remote->data_fd, (off_t)size) ||
                ftruncate(remote->map_fd, (off_t)(MAP_HEADER + remote->chunks * sizeof(struct record)))))
        rc = -errno;
    if (!rc)
        rc = write_fully(remote->map_fd, &header, sizeof header, 0);
    if (rc) {
        remote_unlink(cache, name);
        remote_free(remote);
        return rc;
    }
    *out = remote;
    return 0;
}

static bool header_holds(const struct map_header *header, const char *name)
{
    return memcmp(header->magic, MAGIC, sizeof MAGIC) == 0 && header->crc == header_crc(header) &&
           strncmp(header->name, name, CACHE_NAME) == 0 && header->chunk_size >= CACHE_CHUNK_LEAST &&
           header->chunk_size <= CACHE_CHUNK_MOST && !(header->chunk_size & (header->chunk_size - 1)) && header->size;
}

/* Data without a record (of a process that was killed between the two) would take space that nobody counts. */
static void load_records(struct remote *remote, const struct record *records)
{
    uint64_t empty_from = 0;
    for (uint64_t i = 0; i <= remote->chunks; i++) {
        const struct record *r = &records[i];
        bool here = i < remote->chunks && r->check && r->check == record_check(remote, i, r->crc);
        if (i < remote->chunks && !here)
            continue;
        if (empty_from < i)
            punch(remote, empty_from, i);
        empty_from = i + 1;
        if (here) {
            atomic_init(&remote->chunk[i].crc, r->crc);
            atomic_init(&remote->chunk[i].word, CHUNK_UNVERIFIED);
            remote->present++;
            atomic_fetch_add(&remote->cache->used, chunk_length(remote, i));
        }
    }
}

int remote_load(struct cache *cache, const char *name, struct remote **out)
{
    char path[4096];
    struct map_header header;
    struct stat data, map;
    path_of(cache, name, ".map", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = fd < 0 ? -errno : read_fully(fd, &header, sizeof header, 0);
    if (fd >= 0)
        close(fd);
    if (rc || !header_holds(&header, name))
        return rc == -ENODATA || !rc ? -EBADMSG : rc;
    uint64_t chunks = (header.size + header.chunk_size - 1) / header.chunk_size;
    size_t bytes = chunks * sizeof(struct record);
    path_of(cache, name, ".data", path);
    if (stat(path, &data) || (uint64_t)data.st_size != header.size)
        return -EBADMSG;
    path_of(cache, name, ".map", path);
    if (stat(path, &map) || (uint64_t)map.st_size != MAP_HEADER + bytes)
        return -EBADMSG;
    struct remote *remote = remote_new(cache, name, header.size, header.chunk_size);
    struct record *records = malloc(bytes + sizeof *records);
    rc = remote && records ? remote_open_files(remote) : -ENOMEM;
    if (!rc)
        rc = read_fully(remote->map_fd, records, bytes, MAP_HEADER);
    if (!rc) {
        remote->seed = header.seed;
        load_records(remote, records);
        remote_close_files(remote);
        *out = remote;
    } else if (remote) {
        remote_free(remote);
    }
    free(records);
    return rc;
}

/* --- chunks -------------------------------------------------------------------------------------------------- */

static bool set_word(struct chunk *chunk, unsigned from, unsigned to)
{
    return atomic_compare_exchange_strong(&chunk->word, &from, to);
}

bool remote_drop(struct remote *remote, uint64_t number, unsigned word)
{
    struct chunk *chunk = &remote->chunk[number];
    unsigned next = (word & ~(WORD_STATE | WORD_MARK)) + WORD_GENERATION;
    if (!set_word(chunk, word, next | CHUNK_EVICTING))
        return false;
    /* The record first: a process that is killed here leaves data without a record, and not the other way round. */
    write_record(remote, number, false);
    punch(remote, number, number + 1);
    atomic_fetch_sub(&remote->present, 1);
    atomic_fetch_sub(&remote->cache->used, chunk_length(remote, number));
    atomic_store(&chunk->word, next | CHUNK_ABSENT);
    return true;
}

int remote_verify(struct remote *remote, uint64_t number, unsigned word, bool direct)
{
    struct chunk *chunk = &remote->chunk[number];
    size_t length = chunk_length(remote, number);
    void *bytes;
    if (posix_memalign(&bytes, 4096, length))
        return -ENOMEM;
    int rc = remote->file->read(remote->file, bytes, length, number << remote->shift, direct);
    bool whole = !rc && chunk_crc(remote, bytes, length) == atomic_load(&chunk->crc);
    free(bytes);
    if (whole) {
        set_word(chunk, word, (word & ~WORD_STATE) | CHUNK_PRESENT);
        return 0;
    }
    pthread_mutex_lock(&remote->cache->evicting);
    if (remote_drop(remote, number, word))
        add(&remote->cache->damaged, 1);
    pthread_mutex_unlock(&remote->cache->evicting);
    return 0;
}

/* Its pages would be in memory twice: the reader keeps them in the page cache of its own file. */
static void leave_page_cache(struct remote *remote, uint64_t number)
{
    off_t at = (off_t)(number << remote->shift), length = (off_t)chunk_length(remote, number);
    sync_file_range(remote->data_fd, at, length,
                    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(remote->data_fd, at, length, POSIX_FADV_DONTNEED);
}

static int write_chunk(struct remote *remote, uint64_t number, const char *bytes)
{
    size_t length = chunk_length(remote, number);
    atomic_store(&remote->chunk[number].crc, chunk_crc(remote, bytes, length));
    int rc = write_fully(remote->data_fd, bytes, length, number << remote->shift);
    return rc ? rc : write_record(remote, number, true);
}

bool remote_store(struct remote *remote, uint64_t number, const char *bytes, bool mark, bool direct)
{
    struct cache *cache = remote->cache;
    struct chunk *chunk = &remote->chunk[number];
    size_t length = chunk_length(remote, number);
    unsigned word = atomic_load(&chunk->word);
    while ((word & WORD_STATE) == CHUNK_EVICTING) { /* its hole must not be punched into the new data */
        pthread_mutex_lock(&cache->evicting);
        pthread_mutex_unlock(&cache->evicting);
        word = atomic_load(&chunk->word);
    }
    unsigned base = word & ~(WORD_STATE | WORD_MARK);
    if (atomic_load(&cache->released) || !cache_make_room(cache, length)) {
        add(&cache->not_stored, 1);
        return false;
    }
    atomic_store(&chunk->word, base | CHUNK_WRITING); /* single flight: nobody else changes an absent chunk */
    int rc = write_chunk(remote, number, bytes);
    if (rc == -ENOSPC) { /* others fill the disk: have less */
        pthread_mutex_lock(&cache->evicting);
        cache_shrink(cache);
        pthread_mutex_unlock(&cache->evicting);
        rc = write_chunk(remote, number, bytes);
    }
    if (rc) {
        write_record(remote, number, false);
        punch(remote, number, number + 1);
        atomic_fetch_sub(&cache->used, length);
        atomic_store(&chunk->word, base | CHUNK_ABSENT);
        add(&cache->not_stored, 1);
        return false;
    }
    atomic_fetch_add(&remote->present, 1);
    atomic_store(&chunk->used, atomic_fetch_add(&cache->tick, 1) + 1);
    atomic_store(&chunk->word, base | CHUNK_PRESENT | (mark ? WORD_MARK : 0));
    if (direct)
        leave_page_cache(remote, number);
    return true;
}
