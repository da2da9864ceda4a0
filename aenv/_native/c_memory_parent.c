/* What guest RAM held when it was last the same as files: read as far as that costs no I/O.
 *
 * The guest is stopped while this runs, so a page that is not in the page cache stays unknown and is stored again. That
 * is rare: the guest took its private copy from the very page cache.
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
  LOCAL,  /* reads with RWF_NOWAIT */
  SERVED, /* a FUSE file: it can be asked with mincore() what is there */
  ZEROS,  /* one hole */
};

struct memory_parent_file {
  int fd;
  enum kind kind;
  uint64_t size;
  void *map; /* of a served file; only mincore() looks at it, for a read could end in SIGBUS */
};

static int open_file(struct memory_parent_file *file, int fd, int number, struct memory_failure *why) {
  struct stat status;
  char byte;
  struct iovec vector = {&byte, 1};
  *file = (struct memory_parent_file){.fd = fd, .map = MAP_FAILED};
  if (fstat(fd, &status) < 0) return memory_fail(why, errno, "stat parent file %d", number);
  file->size = (uint64_t)status.st_size;
  if (lseek(fd, 0, SEEK_DATA) < 0 && errno == ENXIO) {
    file->kind = ZEROS;
    return 0;
  }
  /* A read that does not wait starts one in the background: of no more than it asks for. */
  (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  if (preadv2(fd, &vector, 1, 0, RWF_NOWAIT) >= 0 || errno == EAGAIN) return 0;
  file->kind = SERVED;
  file->map = mmap(NULL, file->size, PROT_READ, MAP_SHARED, fd, 0);
  if (file->map == MAP_FAILED) return memory_fail(why, errno, "map parent file %d", number);
  return 0;
}

static int check_extents(const struct memory_parent *parent, uint64_t virtual_size, struct memory_failure *why) {
  uint64_t done = 0;
  for (size_t i = 0; i < parent->count; i++) {
    const struct memory_extent *e = &parent->extents[i];
    unsigned long long number = i;
    if (e->guest_offset % PAGE_BYTES || e->length % PAGE_BYTES || e->file_offset % PAGE_BYTES || e->length == 0)
      return memory_fail(why, 0, "parent extent %llu: not made of whole pages", number);
    if (e->guest_offset < done) return memory_fail(why, 0, "parent extent %llu: overlaps or is out of order", number);
    if (e->guest_offset > virtual_size || e->length > virtual_size - e->guest_offset)
      return memory_fail(why, 0, "parent extent %llu: beyond the memory", number);
    if (e->file >= (uint32_t)parent->file_count) return memory_fail(why, 0, "parent extent %llu: no such file", number);
    uint64_t size = parent->files[e->file].size;
    if (e->file_offset > size || e->length > size - e->file_offset)
      return memory_fail(why, 0, "parent extent %llu: beyond the end of its file", number);
    done = e->guest_offset + e->length;
  }
  return 0;
}

int memory_parent_open(struct memory_parent *parent, const int *fds, int files, const struct memory_extent *extents,
                       size_t count, uint64_t virtual_size, struct memory_failure *why) {
  *parent = (struct memory_parent){.extents = extents, .count = count};
  parent->files = calloc((size_t)files + 1, sizeof *parent->files);
  if (!parent->files) return memory_fail(why, ENOMEM, "parent files");
  for (int i = 0; i < files; i++) {
    parent->file_count = i + 1;
    if (open_file(&parent->files[i], fds[i], i, why) < 0) return -1;
  }
  return check_extents(parent, virtual_size, why);
}

void memory_parent_close(struct memory_parent *parent) {
  for (int i = 0; i < parent->file_count; i++)
    if (parent->files[i].map != MAP_FAILED) munmap(parent->files[i].map, parent->files[i].size);
  free(parent->files);
}

static size_t find(const struct memory_parent *parent, uint64_t offset) {
  size_t low = 0, high = parent->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (parent->extents[middle].guest_offset + parent->extents[middle].length <= offset)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* How many of `pages` pages were read. A page that is all hole need not be in the page cache to be known. */
static int read_local(const struct memory_parent_file *file, uint64_t offset, int pages, int guest_is_zero, char *buffer,
                      uint8_t *known) {
  struct iovec vector = {buffer, (size_t)pages * PAGE_BYTES};
  ssize_t n = preadv2(file->fd, &vector, 1, (off_t)offset, RWF_NOWAIT);
  int got = n > 0 ? (int)(n / PAGE_BYTES) : 0;
  memset(known, PARENT_DATA, (size_t)got);
  if (got > 0 || !guest_is_zero) return got;
  off_t data = lseek(file->fd, (off_t)offset, SEEK_DATA);
  if (data < 0 ? errno != ENXIO : (uint64_t)data < offset + PAGE_BYTES) return 0;
  *known = PARENT_ZERO;
  return 1;
}

static int read_served(const struct memory_parent_file *file, uint64_t offset, char *buffer, uint8_t *known) {
  unsigned char there = 0;
  if (mincore((char *)file->map + offset, PAGE_BYTES, &there) < 0 || !(there & 1)) return 0;
  if (pread(file->fd, buffer, PAGE_BYTES, (off_t)offset) != PAGE_BYTES) return 0;
  *known = PARENT_DATA;
  return 1;
}

/* Pages from `first` on that follow each other and lie in one extent. */
static int run_length(const struct memory_extent *extent, const uint32_t *numbers, int first, int pages) {
  uint64_t end = (extent->guest_offset + extent->length) / PAGE_BYTES;
  int run = 1;
  while (first + run < pages && numbers[first + run] == numbers[first] + (uint32_t)run && numbers[first + run] < end)
    run++;
  return run;
}

void memory_parent_read(const struct memory_parent *parent, const uint32_t *numbers, const uint8_t *zero, int pages,
                        char *buffer, uint8_t *known) {
  size_t at = 0;
  memset(known, PARENT_UNKNOWN, (size_t)pages);
  for (int i = 0; i < pages;) {
    uint64_t offset = (uint64_t)numbers[i] * PAGE_BYTES;
    if (i == 0 || numbers[i] < numbers[i - 1]) at = find(parent, offset);
    while (at < parent->count && parent->extents[at].guest_offset + parent->extents[at].length <= offset) at++;
    const struct memory_extent *extent = &parent->extents[at];
    if (at == parent->count || extent->guest_offset > offset) {
      known[i++] = PARENT_ZERO;
      continue;
    }
    const struct memory_parent_file *file = &parent->files[extent->file];
    uint64_t place = extent->file_offset + (offset - extent->guest_offset);
    char *to = buffer + (size_t)i * PAGE_BYTES;
    int done = 0;
    if (file->kind == ZEROS)
      known[i] = PARENT_ZERO, done = 1;
    else if (file->kind == LOCAL)
      done = read_local(file, place, run_length(extent, numbers, i, pages), zero[i], to, &known[i]);
    else if (zero[i]) /* of others it would cost more time than it saves space */
      done = read_served(file, place, to, &known[i]);
    i += done ? done : 1;
  }
}
