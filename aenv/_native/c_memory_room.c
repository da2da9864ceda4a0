/* The page cache of a file that is about to be written while a guest stands still, made before: blocks on the disk,
 * pages, and a mapping through which another process's memory can be read into them without one more copy. A full disk
 * and slow write-back show now.
 */
#define _GNU_SOURCE
#include "c_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; the build host's headers may be older */
#define MADV_POPULATE_WRITE 23
#endif
#define STEP (4u << 20)

struct job {
  const struct memory_room *room;
  _Atomic uint64_t next;
  _Atomic int failed;
};

static void *populate(void *argument) {
  struct job *job = argument;
  uint64_t at;
  while (!job->failed && (at = atomic_fetch_add(&job->next, STEP)) < job->room->length) {
    uint64_t length = job->room->length - at < STEP ? job->room->length - at : STEP;
    if (madvise(job->room->map + at, length, MADV_POPULATE_WRITE) < 0) job->failed = 1;
  }
  return NULL;
}

int memory_room_make(int fd, uint64_t length, int threads, struct memory_room *room, struct memory_failure *why) {
  pthread_t handles[MAX_THREADS];
  *room = (struct memory_room){.map = NULL};
  if (fallocate(fd, 0, 0, (off_t)length) < 0) {
    if (errno == EOPNOTSUPP) return 0; /* it goes without */
    return memory_fail(why, errno, "make room for the layer");
  }
  char *map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return memory_fail(why, errno, "map the layer");
  *room = (struct memory_room){.map = map, .length = length};
  struct job job = {.room = room};
  int started = 1;
  while (started < threads && pthread_create(&handles[started], NULL, populate, &job) == 0) started++;
  populate(&job);
  for (int i = 1; i < started; i++) pthread_join(handles[i], NULL);
  if (job.failed) memory_room_free(room); /* an old kernel, or too little memory: written without */
  return 0;
}

void memory_room_free(struct memory_room *room) {
  if (room->map) munmap(room->map, room->length);
  room->map = NULL;
}
