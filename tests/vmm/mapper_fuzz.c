/* Random requests, mostly nearly right, against a model of the memory: `mapper_fuzz ROUNDS` prints how many changed it
 * and how many were refused, and aborts when memory is not what the model says or a descriptor is left. */
#define _GNU_SOURCE
#include "request.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGES 32
#define FILES 3
#define PAGE 4096

static unsigned long state = 88172645463325252ul;
static char model[PAGES + 2][PAGE], content[FILES][PAGES][PAGE];
static char *memory; /* a page before and behind belong to others */
static int files[FILES];
static int sent[FILES]; /* which of them went with the last request */

static unsigned long number(unsigned long below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

/* The kernel's limit of mappings, now and then. */
void *__real_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
  if (number(100) && (flags & MAP_FIXED || number(10)))
    return __real_mmap(address, length, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

static uint64_t odd(uint64_t right) {
  static const uint64_t wrong[] = {0, 1, 4095, 4097, PAGE, 1ull << 31, 1ull << 32, 1ull << 62, ~0ull, ~0ull << 12};
  return number(40) ? right : wrong[number(sizeof wrong / sizeof *wrong)];
}

static int open_files(void) {
  int n = 0;
  DIR *folder = opendir("/proc/self/fd");
  while (readdir(folder)) n++;
  closedir(folder);
  return n;
}

static int memory_file(const void *bytes, size_t length, int flags) {
  char path[32];
  int fd = memfd_create("fuzz", 0);
  if (write(fd, bytes, length) != (ssize_t)length) abort();
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int again = open(path, flags);
  close(fd);
  return again;
}

static size_t make_extents(struct mapper_extent *e) {
  size_t count = number(12);
  uint64_t at = number(4);
  for (size_t i = 0; i < count; i++) {
    uint64_t pages = 1 + number(3);
    e[i] = (struct mapper_extent){.guest_offset = odd(at * PAGE), .length = odd(pages * PAGE),
                                  .file = odd(number(FILES)), .reserved = number(100) == 0,
                                  .file_offset = odd(number(PAGES - 3) * PAGE)};
    at += pages + number(3);
  }
  return count;
}

static void apply(const struct mapper_extent *e, size_t count) {
  for (size_t i = 0; i < count; i++)
    memcpy(model[1 + e[i].guest_offset / PAGE], content[sent[e[i].file]][e[i].file_offset / PAGE], e[i].length);
}

static struct mapper_answer send_request(struct mapper *m, int kind, const void *table, size_t bytes, size_t count) {
  int fds[1 + FILES], n = 0, has_table = kind == MAPPER_MAP || kind == MAPPER_POPULATE;
  struct mapper_request r = {.magic = odd(MAPPER_MAGIC), .version = odd(1), .kind = odd(kind), .count = odd(count)};
  if (has_table) fds[n++] = memory_file(table, bytes, number(50) ? O_RDONLY : O_RDWR);
  for (int i = 0; (kind == MAPPER_MAP || kind == MAPPER_OPEN) && i < FILES; i++) {
    if (!number(60)) continue;
    sent[n - has_table] = i;
    fds[n++] = number(60) ? dup(files[i]) : memory_file(content, sizeof content, O_RDWR);
  }
  r.files = odd(n - has_table);
  if (kind == MAPPER_RAM || number(100) == 0) {
    r.address = odd((uintptr_t)memory + PAGE);
    r.length = odd(PAGES * PAGE);
  }
  return mapper_handle(m, &r, number(60) ? sizeof r : number(sizeof r), fds, n);
}

static int one(struct mapper *m, int round) {
  struct mapper_extent extents[12] = {0};
  struct mapper_range ranges[12] = {0};
  size_t count = make_extents(extents);
  for (size_t i = 0; i < count; i++)
    ranges[i] = (struct mapper_range){extents[i].guest_offset, extents[i].length};
  int kind = round % 5 ? MAPPER_MAP : 1 + (int)number(4);
  int populate = kind == MAPPER_POPULATE, table = kind == MAPPER_MAP || populate;
  struct mapper_answer a = send_request(m, kind, populate ? (void *)ranges : extents,
                                        populate ? sizeof ranges : sizeof extents, table ? count : 0);
  mapper_forget(m);
  if (kind == MAPPER_MAP) apply(extents, a.done);
  if (a.error && a.done && a.step != STEP_MMAP) abort(); /* a bad request must change nothing */
  if (a.step == STEP_MMAP && (a.error != ENOMEM || a.index != a.done)) abort();
  if (memcmp(model, memory, sizeof model)) abort();
  return a.error ? -1 : a.done > 0 && kind == MAPPER_MAP;
}

int main(int argc, char **argv) {
  long rounds = argc > 1 ? atol(argv[1]) : 1000, changed = 0, refused = 0;
  struct mapper *m = calloc(1, sizeof *m);
  m->page = PAGE;
  for (size_t i = 0; i < sizeof content; i++) ((char *)content)[i] = (char)number(256);
  for (int i = 0; i < FILES; i++) files[i] = memory_file(content[i], sizeof content[i], O_RDONLY);
  memory = __real_mmap(NULL, sizeof model, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memset(model[0], 1, PAGE);
  memset(model[PAGES + 1], 2, PAGE);
  memcpy(memory, model, sizeof model);
  struct mapper_request ram = {.magic = MAPPER_MAGIC, .version = MAPPER_VERSION, .kind = MAPPER_RAM,
                               .address = (uintptr_t)memory + PAGE, .length = PAGES * PAGE};
  if (mapper_handle(m, &ram, sizeof ram, NULL, 0).error) abort();
  int before = open_files();
  for (long round = 0; round < rounds; round++) {
    int result = one(m, (int)round);
    changed += result > 0;
    refused += result < 0;
    if (open_files() != before) abort();
  }
  printf("%ld %ld\n", changed, refused);
  for (int i = 0; i < FILES; i++) close(files[i]);
  munmap(memory, sizeof model);
  free(m);
  return 0;
}
