/* Run by test_sanitizers.py, built with the C of aenv/_native and a sanitizer. Modes:
 *   chain DIR SEED     random writes of a child process, captures, rehomings; each chain of layers against a flat array
 *   hostile DIR SEED   parents with random extents, which are refused or do no harm
 */
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "c_memory.h"

#define PAGES 1500u
#define SIZE (PAGES * (uint64_t)PAGE_BYTES)
#define ROUNDS 6
#define UUID "01234567-89ab-cdef-0123-456789abcdef"

static uint8_t model[SIZE], moments[ROUNDS][SIZE], seen[SIZE];

/* The machine: RAM at a place that both sides know, written by orders through a pipe. */
struct order {
  int what; /* 'w'rite: `count` pages from `page` on get `byte`; 'm'ap: those of `fd` at `offset` */
  uint32_t page, count;
  int byte, fd;
  uint64_t offset;
};

struct machine {
  pid_t pid;
  int orders, answers;
  uint8_t *ram;
};

static void obey(uint8_t *ram, const struct order *o) {
  uint8_t *at = ram + (size_t)o->page * PAGE_BYTES;
  size_t length = (size_t)o->count * PAGE_BYTES;
  if (o->what == 'w') memset(at, o->byte, length);
  if (o->what == 'm')
    assert(mmap(at, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, o->fd, (off_t)o->offset) == at);
}

static void send_order(struct machine *m, struct order o) {
  char done;
  assert(write(m->orders, &o, sizeof o) == sizeof o);
  assert(read(m->answers, &done, 1) == 1);
}

/* The child opens the files that it maps through ours. */
static struct machine start(int fd) {
  struct machine m;
  int orders[2], answers[2];
  assert(pipe(orders) == 0 && pipe(answers) == 0);
  m.ram = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  assert(m.ram != MAP_FAILED);
  if ((m.pid = fork()) == 0) {
    struct order o;
    close(orders[1]), close(answers[0]);
    while (read(orders[0], &o, sizeof o) == sizeof o) {
      char path[64];
      if (o.what == 'm') { /* of the parent, which opened it later */
        snprintf(path, sizeof path, "/proc/%d/fd/%d", getppid(), o.fd);
        assert((o.fd = open(path, O_RDONLY)) >= 0);
      }
      obey(m.ram, &o);
      if (o.what == 'm') close(o.fd);
      assert(write(answers[1], "", 1) == 1);
    }
    _exit(0);
  }
  close(orders[0]), close(answers[1]);
  m.orders = orders[1], m.answers = answers[0];
  return m;
}

static void stop(struct machine *m) {
  close(m->orders), close(m->answers);
  assert(waitpid(m->pid, NULL, 0) == m->pid);
  munmap(m->ram, SIZE);
}

static int new_file(const char *folder, const char *name, int number) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s%d", folder, name, number);
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  assert(fd >= 0);
  return fd;
}

static void fail(const char *text) {
  fprintf(stderr, "%s\n", text);
  abort();
}

struct chain {
  const char *folder;
  int files[ROUNDS + 2], count; /* the base, the layers, zeros */
  struct memory_extent *content;
  size_t extents;
};

/* Opens the layers as any reader does, and puts them over the base. */
static struct stack *open_stack(const struct chain *chain) {
  struct layer *layers[ROUNDS] = {0};
  struct index *indexes[ROUNDS] = {0};
  struct stack *stack;
  struct fault fault;
  int layer_count = chain->count - 1;
  for (int i = 0; i < layer_count; i++) {
    char path[512];
    snprintf(path, sizeof path, "%s/layer%d", chain->folder, i);
    if (layer_open(path, &layers[i], &indexes[i], &fault)) fail(fault.text);
  }
  if (stack_new(layers, indexes, (unsigned)layer_count, &stack, &fault)) fail(fault.text);
  for (int i = 0; i < layer_count; i++) layer_unref(layers[i]), index_unref(indexes[i]);
  return stack;
}

static void learn_content(struct chain *chain) {
  struct fault fault;
  struct stack *stack = open_stack(chain);
  struct memory_files files = {.base = 0, .layers = 1, .zero = chain->count};
  free(chain->content);
  if (stack_memory(stack, SIZE, &files, &chain->content, &chain->extents, &fault)) fail(fault.text);
  stack_unref(stack);
}

static void check(const struct chain *chain, int zeros, const uint8_t *expected) {
  for (size_t i = 0; i < chain->extents; i++) {
    const struct memory_extent *e = &chain->content[i];
    int fd = (int)e->file == chain->count ? zeros : chain->files[e->file];
    assert(pread(fd, seen + e->guest_offset, e->length, (off_t)e->file_offset) == (ssize_t)e->length);
  }
  assert(memcmp(seen, expected, SIZE) == 0);
}

static void scribble(struct machine *m) {
  for (int i = 0; i < 60; i++) {
    uint32_t page = (uint32_t)random() % PAGES, count = 1 + (uint32_t)random() % (random() % 8 ? 4 : 300);
    if (count > PAGES - page) count = PAGES - page;
    int byte = random() % 4 ? (int)(random() % 3) : 255;
    send_order(m, (struct order){.what = 'w', .page = page, .count = count, .byte = byte});
    memset(model + (size_t)page * PAGE_BYTES, byte, (size_t)count * PAGE_BYTES);
  }
}

static void rehome(struct machine *m, struct chain *chain, int zeros, const struct memory_pieces *pieces) {
  struct memory_failure why;
  struct memory_run *runs;
  struct memory_extent *home;
  size_t run_count, count, limit = (size_t)random() % 3 ? 10000 : 7;
  assert(memory_runs(pieces, &runs, &run_count) == 0);
  if (memory_home(runs, run_count, chain->content, chain->extents, limit, &home, &count, &why)) fail(why.text);
  assert(count <= limit);
  for (size_t i = 0; i < count; i++) {
    int fd = (int)home[i].file == chain->count ? zeros : chain->files[home[i].file];
    send_order(m, (struct order){.what = 'm', .page = (uint32_t)(home[i].guest_offset / PAGE_BYTES),
                                 .count = (uint32_t)(home[i].length / PAGE_BYTES), .fd = fd,
                                 .offset = home[i].file_offset});
  }
  free(runs), free(home);
}

static void capture(struct machine *m, struct chain *chain, int zeros, int round) {
  struct memory_region region = {(uintptr_t)m->ram, 0, SIZE};
  struct memory_parent parent;
  struct memory_room room = {0};
  struct memory_pieces pieces;
  struct memory_stats stats;
  struct memory_failure why;
  int fds[ROUNDS + 2], out = new_file(chain->folder, "layer", round);
  memcpy(fds, chain->files, sizeof fds);
  fds[chain->count] = zeros;
  if (random() % 3 && memory_room_make(out, (1 + (uint64_t)random() % PAGES) * PAGE_BYTES, 2, &room, &why))
    fail(why.text);
  if (memory_parent_open(&parent, fds, chain->count + 1, chain->content, chain->extents, SIZE, &why)) fail(why.text);
  if (memory_capture(m->pid, &region, 1, SIZE, &parent, out, &room, 1 + (int)random() % 4, (int)random() % 2, UUID,
                     &pieces, &stats, &why))
    fail(why.text);
  memory_parent_close(&parent);
  memory_room_free(&room);
  assert(stats.dirty_pages == stats.stored_pages + stats.zero_pages + stats.equal_pages);
  chain->files[chain->count++] = out;
  learn_content(chain);
  check(chain, zeros, model);
  rehome(m, chain, zeros, &pieces);
  free(pieces.items);
}

static void run_chain(const char *folder) {
  struct chain chain = {.folder = folder};
  int zeros = new_file(folder, "zeros", 0), base = chain.files[chain.count++] = new_file(folder, "base", 0);
  assert(ftruncate(zeros, (off_t)SIZE) == 0 && ftruncate(base, (off_t)SIZE) == 0);
  for (uint32_t page = 0; page < PAGES; page += 1 + (uint32_t)random() % 5) {
    memset(model + (size_t)page * PAGE_BYTES, 2, PAGE_BYTES);
    assert(pwrite(base, model + (size_t)page * PAGE_BYTES, PAGE_BYTES, (off_t)page * PAGE_BYTES) == PAGE_BYTES);
  }
  chain.content = malloc(sizeof *chain.content);
  *chain.content = (struct memory_extent){.length = SIZE};
  chain.extents = 1;
  struct machine m = start(base);
  for (int round = 0; round < ROUNDS; round++) {
    scribble(&m);
    capture(&m, &chain, zeros, round);
    memcpy(moments[round], model, SIZE);
  }
  stop(&m);
  for (int round = ROUNDS; round > 0; round--) {
    chain.count = round + 1;
    learn_content(&chain);
    check(&chain, zeros, moments[round - 1]);
  }
  free(chain.content);
}

static void run_hostile(const char *folder) {
  int base = new_file(folder, "base", 0), out = new_file(folder, "layer", 0), refused = 0;
  assert(ftruncate(base, 64 * PAGE_BYTES) == 0 && pwrite(base, "x", 1, 0) == 1);
  struct machine m = start(base);
  struct memory_region region = {(uintptr_t)m.ram, 0, SIZE};
  send_order(&m, (struct order){.what = 'w', .page = 0, .count = 64, .byte = 3});
  for (int i = 0; i < 2000; i++) {
    struct memory_extent extents[3];
    struct memory_parent parent;
    struct memory_room room = {0};
    struct memory_pieces pieces = {0};
    struct memory_stats stats;
    struct memory_failure why;
    for (int k = 0; k < 3; k++) {
      static const uint64_t odd[] = {0, 1, 512, ~0ull, 1ull << 63, SIZE, ~0ull - PAGE_BYTES + 1};
      uint64_t *words = (uint64_t *)&extents[k];
      extents[k] = (struct memory_extent){
          (uint64_t)k * 8 * PAGE_BYTES, (1 + (uint64_t)random() % 9) * PAGE_BYTES, 0, 0,
          (uint64_t)random() % 60 * PAGE_BYTES};
      if (random() % 4 == 0) words[random() % 4] = odd[random() % 7];
    }
    int result = memory_parent_open(&parent, &base, 1, extents, 3, SIZE, &why);
    if (result == 0)
      result = memory_capture(m.pid, &region, 1, SIZE, &parent, out, &room, 2, 1, UUID, &pieces, &stats, &why);
    refused += result != 0;
    memory_parent_close(&parent);
    free(pieces.items);
  }
  assert(refused > 100 && refused < 1900);
  stop(&m);
}

int main(int argc, char **argv) {
  assert(argc == 4);
  srandom((unsigned)atoi(argv[3]));
  if (!strcmp(argv[1], "chain"))
    run_chain(argv[2]);
  else
    run_hostile(argv[2]);
  puts("done");
  return 0;
}
