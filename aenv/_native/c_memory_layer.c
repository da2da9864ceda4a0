/* The LSMT file format (overlaybd), as far as memory needs it: header 4096 | data | index | trailer 4096, all numbers
 * little-endian (this code runs on little-endian machines only).
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the layer format is little-endian");

#define BLOCK_BYTES 4096u
#define FLAG_HEADER 1u
#define FLAG_DATA 2u
#define FLAG_SEALED 4u
#define MAX_SECTORS 16376u /* the longest whole number of pages in 14 bits */
#define INVALID_OFFSET ((1ull << 50) - 1)
#define INDEX_ALIGN 256u /* entries in 4096 bytes */

struct __attribute__((packed)) block {
  unsigned char magic[24];
  uint32_t size, flags;
  uint64_t index_offset, index_size, virtual_size;
  char uuid[37], parent_uuid[37];
  uint16_t reserved;
  uint8_t version, sub_version;
  char user_tag[256];
};
_Static_assert(sizeof(struct block) == 390, "packed as in the format");

struct entry {
  uint64_t offset : 50, length : 14;
  uint64_t mapped : 55, zero : 1, tag : 8;
};
_Static_assert(sizeof(struct entry) == 16, "two words");

static const unsigned char MAGIC[24] = {'L', 'S', 'M', 'T', 0, 1, 2, 0, 0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44,
                                        0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a};
static const char NO_UUID[] = "00000000-0000-0000-0000-000000000000";

int memory_segments_add(struct memory_segments *list, struct memory_segment segment) {
  if (list->count == list->capacity) {
    size_t capacity = list->capacity ? list->capacity * 2 : 1024;
    struct memory_segment *items = realloc(list->items, capacity * sizeof *items);
    if (!items) return -1;
    list->items = items;
    list->capacity = capacity;
  }
  list->items[list->count++] = segment;
  return 0;
}

static int write_block(int fd, uint64_t at, struct block block, const char *uuid, struct memory_failure *why) {
  char bytes[BLOCK_BYTES] = {0};
  memcpy(block.magic, MAGIC, sizeof MAGIC);
  block.size = sizeof block;
  block.version = block.sub_version = 1;
  snprintf(block.uuid, sizeof block.uuid, "%s", uuid);
  snprintf(block.parent_uuid, sizeof block.parent_uuid, "%s", NO_UUID);
  memcpy(block.user_tag, "guest memory", 12);
  memcpy(bytes, &block, sizeof block);
  if (memory_write_at(fd, bytes, sizeof bytes, at) < 0) return memory_fail(why, errno, "write layer");
  return 0;
}

int memory_layer_write_header(int fd, uint64_t virtual_size, const char *uuid, struct memory_failure *why) {
  struct block block = {.flags = FLAG_HEADER | FLAG_DATA | FLAG_SEALED, .virtual_size = virtual_size};
  return write_block(fd, 0, block, uuid, why);
}

static int by_offset(const void *left, const void *right) {
  uint64_t a = ((const struct memory_segment *)left)->offset, b = ((const struct memory_segment *)right)->offset;
  return a < b ? -1 : a > b;
}

/* Segments that follow each other in memory and in the file become one. */
static size_t join(struct memory_segment *items, size_t count) {
  size_t kept = 0;
  for (size_t i = 0; i < count; i++) {
    struct memory_segment *last = kept ? &items[kept - 1] : NULL;
    if (last && last->zero == items[i].zero && last->offset + last->length == items[i].offset &&
        (last->zero || last->mapped + last->length == items[i].mapped) &&
        last->length + items[i].length <= MAX_SECTORS)
      last->length += items[i].length;
    else
      items[kept++] = items[i];
  }
  return kept;
}

int memory_layer_seal(int fd, uint64_t virtual_size, const char *uuid, uint64_t data_end, struct memory_segments *list,
                      uint64_t *file_bytes, struct memory_failure *why) {
  if (list->count) qsort(list->items, list->count, sizeof *list->items, by_offset);
  list->count = join(list->items, list->count);
  /* What could not be read back must not be sealed: the guest it came from is still there. */
  for (size_t i = 1; i < list->count; i++)
    if (list->items[i - 1].offset + list->items[i - 1].length > list->items[i].offset)
      return memory_fail(why, EINVAL, "a page was captured twice");
  size_t padded = (list->count + INDEX_ALIGN - 1) / INDEX_ALIGN * INDEX_ALIGN;
  if (padded > INDEX_LIMIT)
    return memory_fail(why, EFBIG, "%zu segments, a layer holds %u", list->count, INDEX_LIMIT);
  struct entry *entries = calloc(padded ? padded : 1, sizeof *entries);
  if (!entries) return memory_fail(why, ENOMEM, "index");
  for (size_t i = 0; i < padded; i++) {
    if (i >= list->count) {
      entries[i] = (struct entry){.offset = INVALID_OFFSET};
      continue;
    }
    const struct memory_segment *s = &list->items[i];
    uint64_t mapped = s->zero ? data_end / SECTOR_BYTES : s->mapped;
    entries[i] = (struct entry){.offset = s->offset, .length = s->length, .mapped = mapped, .zero = s->zero};
  }
  int result = memory_write_at(fd, entries, padded * sizeof *entries, data_end);
  int error = errno;
  free(entries);
  if (result < 0) return memory_fail(why, error, "write index");
  struct block block = {.flags = FLAG_DATA | FLAG_SEALED, .index_offset = data_end, .index_size = padded,
                        .virtual_size = virtual_size};
  uint64_t trailer = data_end + padded * sizeof *entries;
  *file_bytes = trailer + BLOCK_BYTES;
  return write_block(fd, trailer, block, uuid, why);
}

static int read_block(int fd, uint64_t at, const char *name, uint32_t flags, struct block *block,
                      struct memory_failure *why) {
  if (memory_read_at(fd, block, sizeof *block, at) < 0) return memory_fail(why, errno, "read %s", name);
  if (memcmp(block->magic, MAGIC, sizeof MAGIC) != 0) return memory_fail(why, 0, "%s.magic: not a layer", name);
  uint32_t mask = FLAG_HEADER | FLAG_DATA | (flags & FLAG_SEALED);
  if ((block->flags & mask) != flags) return memory_fail(why, 0, "%s.flags: 0x%x is unexpected", name, block->flags);
  if (block->version != 1) return memory_fail(why, 0, "%s.version: %u is unknown", name, block->version);
  return 0;
}

static int check_segment(const struct memory_segment *s, uint64_t number, uint64_t after, uint64_t sectors,
                         uint64_t data_end, struct memory_failure *why) {
  unsigned long long n = number;
  if (s->length == 0 || s->length % PAGE_SECTORS || s->offset % PAGE_SECTORS)
    return memory_fail(why, 0, "index[%llu]: not made of whole pages", n);
  if (s->offset < after) return memory_fail(why, 0, "index[%llu].offset: overlaps or is out of order", n);
  if (s->offset + s->length > sectors) return memory_fail(why, 0, "index[%llu].offset: beyond the memory", n);
  uint64_t mapped_end = s->mapped + (s->zero ? 0 : s->length);
  if (s->mapped < BLOCK_BYTES / SECTOR_BYTES || mapped_end > data_end)
    return memory_fail(why, 0, "index[%llu].moffset: outside the data", n);
  return 0;
}

static int take_entries(const struct entry *entries, uint64_t count, uint64_t virtual_size, uint64_t data_end,
                        struct memory_segments *out, struct memory_failure *why) {
  uint64_t after = 0;
  for (uint64_t i = 0; i < count; i++) {
    const struct entry *e = &entries[i];
    if (e->offset == INVALID_OFFSET && e->length == 0) continue;
    /* Out of the bit fields before any arithmetic: sums of 50-bit fields wrap at 50 bits. */
    struct memory_segment s = {.offset = e->offset, .mapped = e->mapped, .length = e->length, .zero = e->zero};
    if (check_segment(&s, i, after, virtual_size / SECTOR_BYTES, data_end, why) < 0) return -1;
    after = s.offset + s.length;
    if (memory_segments_add(out, s) < 0) return memory_fail(why, ENOMEM, "index");
  }
  return 0;
}

int memory_layer_read(int fd, uint64_t virtual_size, struct memory_segments *out, struct memory_failure *why) {
  struct stat status;
  struct block header, trailer;
  if (fstat(fd, &status) < 0) return memory_fail(why, errno, "stat layer");
  uint64_t size = (uint64_t)status.st_size;
  if (size < 2 * BLOCK_BYTES) return memory_fail(why, 0, "size: %llu bytes is too short", (unsigned long long)size);
  if (read_block(fd, 0, "header", FLAG_HEADER | FLAG_DATA, &header, why) < 0) return -1;
  if (read_block(fd, size - BLOCK_BYTES, "trailer", FLAG_DATA | FLAG_SEALED, &trailer, why) < 0) return -1;
  if (trailer.virtual_size != virtual_size)
    return memory_fail(why, 0, "trailer.virtual_size: %llu, the memory has %llu bytes",
                       (unsigned long long)trailer.virtual_size, (unsigned long long)virtual_size);
  uint64_t at = trailer.index_offset, count = trailer.index_size, end = size - BLOCK_BYTES;
  if (count > INDEX_LIMIT) return memory_fail(why, 0, "trailer.index_size: %llu is too many", (unsigned long long)count);
  if (at < BLOCK_BYTES || at % SECTOR_BYTES || at > end || end - at < count * sizeof(struct entry))
    return memory_fail(why, 0, "trailer.index_offset: the index is not inside the file");
  struct entry *entries = malloc(count ? count * sizeof *entries : 1);
  if (!entries) return memory_fail(why, ENOMEM, "index");
  int result = memory_read_at(fd, entries, count * sizeof *entries, at);
  if (result < 0)
    memory_fail(why, errno, "read index");
  else
    result = take_entries(entries, count, virtual_size, at / SECTOR_BYTES, out, why);
  free(entries);
  return result;
}
