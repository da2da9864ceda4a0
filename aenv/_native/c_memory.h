/* Guest memory in another process, and memory layers: sealed overlaybd LSMT files of page-aligned segments.
 *
 * c_memory_scan.c     which pages a process has written to its private mapping
 * c_memory_layer.c    the file format: header, index and trailer
 * c_memory_parent.c   what the guest's memory was before
 * c_memory_room.c     page cache for a layer, made ahead
 * c_memory_capture.c  dirty pages of a process into a new layer
 * c_memory_home.c     mappings that make written pages pages of files again
 * c_memory_prefetch.c parts of files into the page cache
 *
 * All functions return 0, or -1 with *why filled: `error` is an errno, or 0 when a parent is not valid.
 */
#ifndef AENV_MEMORY_H
#define AENV_MEMORY_H

#include <stdint.h>
#include <sys/types.h>

#include "lsmt.h" /* struct memory_extent */

#define PAGE_BYTES 4096u
#define SECTOR_BYTES 512u
#define PAGE_SECTORS 8u
#define BATCH_PAGES 256u /* what a worker handles at a time: 1 MiB */
#define INDEX_LIMIT 1000000u /* entries; other readers of the format refuse more */
#define MAX_THREADS 16

struct memory_failure {
  int error;
  char text[200];
};

/* `address` is in the other process; `guest_offset` is the place in guest RAM. Bytes, page-aligned. */
struct memory_region {
  uint64_t address, guest_offset, length;
};

/* Pages of guest RAM: `page` counts from guest offset 0; at most BATCH_PAGES of them. */
struct memory_piece {
  uint64_t address;
  uint32_t page, count;
};

struct memory_pieces {
  struct memory_piece *items;
  size_t count, capacity;
};

/* Bytes of guest RAM, in whole pages. */
struct memory_run {
  uint64_t offset, length;
};

/* Sectors; `zero` hides what is below, without data of its own. */
struct memory_segment {
  uint64_t offset, mapped;
  uint32_t length;
  uint8_t zero;
};

struct memory_segments {
  struct memory_segment *items;
  size_t count, capacity;
};

struct memory_stats {
  uint64_t dirty_pages;   /* found by the scan */
  uint64_t stored_pages;  /* written to the layer */
  uint64_t zero_pages;    /* recorded as zero over a parent that is not, or not known to be */
  uint64_t equal_pages;   /* left out: what the parent has */
  uint64_t segments;      /* entries of the index */
  uint64_t file_bytes;
};

int memory_fail(struct memory_failure *why, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
int memory_is_zero(const void *page);
int memory_read_at(int fd, void *buffer, size_t length, uint64_t offset);
int memory_write_at(int fd, const void *buffer, size_t length, uint64_t offset);

enum memory_wanted {
  WANT_WRITTEN, /* pages that the process has written to its private mapping */
  WANT_PRESENT, /* pages that are mapped now */
};
/* In the order of the regions; `out` is for free(). */
int memory_scan(pid_t pid, const struct memory_region *regions, int count, enum memory_wanted wanted, int threads,
                int use_ioctl, struct memory_pieces *out, struct memory_failure *why);

/* A memory map; what no extent covers is zeros. Several threads may read it at once. */
struct memory_parent {
  struct memory_parent_file *files;
  int file_count;
  const struct memory_extent *extents;
  size_t count;
};
enum { PARENT_UNKNOWN, PARENT_ZERO, PARENT_DATA };
/* Checks every field. Close it also after an error. The caller keeps the descriptors and the extents. */
int memory_parent_open(struct memory_parent *parent, const int *fds, int files, const struct memory_extent *extents,
                       size_t count, uint64_t virtual_size, struct memory_failure *why);
void memory_parent_close(struct memory_parent *parent);
/* Says for each guest page what the parent is there, and puts data in its place in `buffer`. `zero` tells which pages
 * of the guest are zeros: for those it tries harder. */
void memory_parent_read(const struct memory_parent *parent, const uint32_t *numbers, const uint8_t *zero, int pages,
                        char *buffer, uint8_t *known);

/* Sorted and joined. */
int memory_runs(const struct memory_pieces *pieces, struct memory_run **runs, size_t *count);
/* The parts of the memory map `content` that lie in `runs`, both sorted; at most `limit` extents, the longest. */
int memory_home(const struct memory_run *runs, size_t run_count, const struct memory_extent *content, size_t count,
                size_t limit, struct memory_extent **extents, size_t *found, struct memory_failure *why);

int memory_segments_add(struct memory_segments *list, struct memory_segment segment);
int memory_layer_write_header(int fd, uint64_t virtual_size, const char *uuid, struct memory_failure *why);
/* Sorts and joins the segments, writes index and trailer at `data_end`; sets *file_bytes. */
int memory_layer_seal(int fd, uint64_t virtual_size, const char *uuid, uint64_t data_end, struct memory_segments *list,
                      uint64_t *file_bytes, struct memory_failure *why);

/* Begins to read what is not in the page cache; *cold is how much that is. Bytes, page-aligned. */
int memory_prefetch(int fd, uint64_t offset, uint64_t length, uint64_t *cold, struct memory_failure *why);

/* The beginning of a file, mapped; without `map` there is none. */
struct memory_room {
  char *map;
  uint64_t length;
};
int memory_room_make(int fd, uint64_t length, int threads, struct memory_room *room, struct memory_failure *why);
void memory_room_free(struct memory_room *room);

/* `pieces` gets what was written, stored or not; its items are for free(). */
int memory_capture(pid_t pid, const struct memory_region *regions, int count, uint64_t virtual_size,
                   const struct memory_parent *parent, int out_fd, const struct memory_room *room, int threads,
                   int use_ioctl, const char *uuid, struct memory_pieces *pieces, struct memory_stats *stats,
                   struct memory_failure *why);

#endif
