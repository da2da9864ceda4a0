/* Writing an LSMT layer (overlaybd) whose data is in no order: header 4096 | data | index | trailer 4096, all numbers
 * little-endian (this code runs on little-endian machines only). c_lsmt_layer.c reads it.
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static int is_sorted(const struct memory_segments *list) {
  for (size_t i = 1; i < list->count; i++)
    if (list->items[i - 1].offset > list->items[i].offset) return 0;
  return 1;
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
  if (!is_sorted(list)) qsort(list->items, list->count, sizeof *list->items, by_offset);
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
