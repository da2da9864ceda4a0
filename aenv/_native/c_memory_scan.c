/* Which pages of a MAP_PRIVATE file mapping has the process written? A page that is there and no longer belongs to the
 * file, or that is swapped out (pages of the file are dropped, never swapped). And which are mapped at all?
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
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

#ifndef PART_BYTES /* tests make it small */
#define PART_BYTES (64ull << 20)
#endif

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

struct job {
  int pagemap, use_ioctl;
  enum memory_wanted wanted;
  struct memory_region *parts;
  struct memory_pieces *found; /* of each part */
  size_t count;
  _Atomic size_t next;
  _Atomic int failed;
  pthread_mutex_t lock;
  struct memory_failure why;
};

static void report(struct job *job, const struct memory_failure *why) {
  pthread_mutex_lock(&job->lock);
  if (!job->failed) job->why = *why;
  job->failed = 1;
  pthread_mutex_unlock(&job->lock);
}

static void *work(void *argument) {
  struct job *job = argument;
  struct memory_failure why;
  size_t at;
  while (!job->failed && (at = atomic_fetch_add(&job->next, 1)) < job->count) {
    int result = job->use_ioctl ? scan_by_ioctl(job->pagemap, &job->parts[at], job->wanted, &job->found[at], &why) : 1;
    if (result == 1) result = scan_by_read(job->pagemap, &job->parts[at], job->wanted, &job->found[at], &why);
    if (result < 0) report(job, &why);
  }
  return NULL;
}

/* Regions in parts of at most PART_BYTES, so that threads can share them. */
static int divide(struct job *job, const struct memory_region *regions, int count) {
  for (int i = 0; i < count; i++) job->count += (regions[i].length + PART_BYTES - 1) / PART_BYTES;
  job->parts = calloc(job->count, sizeof *job->parts);
  job->found = calloc(job->count, sizeof *job->found);
  if (!job->parts || !job->found) return -1;
  for (size_t i = 0, part = 0; i < (size_t)count; i++)
    for (uint64_t at = 0; at < regions[i].length; at += PART_BYTES) {
      uint64_t left = regions[i].length - at;
      job->parts[part++] = (struct memory_region){regions[i].address + at, regions[i].guest_offset + at,
                                                  left < PART_BYTES ? left : PART_BYTES};
    }
  return 0;
}

static int concatenate(const struct job *job, struct memory_pieces *out) {
  size_t total = 0;
  for (size_t i = 0; i < job->count; i++) total += job->found[i].count;
  if (total == 0) return 0;
  out->items = malloc(total * sizeof *out->items);
  if (!out->items) return -1;
  out->capacity = total;
  for (size_t i = 0; i < job->count; out->count += job->found[i++].count)
    if (job->found[i].count)
      memcpy(out->items + out->count, job->found[i].items, job->found[i].count * sizeof *out->items);
  return 0;
}

static int scan(struct job *job, const struct memory_region *regions, int count, int threads,
                struct memory_pieces *out, struct memory_failure *why) {
  pthread_t handles[MAX_THREADS];
  int started = 1;
  if (divide(job, regions, count) < 0) return memory_fail(why, ENOMEM, "list of dirty pages");
  while (started < threads && (size_t)started < job->count &&
         pthread_create(&handles[started], NULL, work, job) == 0)
    started++;
  work(job);
  for (int i = 1; i < started; i++) pthread_join(handles[i], NULL);
  if (job->failed) {
    *why = job->why;
    return -1;
  }
  return concatenate(job, out) < 0 ? memory_fail(why, ENOMEM, "list of dirty pages") : 0;
}

int memory_scan(pid_t pid, const struct memory_region *regions, int count, enum memory_wanted wanted, int threads,
                int use_ioctl, struct memory_pieces *out, struct memory_failure *why) {
  char path[40];
  *out = (struct memory_pieces){0};
  snprintf(path, sizeof path, "/proc/%d/pagemap", (int)pid);
  struct job job = {.use_ioctl = use_ioctl, .wanted = wanted, .lock = PTHREAD_MUTEX_INITIALIZER};
  job.pagemap = open(path, O_RDONLY | O_CLOEXEC);
  if (job.pagemap < 0) return memory_fail(why, errno, "open %s", path);
  int result = scan(&job, regions, count, threads, out, why);
  close(job.pagemap);
  for (size_t i = 0; job.found && i < job.count; i++) free(job.found[i].items);
  free(job.found);
  free(job.parts);
  return result;
}
