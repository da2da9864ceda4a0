/* Which pages of a MAP_PRIVATE file mapping has the process written? A page that is there and no longer belongs to the
 * file, or that is swapped out (pages of the file are dropped, never swapped). And which are mapped at all?
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* linux/fs.h of Linux 6.7; the build host's headers may be older. */
struct scan_region {
  uint64_t start, end, categories;
};
struct scan_argument {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define SCAN_IOCTL _IOWR('f', 16, struct scan_argument)
#define CATEGORY_FILE (1u << 2)
#define CATEGORY_PRESENT (1u << 3)
#define CATEGORY_SWAPPED (1u << 4)
/* The kernel collects this many regions (PAGEMAP_WALK_SIZE >> PAGE_SHIFT) before it copies them out. */
#define SCAN_REGIONS 512

#define ENTRY_PRESENT (1ull << 63)
#define ENTRY_SWAPPED (1ull << 62)
#define ENTRY_FILE (1ull << 61)
#define ENTRIES 8192

int memory_fail(struct memory_failure *why, int error, const char *format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(why->text, sizeof why->text, format, list);
  va_end(list);
  why->error = error;
  return -1;
}

int memory_is_zero(const void *page) {
  static const char zeros[PAGE_BYTES];
  return memcmp(page, zeros, PAGE_BYTES) == 0;
}

/* The whole length or an error; the end of the file is EIO: somebody has cut it. */
int memory_read_at(int fd, void *buffer, size_t length, uint64_t offset) {
  for (size_t done = 0; done < length;) {
    ssize_t n = pread(fd, (char *)buffer + done, length - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) return -1;
    done += (size_t)n;
  }
  return 0;
}

int memory_write_at(int fd, const void *buffer, size_t length, uint64_t offset) {
  for (size_t done = 0; done < length;) {
    ssize_t n = pwrite(fd, (const char *)buffer + done, length - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) return -1;
    done += (size_t)n;
  }
  return 0;
}

static int add_run(struct memory_pieces *out, uint64_t address, uint64_t page, uint64_t count) {
  while (count > 0) {
    if (out->count == out->capacity) {
      size_t capacity = out->capacity ? out->capacity * 2 : 1024;
      struct memory_piece *items = realloc(out->items, capacity * sizeof *items);
      if (!items) return -1;
      out->items = items;
      out->capacity = capacity;
    }
    uint32_t part = count < BATCH_PAGES ? (uint32_t)count : BATCH_PAGES;
    out->items[out->count++] = (struct memory_piece){.address = address, .page = (uint32_t)page, .count = part};
    address += (uint64_t)part * PAGE_BYTES;
    page += part;
    count -= part;
  }
  return 0;
}

/* 1: the kernel has no such call. */
static int scan_by_ioctl(int pagemap, const struct memory_region *r, enum memory_wanted wanted,
                         struct memory_pieces *out, struct memory_failure *why) {
  struct scan_region found[SCAN_REGIONS];
  struct scan_argument argument = {
      .size = sizeof argument,
      .start = r->address,
      .end = r->address + r->length,
      .vec = (uint64_t)(uintptr_t)found,
      .vec_len = SCAN_REGIONS,
      .category_inverted = wanted == WANT_WRITTEN ? CATEGORY_FILE : 0,
      .category_mask = wanted == WANT_WRITTEN ? CATEGORY_FILE : 0,
      .category_anyof_mask = CATEGORY_PRESENT | CATEGORY_SWAPPED,
  };
  uint64_t seen = r->address; /* up to here */
  while (argument.start < argument.end) {
    int n = ioctl(pagemap, SCAN_IOCTL, &argument);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == ENOTTY || errno == EINVAL) && argument.start == r->address) return 1;
    if (n < 0) return memory_fail(why, errno, "PAGEMAP_SCAN");
    for (int i = 0; i < n; i++) {
      /* Linux 6.18 reports a region twice, or its beginning, when its own buffer is full in the middle of a call. */
      uint64_t start = found[i].start > seen ? found[i].start : seen;
      if (found[i].end <= start) continue;
      uint64_t page = (start - r->address + r->guest_offset) / PAGE_BYTES;
      if (add_run(out, start, page, (found[i].end - start) / PAGE_BYTES) < 0)
        return memory_fail(why, ENOMEM, "list of dirty pages");
      seen = found[i].end;
    }
    if (argument.walk_end <= argument.start) return memory_fail(why, EIO, "PAGEMAP_SCAN does not advance");
    argument.start = argument.walk_end;
  }
  return 0;
}

static int is_wanted(uint64_t bits, enum memory_wanted wanted) {
  if (bits & ENTRY_SWAPPED) return 1;
  return bits & ENTRY_PRESENT && (wanted == WANT_PRESENT || !(bits & ENTRY_FILE));
}

static int scan_by_read(int pagemap, const struct memory_region *r, enum memory_wanted wanted,
                        struct memory_pieces *out, struct memory_failure *why) {
  uint64_t entries[ENTRIES], pages = r->length / PAGE_BYTES, run = 0;
  uint64_t first = r->guest_offset / PAGE_BYTES;
  for (uint64_t at = 0; at < pages;) {
    uint64_t part = pages - at < ENTRIES ? pages - at : ENTRIES;
    if (memory_read_at(pagemap, entries, part * 8, (r->address / PAGE_BYTES + at) * 8) < 0)
      return memory_fail(why, errno, "read pagemap");
    for (uint64_t i = 0; i < part; i++, at++) {
      if (is_wanted(entries[i], wanted)) {
        run++;
        continue;
      }
      if (run && add_run(out, r->address + (at - run) * PAGE_BYTES, first + at - run, run) < 0)
        return memory_fail(why, ENOMEM, "list of dirty pages");
      run = 0;
    }
  }
  if (run && add_run(out, r->address + (pages - run) * PAGE_BYTES, first + pages - run, run) < 0)
    return memory_fail(why, ENOMEM, "list of dirty pages");
  return 0;
}

int memory_scan(pid_t pid, const struct memory_region *regions, int count, enum memory_wanted wanted, int use_ioctl,
                struct memory_pieces *out, struct memory_failure *why) {
  char path[40];
  snprintf(path, sizeof path, "/proc/%d/pagemap", (int)pid);
  int pagemap = open(path, O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) return memory_fail(why, errno, "open %s", path);
  int result = 0;
  for (int i = 0; i < count && result == 0; i++) {
    result = use_ioctl ? scan_by_ioctl(pagemap, &regions[i], wanted, out, why) : 1;
    if (result == 1) result = scan_by_read(pagemap, &regions[i], wanted, out, why);
  }
  close(pagemap);
  return result;
}
