/* A file in our address space, mapped as it is needed, so that its bytes can be given to the kernel without a copy.
 *
 * Nobody but the kernel may touch them: where the file ends, or the disk fails, a system call gives EFAULT and a load of
 * our own would be SIGBUS. */
#ifndef AENV_LSMT_VIEW_H
#define AENV_LSMT_VIEW_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define VIEW_WINDOWS 64u

struct view {
    _Atomic(char *) window[VIEW_WINDOWS];
};

/* NULL if it cannot be had: read the file then. Valid until view_close. May be called by several threads. */
const void *view_at(struct view *view, int fd, uint64_t offset, size_t length);
void view_close(struct view *view);

#endif
