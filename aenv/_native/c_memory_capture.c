/* Dirty pages of a stopped guest into a new layer. Workers take batches of pages, read them from the other process,
 * leave out what the parent already says, and put the rest where an atomic counter tells them to: data in the file has
 * no order, the index is sorted at the end.
 *
 * As far as room was made ahead in the file, pages are read straight into it: the kernel copies them once, and reports
 * an error of the file system where a store of ours would be a SIGBUS. The rest goes through a buffer.
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define DATA_START 4096u

struct job {
  pid_t pid;
  int out_fd;
  const struct memory_parent *parent;
  const struct memory_room *room;
  const struct memory_pieces *pieces;
  _Atomic uint64_t next_byte; /* end of the data in the file so far */
  pthread_mutex_t lock;       /* over all below */
  size_t next_piece;
  int failed;
  struct memory_failure why;
};

struct worker {
  struct job *job;
  pthread_t thread;
  struct memory_segments segments;
  struct memory_stats stats;
  char *buffer, *parent; /* a batch each */
  char *pages;           /* the batch: in the buffer or in the room */
  uint32_t numbers[BATCH_PAGES]; /* guest page of each page of the batch */
  uint8_t zero[BATCH_PAGES], known[BATCH_PAGES]; /* is it zeros, and what is known of the parent's page */
};

static int next_batch(struct job *job, size_t *first, size_t *end) {
  pthread_mutex_lock(&job->lock);
  size_t at = job->next_piece, pages = 0;
  *first = at;
  while (!job->failed && at < job->pieces->count && pages + job->pieces->items[at].count <= BATCH_PAGES)
    pages += job->pieces->items[at++].count;
  *end = job->next_piece = at;
  pthread_mutex_unlock(&job->lock);
  return *end > *first;
}

static void report(struct job *job, const struct memory_failure *why) {
  pthread_mutex_lock(&job->lock);
  if (!job->failed) job->why = *why;
  job->failed = 1;
  pthread_mutex_unlock(&job->lock);
}

/* Fills `pages` and `numbers`; returns how many, or -1. */
static int read_batch(struct worker *w, size_t first, size_t end, struct memory_failure *why) {
  struct iovec remote[BATCH_PAGES];
  int count = 0, pages = 0;
  for (size_t i = first; i < end; i++) {
    const struct memory_piece *p = &w->job->pieces->items[i];
    remote[count++] = (struct iovec){(void *)(uintptr_t)p->address, (size_t)p->count * PAGE_BYTES};
    for (uint32_t k = 0; k < p->count; k++) w->numbers[pages++] = p->page + k;
  }
  struct iovec local = {w->pages, (size_t)pages * PAGE_BYTES};
  ssize_t n = process_vm_readv(w->job->pid, &local, 1, remote, (unsigned long)count, 0);
  if (n < 0) return memory_fail(why, errno, "process_vm_readv");
  if ((size_t)n != local.iov_len) return memory_fail(why, EFAULT, "process_vm_readv: the mapping has changed");
  return pages;
}

static int is_equal(const struct worker *w, int i) {
  size_t at = (size_t)i * PAGE_BYTES;
  if (w->known[i] == PARENT_DATA) return memcmp(w->pages + at, w->parent + at, PAGE_BYTES) == 0;
  return w->known[i] == PARENT_ZERO && w->zero[i];
}

static int add_page(struct worker *w, uint32_t page, uint64_t mapped, int zero) {
  struct memory_segments *list = &w->segments;
  struct memory_segment *last = list->count ? &list->items[list->count - 1] : NULL;
  uint64_t offset = (uint64_t)page * PAGE_SECTORS;
  if (last && last->zero == zero && last->offset + last->length == offset && last->length < BATCH_PAGES * PAGE_SECTORS &&
      (zero || last->mapped + last->length == mapped)) {
    last->length += PAGE_SECTORS;
    return 0;
  }
  return memory_segments_add(list, (struct memory_segment){offset, mapped, PAGE_SECTORS, (uint8_t)zero});
}

/* Sorts the pages of a batch out; `kept` gets the indices of those to be stored, in order. */
static int choose(struct worker *w, int pages, uint32_t *kept) {
  int stored = 0;
  w->stats.dirty_pages += (uint64_t)pages;
  for (int i = 0; i < pages; i++) w->zero[i] = (uint8_t)memory_is_zero(w->pages + (size_t)i * PAGE_BYTES);
  memory_parent_read(w->job->parent, w->numbers, w->zero, pages, w->parent, w->known);
  for (int i = 0; i < pages; i++) {
    if (is_equal(w, i)) {
      w->stats.equal_pages++;
    } else if (w->zero[i]) {
      w->stats.zero_pages++;
      if (add_page(w, w->numbers[i], 0, 1) < 0) return -1;
    } else {
      kept[stored++] = (uint32_t)i;
    }
  }
  w->stats.stored_pages += (uint64_t)stored;
  return stored;
}

/* A place in the room for a whole batch; 0 when it is full. */
static uint64_t claim(struct job *job, uint64_t length) {
  uint64_t at = job->next_byte;
  if (!job->room->map) return 0;
  do {
    if (at + length > job->room->length) return 0;
  } while (!atomic_compare_exchange_weak(&job->next_byte, &at, at + length));
  return at;
}

/* The end of a claim that was not needed. Behind another claim it becomes a hole; if that fails it only costs space. */
static void give_back(struct job *job, uint64_t begin, uint64_t end) {
  uint64_t expected = end;
  if (begin == end || atomic_compare_exchange_strong(&job->next_byte, &expected, begin)) return;
  (void)fallocate(job->out_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin, (off_t)(end - begin));
}

static int note(struct worker *w, const uint32_t *kept, int count, uint64_t at, struct memory_failure *why) {
  for (int i = 0; i < count; i++)
    if (add_page(w, w->numbers[kept[i]], at / SECTOR_BYTES + (uint64_t)i * PAGE_SECTORS, 0) < 0)
      return memory_fail(why, ENOMEM, "index");
  return 0;
}

/* The batch lies in the room from `at` on: move together what is kept. */
static int keep(struct worker *w, const uint32_t *kept, int count, int pages, uint64_t at, struct memory_failure *why) {
  for (int i = 0; i < count; i++)
    if (kept[i] != (uint32_t)i)
      memcpy(w->pages + (size_t)i * PAGE_BYTES, w->pages + (size_t)kept[i] * PAGE_BYTES, PAGE_BYTES);
  give_back(w->job, at + (uint64_t)count * PAGE_BYTES, at + (uint64_t)pages * PAGE_BYTES);
  return note(w, kept, count, at, why);
}

static int store(struct worker *w, const uint32_t *kept, int count, struct memory_failure *why) {
  struct iovec parts[BATCH_PAGES];
  uint64_t at = atomic_fetch_add(&w->job->next_byte, (uint64_t)count * PAGE_BYTES);
  int used = 0;
  for (int i = 0; i < count; i++) {
    char *page = w->pages + (size_t)kept[i] * PAGE_BYTES;
    if (used && (char *)parts[used - 1].iov_base + parts[used - 1].iov_len == page)
      parts[used - 1].iov_len += PAGE_BYTES;
    else
      parts[used++] = (struct iovec){page, PAGE_BYTES};
  }
  if (note(w, kept, count, at, why) < 0) return -1;
  size_t length = (size_t)count * PAGE_BYTES;
  ssize_t n = pwritev(w->job->out_fd, parts, used, (off_t)at);
  if (n == (ssize_t)length) return 0;
  if (n < 0 && errno != EINTR) return memory_fail(why, errno, "write layer");
  /* A short write (signal, disk almost full): again page by page, which gives the real error if there is one. */
  for (int i = 0; i < count; i++)
    if (memory_write_at(w->job->out_fd, w->pages + (size_t)kept[i] * PAGE_BYTES, PAGE_BYTES,
                        at + (uint64_t)i * PAGE_BYTES) < 0)
      return memory_fail(why, errno, "write layer");
  return 0;
}

static int handle_batch(struct worker *w, size_t first, size_t end, struct memory_failure *why) {
  uint32_t kept[BATCH_PAGES];
  uint64_t length = 0;
  for (size_t i = first; i < end; i++) length += (uint64_t)w->job->pieces->items[i].count * PAGE_BYTES;
  uint64_t at = claim(w->job, length);
  w->pages = at ? w->job->room->map + at : w->buffer;
  int pages = read_batch(w, first, end, why);
  if (pages < 0) return -1;
  int count = choose(w, pages, kept);
  if (count < 0) return memory_fail(why, ENOMEM, "index");
  if (at) return keep(w, kept, count, pages, at, why);
  return count ? store(w, kept, count, why) : 0;
}

static void *work(void *argument) {
  struct worker *w = argument;
  size_t first, end;
  while (next_batch(w->job, &first, &end)) {
    struct memory_failure why;
    if (handle_batch(w, first, end, &why) < 0) report(w->job, &why);
  }
  return NULL;
}

static char *new_batch(void) {
  char *pages = mmap(NULL, BATCH_PAGES * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? NULL : pages;
}

static int make_buffers(struct worker *w) {
  w->buffer = new_batch();
  w->parent = new_batch();
  return w->buffer && w->parent ? 0 : -1;
}

/* The calling thread is the first worker; a thread that cannot be had is done without. */
static int run_workers(struct job *job, struct worker *workers, int threads, struct memory_failure *why) {
  for (int i = 0; i < threads; i++) {
    workers[i].job = job;
    if (make_buffers(&workers[i]) < 0) return memory_fail(why, ENOMEM, "batch");
  }
  int started = 1;
  while (started < threads && pthread_create(&workers[started].thread, NULL, work, &workers[started]) == 0) started++;
  work(&workers[0]);
  for (int i = 1; i < started; i++) pthread_join(workers[i].thread, NULL);
  if (job->failed) {
    *why = job->why;
    return -1;
  }
  return 0;
}

/* Each worker took its batches in the order of the pieces, so its segments are as sorted as those are. */
static int gather(struct worker *workers, int threads, struct memory_segments *all, struct memory_stats *stats,
                  struct memory_failure *why) {
  size_t next[MAX_THREADS] = {0};
  for (int i = 0; i < threads; i++) {
    all->capacity += workers[i].segments.count;
    stats->dirty_pages += workers[i].stats.dirty_pages;
    stats->stored_pages += workers[i].stats.stored_pages;
    stats->zero_pages += workers[i].stats.zero_pages;
    stats->equal_pages += workers[i].stats.equal_pages;
  }
  all->items = malloc((all->capacity + 1) * sizeof *all->items);
  if (!all->items) return memory_fail(why, ENOMEM, "index");
  while (all->count < all->capacity) {
    int lowest = -1;
    for (int i = 0; i < threads; i++)
      if (next[i] < workers[i].segments.count &&
          (lowest < 0 ||
           workers[i].segments.items[next[i]].offset < workers[lowest].segments.items[next[lowest]].offset))
        lowest = i;
    all->items[all->count++] = workers[lowest].segments.items[next[lowest]++];
  }
  return 0;
}

static int capture(struct job *job, struct worker *workers, int threads, uint64_t virtual_size, const char *uuid,
                   struct memory_stats *stats, struct memory_failure *why) {
  struct memory_segments all = {0};
  int result = run_workers(job, workers, threads, why);
  if (result == 0) result = gather(workers, threads, &all, stats, why);
  if (result == 0) result = memory_layer_write_header(job->out_fd, virtual_size, uuid, why);
  if (result == 0)
    result = memory_layer_seal(job->out_fd, virtual_size, uuid, job->next_byte, &all, &stats->file_bytes, why);
  if (result == 0 && ftruncate(job->out_fd, (off_t)stats->file_bytes) < 0) /* the rest of the room */
    result = memory_fail(why, errno, "cut the layer");
  stats->segments = all.count;
  free(all.items);
  return result;
}

int memory_capture(pid_t pid, const struct memory_region *regions, int count, uint64_t virtual_size,
                   const struct memory_parent *parent, int out_fd, const struct memory_room *room, int threads,
                   int use_ioctl, const char *uuid, struct memory_pieces *pieces, struct memory_stats *stats,
                   struct memory_failure *why) {
  struct job job = {.pid = pid, .parent = parent, .out_fd = out_fd, .room = room, .pieces = pieces,
                    .lock = PTHREAD_MUTEX_INITIALIZER};
  job.next_byte = DATA_START;
  memset(stats, 0, sizeof *stats);
  memset(pieces, 0, sizeof *pieces);
  int result = memory_scan(pid, regions, count, WANT_WRITTEN, threads, use_ioctl, pieces, why);
  struct worker *workers = calloc((size_t)threads, sizeof *workers);
  if (result == 0 && !workers) result = memory_fail(why, ENOMEM, "workers");
  if (result == 0) result = capture(&job, workers, threads, virtual_size, uuid, stats, why);
  for (int i = 0; workers && i < threads; i++) {
    if (workers[i].buffer) munmap(workers[i].buffer, BATCH_PAGES * PAGE_BYTES);
    if (workers[i].parent) munmap(workers[i].parent, BATCH_PAGES * PAGE_BYTES);
    free(workers[i].segments.items);
  }
  free(workers);
  return result;
}
