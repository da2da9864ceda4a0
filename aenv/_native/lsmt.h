/* The overlaybd layer library: sealed LSMT layers, ZFile, stacks of layers, writable layers and images.
 *
 * Offsets and lengths named `sector` count 512-byte units, all others bytes. Functions that return int give 0 or a
 * negative errno; those that take a `struct fault` also say in it which field of which file is wrong.
 */
#ifndef AENV_LSMT_H
#define AENV_LSMT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "block.h"

#define LSMT_SECTOR 512u
#define LSMT_BLOCK 4096u             /* size of header and trailer, and unit of zero detection */
#define LSMT_MAX_LENGTH 16383u       /* sectors of one segment: 14 bits */
#define LSMT_NO_OFFSET ((1ull << 50) - 1) /* logical offset of a padding entry */
#define LSMT_MAX_SECTORS ((1ull << 50) - 1)
#define LSMT_MAX_ENTRIES 1000000u    /* of a sealed layer: the reference implementation refuses more */
#define LSMT_MAX_RW_ENTRIES 128000000u
#define LSMT_MAX_LAYERS 255u         /* the tag of a merged segment is one byte */
#define LSMT_UUID 37u                /* text and its NUL */
#define LSMT_TAG 256u

/* What went wrong. `code` is a positive errno; EBADMSG means the file's content is wrong, EINVAL an argument. */
struct fault {
    int code;
    char field[48];
    char text[208];
};

int fault_set(struct fault *fault, int code, const char *field, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Told how far the work is, in bytes; returns 0 to stop it (-ECANCELED). */
typedef int (*progress_t)(void *opaque, uint64_t done);

/* CRC32C without initial and final inversion, as ZFile uses it. */
uint32_t crc32c_raw(uint32_t crc, const void *data, size_t length);

bool bytes_are_zero(const void *data, size_t length);
int write_fully(int fd, const void *data, size_t length, uint64_t offset);
int read_fully(int fd, void *data, size_t length, uint64_t offset); /* -ENODATA at the end of the file */

/* --- segments and indexes ------------------------------------------------------------------------------------ */

/* One index entry, as on disk. word0: logical sector (50 bits), length (14). word1: sector in the layer's file
 * (55 bits), zeroed (1), tag (8). A zeroed segment reads as zeros and has no data. */
struct segment {
    uint64_t word0, word1;
};
_Static_assert(sizeof(struct segment) == 16, "index entry");

static inline uint64_t seg_offset(const struct segment *s) { return s->word0 & LSMT_NO_OFFSET; }
static inline uint64_t seg_length(const struct segment *s) { return s->word0 >> 50; }
static inline uint64_t seg_end(const struct segment *s) { return seg_offset(s) + seg_length(s); }
static inline uint64_t seg_moffset(const struct segment *s) { return s->word1 & ((1ull << 55) - 1); }
static inline bool seg_zeroed(const struct segment *s) { return s->word1 >> 55 & 1; }
static inline unsigned seg_tag(const struct segment *s) { return (unsigned)(s->word1 >> 56); }

static inline struct segment seg_make(uint64_t offset, uint64_t length, uint64_t moffset, bool zeroed, unsigned tag)
{
    return (struct segment){offset | length << 50, moffset | (uint64_t)zeroed << 55 | (uint64_t)tag << 56};
}

struct segment seg_trim(struct segment s, uint64_t begin, uint64_t end);
bool seg_join(struct segment *first, const struct segment *next);

/* An immutable sorted set of disjoint segments: see lsmt_index.h. To go through it, raise `slot` of a cursor. */
struct index;
struct index_cursor {
    size_t block;
    unsigned slot;
};
struct index *index_ref(struct index *index);
void index_unref(struct index *index);
struct index_cursor index_find(const struct index *index, uint64_t sector); /* first segment that ends after `sector` */
bool index_at(const struct index *index, struct index_cursor *cursor, struct segment *out); /* false at the end */
struct index *index_merge(const struct index *top, const struct index *below);
struct index *index_merge_all(struct index *const *lowest_first, size_t count);

/* A mutable sorted set of disjoint segments: chunks of up to MAP_CHUNK, found through the array of first offsets. */
#define MAP_CHUNK 256
struct map_chunk {
    unsigned count;
    struct segment segments[MAP_CHUNK];
};
struct map {
    struct map_chunk **chunks;
    uint64_t *first;
    size_t used, room, count;
    struct map_chunk *spare[2];
    void (*dead)(void *opaque, uint64_t moffset, uint64_t sectors); /* told of data that an insert overrides, if set */
    void *opaque;
};
struct map_cursor {
    size_t chunk;
    unsigned at;
};

void map_free(struct map *map);
int map_insert(struct map *map, struct segment segment); /* overrides what was there; -ENOMEM changes nothing */
struct map_cursor map_find(const struct map *map, uint64_t sector);
const struct segment *map_at(const struct map *map, struct map_cursor *cursor); /* NULL at the end */
struct index *map_freeze(const struct map *map);

/* --- sources of bytes ---------------------------------------------------------------------------------------- */

/* A read-only file: a plain one, the inside of a tar, a decompressed ZFile. `read` gives all bytes or an error.
 * `direct` asks that nothing stays in the page cache. */
struct source {
    int (*read)(struct source *source, void *buffer, size_t length, uint64_t offset, bool direct);
    void (*close)(struct source *source);
    uint64_t size;
    bool remote; /* a read may wait for a network: see source_may_wait */
};

/* Whether reads of remote sources by this thread may wait; gives what it was. If not, they ask for what is missing and
 * give -EAGAIN. */
bool source_may_wait(bool may);
const void *source_lend(struct source *source, size_t length, uint64_t offset); /* see lsmt_view.h; NULL: must be read */
struct source *source_file(int fd, const char *path, uint64_t size); /* owns fd; path may be NULL */
int source_open(const char *path, struct source **out, char kind[16], struct fault *fault); /* sniffs tar and ZFile */
/* What a layer's file holds: looks into tar and ZFile. Takes over `source`, closes it if it fails. */
int source_unwrap(struct source *source, struct source **out, char kind[16], struct fault *fault);
int source_zfile(struct source *inner, struct source **out, struct fault *fault);
int zfile_verify(struct source *source, progress_t progress, void *opaque, struct fault *fault);

/* --- sealed layers and stacks -------------------------------------------------------------------------------- */

struct layer_info {
    uint64_t virtual_size, index_entries, data_bytes;
    char uuid[LSMT_UUID], parent_uuid[LSMT_UUID], user_tag[LSMT_TAG + 1], kind[16];
};

struct layer {
    atomic_uint refs;
    struct source *source;
    struct layer_info info;
    uint64_t index_offset;
};

int layer_open(const char *path, struct layer **out, struct index **index, struct fault *fault);
int layer_open_source(struct source *source, struct layer **out, struct index **index,
                      struct fault *fault); /* takes over `source` */
int layer_open_writable(const char *data, const char *index_path, struct layer **out, struct index **index,
                        struct fault *fault); /* reads a data + index pair without changing it */
struct layer *layer_new(struct source *source, const struct layer_info *info);
struct layer *layer_ref(struct layer *layer);
void layer_unref(struct layer *layer);

/* An immutable stack. Its levels are merged indexes, top first; a search goes through them in turn. */
#define STACK_MAX_LEVELS 24
struct stack {
    atomic_uint refs;
    unsigned layers, levels;
    bool remote; /* one of the layers is */
    uint64_t virtual_size;
    struct index *level[STACK_MAX_LEVELS];
    struct layer *layer[]; /* lowest first; the tag of a segment is the place here */
};

/* Both take references of layers and indexes for themselves. */
int stack_new(struct layer *const *layers, struct index *const *indexes, unsigned count, struct stack **out,
              struct fault *fault);
int stack_push(const struct stack *below, struct layer *layer, struct index *index, struct stack **out,
               struct fault *fault);
struct stack *stack_ref(struct stack *stack);
void stack_unref(struct stack *stack);
int stack_read(struct stack *stack, void *buffer, size_t length, uint64_t offset, bool direct);
struct index *stack_flatten(const struct stack *stack);
uint64_t stack_segments(const struct stack *stack);
uint64_t stack_index_bytes(const struct stack *stack); /* of memory; parts may be shared with other stacks */

/* --- memory maps --------------------------------------------------------------------------------------------- */

/* `length` bytes of RAM at `guest_offset` are those of file number `file` at `file_offset`: as aenv/vmm/base.py has it. */
struct memory_extent {
    uint64_t guest_offset, length;
    uint32_t file, reserved;
    uint64_t file_offset;
};
_Static_assert(sizeof(struct memory_extent) == 32, "a record of MemoryMap.extents");

/* Numbers of files: of the raw image below the stack, of its lowest layer (the others follow), of an image of zeros.
 * -1: there is none, and no extent where it would be needed. */
struct memory_files {
    int base;
    unsigned layers;
    int zero;
};

/* The content of a stack of plain layers over RAM of `size` bytes, in order, joined where files go on. -EOPNOTSUPP when
 * a segment is not made of whole pages. `extents` is for free(). */
int stack_memory(const struct stack *stack, uint64_t size, const struct memory_files *files,
                 struct memory_extent **extents, size_t *count, struct fault *fault);

/* --- writing sealed layers ----------------------------------------------------------------------------------- */

enum layer_form { FORM_PLAIN = 0, FORM_LZ4 = 1, FORM_ZSTD = 2 };

struct writer_options {
    enum layer_form form;
    uint32_t block_size; /* of a ZFile: 4096 .. 65536 */
    bool tar;
    uint64_t virtual_size;
    const char *uuid, *parent_uuid, *user_tag; /* NULL: empty */
};

struct writer;
int writer_new(int fd, const struct writer_options *options, struct writer **out, struct fault *fault);
/* In ascending order of sectors. `data` NULL: zeroed. */
int writer_add(struct writer *writer, uint64_t sector, uint64_t sectors, const void *data, struct fault *fault);
uint64_t writer_entries(const struct writer *writer);
int writer_finish(struct writer *writer, uint64_t *file_size, struct fault *fault); /* flushes to disk */
void writer_free(struct writer *writer); /* does not close fd */

/* Copies what `stack` maps to a new layer. Zero blocks become zeroed segments if `keep_zeros` (something lies below),
 * else nothing. With `parent`, blocks equal to the parent's content are left out. Gaps are bridged with the parent's
 * data if there would be more than LSMT_MAX_ENTRIES segments. */
struct commit_result {
    uint64_t entries, data_bytes, zero_bytes, same_bytes, file_size;
};
int stack_commit(struct stack *stack, struct stack *parent, bool keep_zeros, int fd,
                 const struct writer_options *options, uint64_t max_entries, progress_t progress,
                 void *opaque, struct commit_result *result, struct fault *fault);

/* The same in a thread with the lowest priorities. When *stop becomes true it ends with -ECANCELED. */
struct commit_job {
    bool keep_zeros;
    int fd;
    const struct writer_options *options;
    uint64_t max_entries;
    atomic_bool *stop;
    struct commit_result *result;
    struct fault *fault;
};
int stack_commit_in_background(struct stack *stack, struct stack *parent, const struct commit_job *todo);

/* --- writable layers ----------------------------------------------------------------------------------------- */

struct upper;

struct upper_recovery {
    uint64_t records, cut_records, cut_data_bytes;
};

int upper_create(const char *data, const char *index, uint64_t virtual_size, const char *uuid, const char *parent_uuid,
                 struct fault *fault);
int upper_open(const char *data, const char *index, struct upper **out, struct upper_recovery *recovery,
               struct fault *fault);
void upper_close(struct upper *upper);
int upper_write(struct upper *upper, const void *buffer, size_t length, uint64_t offset);
int upper_discard(struct upper *upper, uint64_t offset, uint64_t length);
int upper_flush(struct upper *upper);
int upper_resize(struct upper *upper, uint64_t virtual_size);
int upper_read_at(struct upper *upper, void *buffer, size_t length, uint64_t moffset);
const void *upper_lend(struct upper *upper, size_t length, uint64_t moffset); /* see lsmt_view.h; NULL: must be read */
uint64_t upper_virtual_size(const struct upper *upper);
uint64_t upper_data_end(struct upper *upper);
uint64_t upper_segments(struct upper *upper);
bool upper_wants_release(struct upper *upper); /* much space could be used again */
int upper_release(struct upper *upper);        /* no operation is running; shortens the index file, too */
pthread_rwlock_t *upper_lock(struct upper *upper); /* guards the map */
const struct map *upper_map(const struct upper *upper);
/* After this no more writes: the frozen content as a layer that lives on when `upper` is closed. */
int upper_freeze(struct upper *upper, struct layer **layer, struct index **index);
void upper_thaw(struct upper *upper); /* takes a freeze back */
/* Writes index and trailer of a frozen or idle layer, durably, and removes the index file. */
int upper_seal(struct upper *upper, struct fault *fault);

/* --- images: a stack, and maybe a writable layer on top ------------------------------------------------------ */

struct image_stats {
    uint64_t reads, read_bytes, writes, write_bytes, discards, flushes, restacks, errors;
};

struct image;
int image_new(struct stack *stack, struct upper *upper, bool direct, struct image **out, struct fault *fault);
void image_free(struct image *image); /* no operation may be running; closes the writable layer */
struct block_device *image_device(struct image *image);
int image_read(struct image *image, void *buffer, size_t length, uint64_t offset);
int image_read_now(struct image *image, void *buffer, size_t length, uint64_t offset);
int image_lend(struct image *image, size_t length, uint64_t offset, lend_t use, void *opaque);
int image_write(struct image *image, const void *buffer, size_t length, uint64_t offset);
int image_discard(struct image *image, uint64_t offset, uint64_t length);
int image_flush(struct image *image);
int image_resize(struct image *image, uint64_t virtual_size);
/* Puts `next` (an empty writable layer of the same size) on top, gives back the old one, frozen, for upper_seal. */
int image_restack(struct image *image, struct upper *next, struct upper **old, struct fault *fault);
/* Lets a writable image read what lies below its writable layer from another stack of the same content. */
int image_replace(struct image *image, struct stack *stack, struct fault *fault);
uint64_t image_size(struct image *image);
struct stack *image_stack(struct image *image); /* a new reference; NULL if there is none */
void image_upper_usage(struct image *image, uint64_t *segments, uint64_t *bytes); /* of the writable layer */
void image_get_stats(const struct image *image, struct image_stats *stats);

#endif
