// Runs in a guest: makes memory or disk dirty.
//   writer memory PATH MIB SEED   PATH (in a tmpfs) gets MIB of random bytes, each page different
//   writer disk PATH MIB SEED     the same past the page cache, and then durable
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CHUNK = 1 << 20 };

static uint64_t next(uint64_t *state) {  // xorshift64
  uint64_t x = *state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return *state = x;
}

static void fill(uint64_t *words, uint64_t *state) {
  for (size_t i = 0; i < CHUNK / sizeof *words; i++)
    words[i] = next(state);
}

static int write_memory(int fd, size_t chunks, uint64_t *state) {
  if (ftruncate(fd, (off_t)(chunks * CHUNK)) || !chunks)
    return -1;
  char *at = mmap(NULL, chunks * CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED)
    return -1;
  for (size_t i = 0; i < chunks; i++)
    fill((uint64_t *)(at + i * CHUNK), state);
  return 0;
}

static int write_disk(int fd, size_t chunks, uint64_t *state) {
  uint64_t *buffer = aligned_alloc(4096, CHUNK);
  if (!buffer)
    return -1;
  fill(buffer, state);
  for (size_t i = 0; i < chunks; i++) {
    for (size_t page = 0; page < CHUNK; page += 4096)
      buffer[page / sizeof *buffer] = next(state);
    if (write(fd, buffer, CHUNK) != CHUNK)
      return -1;
  }
  return fdatasync(fd);
}

int main(int argc, char **argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: %s memory|disk PATH MIB SEED\n", argv[0]);
    return 2;
  }
  int disk = !strcmp(argv[1], "disk");
  uint64_t state = strtoull(argv[4], NULL, 10) * 2654435761u + 88172645463325252u;
  int fd = open(argv[2], O_RDWR | O_CREAT | (disk ? O_DIRECT : 0), 0600);
  if (fd < 0 || (disk ? write_disk : write_memory)(fd, strtoul(argv[3], NULL, 10), &state)) {
    perror(argv[2]);
    return 1;
  }
  return 0;
}
