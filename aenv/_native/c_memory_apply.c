/* A layer into the memory of a prepared VMM, and layers into a raw image file. */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define BATCH_BYTES (BATCH_PAGES * PAGE_BYTES)

/* A run of pages inside one region and one segment. */
struct part {
  uint64_t address, mapped; /* mapped: byte in the layer; 0 for zeros */
  uint32_t length;          /* at most BATCH_BYTES */
};

struct parts {
  struct part *items;
  size_t count, capacity;
};

struct job {
  int layer_fd;
  pid_t pid;
  struct parts parts;
  _Atomic size_t next;
  _Atomic int failed;
  pthread_mutex_t lock;
  struct memory_failure why;
};

static int add_part(struct parts *list, struct part part) {
  if (list->count == list->capacity) {
    size_t capacity = list->capacity ? list->capacity * 2 : 1024;
    struct part *items = realloc(list->items, capacity * sizeof *items);
    if (!items) return -1;
    list->items = items;
    list->capacity = capacity;
  }
  list->items[list->count++] = part;
  return 0;
}

static const struct memory_region *region_at(const struct memory_region *regions, int count, uint64_t offset) {
  for (int i = 0; i < count; i++)
    if (offset >= regions[i].guest_offset && offset - regions[i].guest_offset < regions[i].length) return &regions[i];
  return NULL;
}

/* All addresses are found before the first page is written: a layer that does not fit changes nothing. */
static int plan(const struct memory_segments *segments, const struct memory_region *regions, int count,
                struct parts *out, struct memory_failure *why) {
  for (size_t i = 0; i < segments->count; i++) {
    const struct memory_segment *s = &segments->items[i];
    uint64_t offset = s->offset * SECTOR_BYTES, end = offset + (uint64_t)s->length * SECTOR_BYTES;
    uint64_t mapped = s->zero ? 0 : s->mapped * SECTOR_BYTES;
    while (offset < end) {
      const struct memory_region *r = region_at(regions, count, offset);
      if (!r) return memory_fail(why, 0, "index: offset %llu is in no memory region", (unsigned long long)offset);
      uint64_t inside = offset - r->guest_offset, length = end - offset;
      if (length > r->length - inside) length = r->length - inside;
      if (length > BATCH_BYTES) length = BATCH_BYTES;
      if (add_part(out, (struct part){r->address + inside, mapped, (uint32_t)length}) < 0)
        return memory_fail(why, ENOMEM, "list of pages");
      offset += length;
      if (mapped) mapped += length;
    }
  }
  return 0;
}

static int apply_part(struct job *job, const struct part *p, char *buffer, const char *zeros,
                      struct memory_failure *why) {
  if (p->mapped && memory_read_at(job->layer_fd, buffer, p->length, p->mapped) < 0)
    return memory_fail(why, errno, "read layer");
  struct iovec local = {p->mapped ? buffer : (char *)zeros, p->length};
  struct iovec remote = {(void *)(uintptr_t)p->address, p->length};
  ssize_t n = process_vm_writev(job->pid, &local, 1, &remote, 1, 0);
  if (n < 0) return memory_fail(why, errno, "process_vm_writev");
  if (n != (ssize_t)p->length) return memory_fail(why, EFAULT, "process_vm_writev: the mapping has changed");
  return 0;
}

static void report(struct job *job, const struct memory_failure *why) {
  pthread_mutex_lock(&job->lock);
  if (!job->failed) job->why = *why;
  job->failed = 1;
  pthread_mutex_unlock(&job->lock);
}

static void *work(void *argument) {
  struct job *job = argument;
  struct memory_failure why;
  char *buffer = mmap(NULL, 2 * BATCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) {
    memory_fail(&why, errno, "batch");
    report(job, &why);
    return NULL;
  }
  size_t at;
  while (!job->failed && (at = atomic_fetch_add(&job->next, 1)) < job->parts.count)
    if (apply_part(job, &job->parts.items[at], buffer, buffer + BATCH_BYTES, &why) < 0) report(job, &why);
  munmap(buffer, 2 * BATCH_BYTES);
  return NULL;
}

static void run_workers(struct job *job, int threads) {
  pthread_t handles[MAX_THREADS];
  int started = 1;
  while (started < threads && pthread_create(&handles[started], NULL, work, job) == 0) started++;
  work(job);
  for (int i = 1; i < started; i++) pthread_join(handles[i], NULL);
}

int memory_apply(int layer_fd, pid_t pid, const struct memory_region *regions, int count, uint64_t virtual_size,
                 int threads, uint64_t *pages, struct memory_failure *why) {
  struct memory_segments segments = {0};
  struct job job = {.layer_fd = layer_fd, .pid = pid, .lock = PTHREAD_MUTEX_INITIALIZER};
  int result = memory_layer_read(layer_fd, virtual_size, &segments, why);
  if (result == 0) result = plan(&segments, regions, count, &job.parts, why);
  if (result == 0) {
    run_workers(&job, threads);
    if (job.failed) {
      *why = job.why;
      result = -1;
    }
  }
  *pages = 0;
  for (size_t i = 0; i < job.parts.count; i++) *pages += job.parts.items[i].length / PAGE_BYTES;
  free(job.parts.items);
  free(segments.items);
  return result;
}

/* Writes what is not zero, so that zeros stay holes. */
static int write_sparse(int fd, const char *data, size_t length, uint64_t offset) {
  for (size_t at = 0; at < length;) {
    size_t end = at;
    while (end < length && !memory_is_zero(data + end)) end += PAGE_BYTES;
    if (end > at && memory_write_at(fd, data + at, end - at, offset + at) < 0) return -1;
    at = end;
    while (at < length && memory_is_zero(data + at)) at += PAGE_BYTES;
  }
  return 0;
}

static int copy_range(int from, int to, uint64_t start, uint64_t end, char *buffer, struct memory_failure *why) {
  while (start < end) {
    size_t length = end - start < BATCH_BYTES ? (size_t)(end - start) : BATCH_BYTES;
    if (memory_read_at(from, buffer, length, start) < 0) return memory_fail(why, errno, "read the parent image");
    if (write_sparse(to, buffer, length, start) < 0) return memory_fail(why, errno, "write image");
    start += length;
  }
  return 0;
}

static int copy_parent(int parent_fd, int out_fd, uint64_t size, char *buffer, struct memory_failure *why) {
  for (uint64_t at = 0; at < size;) {
    off_t data = lseek(parent_fd, (off_t)at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return 0;
    off_t hole = data < 0 ? -1 : lseek(parent_fd, data, SEEK_HOLE);
    if (hole < 0) return memory_fail(why, errno, "seek in the parent image");
    uint64_t start = (uint64_t)data / PAGE_BYTES * PAGE_BYTES;
    uint64_t end = ((uint64_t)hole + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (end > size) end = size;
    if (copy_range(parent_fd, out_fd, start, end, buffer, why) < 0) return -1;
    at = end;
  }
  return 0;
}

static int punch(int fd, uint64_t offset, uint64_t length, struct memory_failure *why) {
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)length) < 0)
    return memory_fail(why, errno, "punch a hole into the image");
  return 0;
}

static int copy_layer(int layer_fd, int out_fd, uint64_t size, char *buffer, struct memory_failure *why) {
  struct memory_segments segments = {0};
  int result = memory_layer_read(layer_fd, size, &segments, why);
  for (size_t i = 0; i < segments.count && result == 0; i++) {
    const struct memory_segment *s = &segments.items[i];
    uint64_t offset = s->offset * SECTOR_BYTES, left = (uint64_t)s->length * SECTOR_BYTES;
    if (s->zero) {
      result = punch(out_fd, offset, left, why);
      continue;
    }
    for (uint64_t mapped = s->mapped * SECTOR_BYTES; left > 0 && result == 0;) {
      size_t length = left < BATCH_BYTES ? (size_t)left : BATCH_BYTES;
      if (memory_read_at(layer_fd, buffer, length, mapped) < 0)
        result = memory_fail(why, errno, "read layer");
      else if (memory_write_at(out_fd, buffer, length, offset) < 0)
        result = memory_fail(why, errno, "write image");
      mapped += length, offset += length, left -= length;
    }
  }
  free(segments.items);
  return result;
}

int memory_write_image(const int *layer_fds, int layers, int parent_fd, int out_fd, uint64_t virtual_size,
                       struct memory_failure *why) {
  struct stat status;
  if (parent_fd >= 0 && (fstat(parent_fd, &status) < 0 || (uint64_t)status.st_size != virtual_size))
    return memory_fail(why, 0, "parent image: it does not have %llu bytes", (unsigned long long)virtual_size);
  if (ftruncate(out_fd, 0) < 0 || ftruncate(out_fd, (off_t)virtual_size) < 0)
    return memory_fail(why, errno, "set the size of the image");
  char *buffer = mmap(NULL, BATCH_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) return memory_fail(why, errno, "batch");
  int result = parent_fd < 0 ? 0 : copy_parent(parent_fd, out_fd, virtual_size, buffer, why);
  for (int i = 0; i < layers && result == 0; i++)
    result = copy_layer(layer_fds[i], out_fd, virtual_size, buffer, why);
  munmap(buffer, BATCH_BYTES);
  return result;
}
