/* Checks a request completely, then carries it out: a bad one changes nothing. */
#define _GNU_SOURCE
#include "request.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; the build host's headers may be older */
#endif

_Static_assert(sizeof(struct mapper_request) == 32 && sizeof(struct mapper_extent) == 32 &&
                   sizeof(struct mapper_range) == 16 && sizeof(struct mapper_answer) == 24,
               "as in aenv/vmm/mapper.py");

static int fail(struct mapper_answer *a, enum mapper_step step, int error, size_t index) {
  a->step = step;
  a->error = error ? error : EIO;
  a->index = (uint32_t)index;
  return -1;
}

static int whole_pages(const struct mapper *m, uint64_t number) { return number % m->page == 0; }

/* Sums are never formed: they could wrap. */
static int inside(uint64_t offset, uint64_t length, uint64_t size) { return offset <= size && length <= size - offset; }

static int check_header(const struct mapper_request *r, size_t length, size_t fd_count, struct mapper_answer *a) {
  if (length != sizeof *r) return fail(a, STEP_LENGTH, EINVAL, 0);
  if (r->magic != MAPPER_MAGIC) return fail(a, STEP_MAGIC, EINVAL, 0);
  if (r->version != MAPPER_VERSION) return fail(a, STEP_VERSION, EINVAL, 0);
  if (r->kind < MAPPER_RAM || r->kind > MAPPER_POPULATE) return fail(a, STEP_KIND, EINVAL, 0);
  int table = r->kind == MAPPER_MAP || r->kind == MAPPER_POPULATE;
  int takes_files = r->kind == MAPPER_MAP || r->kind == MAPPER_OPEN;
  if (table ? r->count > MAPPER_ENTRIES : r->count != 0) return fail(a, STEP_COUNT, EINVAL, 0);
  if (r->files > MAPPER_FDS || (r->files && !takes_files) || fd_count != r->files + (size_t)table)
    return fail(a, STEP_FILES, EINVAL, 0);
  if (r->kind != MAPPER_RAM && (r->address || r->length)) return fail(a, STEP_RAM, EINVAL, 0);
  return 0;
}

/* Where the loader of this process has put RAM: all of it must be mapped. */
static int learn_ram(struct mapper *m, const struct mapper_request *r, struct mapper_answer *a) {
  unsigned char resident;
  if (!r->length || !whole_pages(m, r->address) || !whole_pages(m, r->length) ||
      !inside(r->address, r->length, UINTPTR_MAX))
    return fail(a, STEP_RAM, EINVAL, 0);
  if (m->ram_length && (r->address != m->ram || r->length != m->ram_length)) return fail(a, STEP_RAM, EEXIST, 0);
  for (uint64_t at = r->address; at < r->address + r->length; at += m->page << 8) {
    if (mincore((void *)(uintptr_t)at, m->page, &resident) < 0) return fail(a, STEP_RAM, errno, 0);
  }
  m->ram = r->address;
  m->ram_length = r->length;
  return 0;
}

/* The file goes into the list even when it is refused: there it is closed with the others. */
static int take_file(struct mapper *m, int fd, struct mapper_answer *a) {
  struct stat status;
  size_t index = m->file_count;
  m->files[m->file_count++] = (struct mapper_file){.fd = fd};
  int mode = fcntl(fd, F_GETFL);
  if (mode < 0) return fail(a, STEP_FILE, errno, index);
  /* Nothing in this process shall be able to change an image that others map. */
  if ((mode & (O_ACCMODE | O_PATH)) != O_RDONLY) return fail(a, STEP_FILE, EACCES, index);
  if (fstat(fd, &status) < 0) return fail(a, STEP_FILE, errno, index);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) return fail(a, STEP_FILE, EINVAL, index);
  off_t size = lseek(fd, 0, SEEK_END); /* st_size of a block device is 0 */
  if (size < 0) return fail(a, STEP_FILE, errno, index);
  m->files[index].size = ((uint64_t)size + m->page - 1) / m->page * m->page;
  return 0;
}

static int check_span(const struct mapper *m, uint64_t offset, uint64_t length, uint64_t after, size_t index,
                      struct mapper_answer *a) {
  if (!whole_pages(m, offset) || offset < after || offset > m->ram_length)
    return fail(a, STEP_GUEST_OFFSET, EINVAL, index);
  if (!length || !whole_pages(m, length) || !inside(offset, length, m->ram_length))
    return fail(a, STEP_EXTENT_LENGTH, EINVAL, index);
  return 0;
}

static int check_extents(const struct mapper *m, const struct mapper_extent *e, size_t count,
                         struct mapper_answer *a) {
  uint64_t after = 0;
  for (size_t i = 0; i < count; i++) {
    if (check_span(m, e[i].guest_offset, e[i].length, after, i, a) < 0) return -1;
    if (e[i].file >= m->file_count) return fail(a, STEP_FILE_INDEX, EINVAL, i);
    if (e[i].reserved) return fail(a, STEP_RESERVED, EINVAL, i);
    /* A page behind the end of its file would end the process when the guest touches it. */
    if (!whole_pages(m, e[i].file_offset) || !inside(e[i].file_offset, e[i].length, m->files[e[i].file].size))
      return fail(a, STEP_FILE_OFFSET, EINVAL, i);
    after = e[i].guest_offset + e[i].length;
  }
  return 0;
}

static int map(struct mapper *m, const struct mapper_extent *e, size_t count, struct mapper_answer *a) {
  if (check_extents(m, e, count, a) < 0) return -1;
  for (size_t i = 0; i < count; i++) {
    void *at = (void *)(uintptr_t)(m->ram + e[i].guest_offset);
    if (mmap(at, e[i].length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, m->files[e[i].file].fd,
             (off_t)e[i].file_offset) == MAP_FAILED)
      return fail(a, STEP_MMAP, errno, i);
    a->done++;
  }
  return 0;
}

static int populate(struct mapper *m, const struct mapper_range *r, size_t count, struct mapper_answer *a) {
  uint64_t after = 0;
  for (size_t i = 0; i < count; i++) {
    if (check_span(m, r[i].guest_offset, r[i].length, after, i, a) < 0) return -1;
    after = r[i].guest_offset + r[i].length;
  }
  for (size_t i = 0; i < count; i++) {
    void *at = (void *)(uintptr_t)(m->ram + r[i].guest_offset);
    int result = madvise(at, r[i].length, MADV_POPULATE_READ);
    /* An older kernel does not know it: read ahead at least. */
    if (result < 0 && errno == EINVAL) result = madvise(at, r[i].length, MADV_WILLNEED);
    if (result < 0) return fail(a, STEP_POPULATE, errno, i);
    a->done++;
  }
  return 0;
}

/* The table is copied before it is checked: its file can be changed from outside. */
static int run_table(struct mapper *m, const struct mapper_request *r, int table, struct mapper_answer *a) {
  if (!m->ram_length) return fail(a, STEP_RAM, ENXIO, 0);
  if (!r->count) return 0;
  size_t bytes = r->count * (r->kind == MAPPER_MAP ? sizeof(struct mapper_extent) : sizeof(struct mapper_range));
  void *entries = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (entries == MAP_FAILED) return fail(a, STEP_TABLE, errno, 0);
  ssize_t n = pread(table, entries, bytes, 0);
  int result;
  if (n != (ssize_t)bytes)
    result = fail(a, STEP_TABLE, n < 0 ? errno : EINVAL, 0);
  else
    result = r->kind == MAPPER_MAP ? map(m, entries, r->count, a) : populate(m, entries, r->count, a);
  munmap(entries, bytes);
  return result;
}

static int take_files(struct mapper *m, const int *fds, size_t count, struct mapper_answer *a) {
  int result = 0;
  for (size_t i = 0; i < count; i++) {
    if (result == 0 && m->file_count == MAPPER_FILES) result = fail(a, STEP_FILES, EMFILE, i);
    if (result < 0)
      close(fds[i]);
    else
      result = take_file(m, fds[i], a);
  }
  return result;
}

struct mapper_answer mapper_handle(struct mapper *m, const void *message, size_t length, const int *fds,
                                   size_t fd_count) {
  struct mapper_answer a = {.magic = MAPPER_MAGIC, .version = MAPPER_VERSION};
  struct mapper_request r = {0};
  memcpy(&r, message, length < sizeof r ? length : sizeof r);
  if (check_header(&r, length, fd_count, &a) < 0) {
    for (size_t i = 0; i < fd_count; i++) close(fds[i]);
    return a;
  }
  if (r.kind == MAPPER_RAM) {
    learn_ram(m, &r, &a);
    return a;
  }
  size_t table = r.kind != MAPPER_OPEN;
  if (take_files(m, fds + table, fd_count - table, &a) == 0 && table) run_table(m, &r, fds[0], &a);
  if (table) close(fds[0]);
  /* Gone before the answer: the client can rely on it. */
  if (r.kind == MAPPER_MAP) mapper_forget(m);
  return a;
}

void mapper_forget(struct mapper *m) {
  for (size_t i = 0; i < m->file_count; i++) close(m->files[i].fd);
  m->file_count = 0;
}
