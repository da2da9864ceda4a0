/* Parts of a file that are not in the page cache: have them read, without waiting. */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* The kernel reads no more ahead for one call than its window (128 KiB unless somebody has changed it). */
#define WINDOW (128u << 10)

static void advise(int fd, uint64_t offset, uint64_t length) {
  for (uint64_t at = 0; at < length; at += WINDOW)
    (void)posix_fadvise(fd, (off_t)(offset + at), (off_t)(length - at < WINDOW ? length - at : WINDOW),
                        POSIX_FADV_WILLNEED); /* a hint: what it does not bring in is read when it is needed */
}

static uint64_t advise_cold(int fd, uint64_t offset, const unsigned char *there, uint64_t pages) {
  uint64_t cold = 0;
  for (uint64_t i = 0; i < pages;) {
    uint64_t first = i;
    while (i < pages && !(there[i] & 1)) i++;
    if (i > first) advise(fd, offset + first * PAGE_BYTES, (i - first) * PAGE_BYTES);
    cold += i - first;
    while (i < pages && there[i] & 1) i++;
  }
  return cold * PAGE_BYTES;
}

int memory_prefetch(int fd, uint64_t offset, uint64_t length, uint64_t *cold, struct memory_failure *why) {
  struct stat status;
  *cold = 0;
  if (fstat(fd, &status) < 0) return memory_fail(why, errno, "stat file");
  if (length == 0 || offset % PAGE_BYTES || length % PAGE_BYTES || offset > (uint64_t)status.st_size ||
      length > (uint64_t)status.st_size - offset)
    return memory_fail(why, EINVAL, "prefetch: not pages of the file");
  /* Only mincore() looks at the mapping: it is not read. */
  void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, (off_t)offset);
  if (map == MAP_FAILED) return memory_fail(why, errno, "map file");
  unsigned char *there = malloc(length / PAGE_BYTES);
  int result = 0;
  if (!there)
    result = memory_fail(why, ENOMEM, "list of pages");
  else if (mincore(map, length, there) < 0)
    result = memory_fail(why, errno, "mincore");
  else
    *cold = advise_cold(fd, offset, there, length / PAGE_BYTES);
  free(there);
  munmap(map, length);
  return result;
}
