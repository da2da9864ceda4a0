/* Which mappings turn pages that a machine has written back into pages of the files that hold the same content. */
#include "c_memory.h"

#include <errno.h>
#include <stdlib.h>

struct builder {
  struct memory_extent *items;
  size_t count, capacity;
};

static int add(struct builder *out, struct memory_extent extent) {
  struct memory_extent *last = out->count ? &out->items[out->count - 1] : NULL;
  if (last && last->file == extent.file && last->guest_offset + last->length == extent.guest_offset &&
      last->file_offset + last->length == extent.file_offset) {
    last->length += extent.length;
    return 0;
  }
  if (out->count == out->capacity) {
    size_t capacity = out->capacity ? out->capacity * 2 : 1024;
    struct memory_extent *items = realloc(out->items, capacity * sizeof *items);
    if (!items) return -1;
    out->items = items;
    out->capacity = capacity;
  }
  out->items[out->count++] = extent;
  return 0;
}

static int longest_first(const void *left, const void *right) {
  uint64_t a = ((const struct memory_extent *)left)->length, b = ((const struct memory_extent *)right)->length;
  return a > b ? -1 : a < b;
}

static int by_offset(const void *left, const void *right) {
  uint64_t a = ((const struct memory_extent *)left)->guest_offset;
  uint64_t b = ((const struct memory_extent *)right)->guest_offset;
  return a < b ? -1 : a > b;
}

int memory_home(const struct memory_run *runs, size_t run_count, const struct memory_extent *content, size_t count,
                size_t limit, struct memory_extent **extents, size_t *found, struct memory_failure *why) {
  struct builder out = {0};
  int result = 0;
  for (size_t r = 0, c = 0; r < run_count && c < count && result == 0;) {
    uint64_t run_end = runs[r].offset + runs[r].length, end = content[c].guest_offset + content[c].length;
    uint64_t from = runs[r].offset > content[c].guest_offset ? runs[r].offset : content[c].guest_offset;
    uint64_t to = run_end < end ? run_end : end;
    if (from < to)
      result = add(&out, (struct memory_extent){.guest_offset = from, .length = to - from, .file = content[c].file,
                                                .file_offset = content[c].file_offset + from - content[c].guest_offset});
    if (run_end <= end)
      r++;
    else
      c++;
  }
  if (result < 0) {
    free(out.items);
    return memory_fail(why, ENOMEM, "list of extents");
  }
  if (out.count > limit) {
    qsort(out.items, out.count, sizeof *out.items, longest_first);
    qsort(out.items, limit, sizeof *out.items, by_offset);
    out.count = limit;
  }
  *extents = out.items;
  *found = out.count;
  return 0;
}

static int by_place(const void *left, const void *right) {
  uint64_t a = ((const struct memory_run *)left)->offset, b = ((const struct memory_run *)right)->offset;
  return a < b ? -1 : a > b;
}

int memory_runs(const struct memory_pieces *pieces, struct memory_run **runs, size_t *count) {
  struct memory_run *items = malloc((pieces->count + 1) * sizeof *items);
  size_t used = 0;
  if (!items) return -1;
  int sorted = 1;
  for (size_t i = 0; i < pieces->count; i++) {
    items[i] = (struct memory_run){(uint64_t)pieces->items[i].page * PAGE_BYTES,
                                   (uint64_t)pieces->items[i].count * PAGE_BYTES};
    sorted = sorted && (i == 0 || items[i - 1].offset <= items[i].offset);
  }
  if (!sorted) qsort(items, pieces->count, sizeof *items, by_place); /* regions need not be in the guest's order */
  for (size_t i = 0; i < pieces->count; i++) {
    if (used && items[used - 1].offset + items[used - 1].length == items[i].offset)
      items[used - 1].length += items[i].length;
    else
      items[used++] = items[i];
  }
  *runs = items;
  *count = used;
  return 0;
}
