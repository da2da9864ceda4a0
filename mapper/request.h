/* Requests to the mapper: what they look like, and what they do to guest RAM. No sockets here, so that tests can feed
 * it anything. The client is aenv/vmm/mapper.py.
 *
 * A client on the SOCK_SEQPACKET socket sends one `request` a message, with descriptors attached, and gets one `answer`
 * for each. Numbers are the host's own: both ends are on one machine.
 */
#ifndef MAPPER_REQUEST_H
#define MAPPER_REQUEST_H

#include <stddef.h>
#include <stdint.h>

#define MAPPER_MAGIC 0x50414d41u /* "AMAP" */
#define MAPPER_VERSION 1
/* What one message can carry is 253 (SCM_MAX_FD), one of which may be the table. */
#define MAPPER_FDS 253
#define MAPPER_FILES 512
#define MAPPER_ENTRIES 16384

enum mapper_kind {
  MAPPER_RAM = 1,  /* guest RAM lies at `address` for `length` bytes; may be said again, not differently */
  MAPPER_OPEN = 2, /* `files` more files for the next MAP on this connection; numbered in the order of their coming */
  MAPPER_MAP = 3,  /* the same, and a table, the first descriptor: a file of `count` extents, to map over RAM */
  MAPPER_POPULATE = 4, /* a table of `count` ranges of RAM whose pages shall be mapped before they are needed */
};

struct mapper_request {
  uint32_t magic;
  uint16_t version, kind;
  uint32_t count, files;
  uint64_t address, length;
};

struct mapper_extent { /* sorted by guest_offset, not overlapping; all in whole pages */
  uint64_t guest_offset, length;
  uint32_t file, reserved;
  uint64_t file_offset;
};

struct mapper_range {
  uint64_t guest_offset, length;
};

/* What is wrong. In the order of STEPS in aenv/vmm/mapper.py. */
enum mapper_step {
  STEP_NONE,
  STEP_LENGTH,
  STEP_MAGIC,
  STEP_VERSION,
  STEP_KIND,
  STEP_COUNT,
  STEP_FILES,
  STEP_RAM,
  STEP_TABLE,
  STEP_FILE,
  STEP_GUEST_OFFSET,
  STEP_EXTENT_LENGTH,
  STEP_FILE_INDEX,
  STEP_RESERVED,
  STEP_FILE_OFFSET,
  STEP_MMAP,
  STEP_POPULATE,
};

struct mapper_answer {
  uint32_t magic;
  uint16_t version, step;
  int32_t error;  /* errno; 0: done */
  uint32_t index; /* of the entry or file that is wrong */
  uint32_t done;  /* entries that were carried out: with an error, RAM is half mapped when this is not 0 */
  uint32_t reserved;
};

struct mapper_file {
  int fd;
  uint64_t size; /* bytes that may be mapped, in whole pages */
};

/* State of the mapper: what it knows of RAM stays, files are closed after each MAP and at the end of a connection. */
struct mapper {
  uint64_t ram, ram_length; /* 0: not told yet */
  uint64_t page;
  size_t file_count;
  struct mapper_file files[MAPPER_FILES];
};

/* Carry out one message. Takes over all descriptors, good or bad request. */
struct mapper_answer mapper_handle(struct mapper *m, const void *message, size_t length, const int *fds,
                                   size_t fd_count);

/* Close the files of a connection. */
void mapper_forget(struct mapper *m);

#endif
