#define _GNU_SOURCE
#include "lsmt_view.h"

#include <sys/mman.h>

/* Address space, not memory. The file may grow into its last window. */
#define WINDOW (4ull << 30)

const void *view_at(struct view *view, int fd, uint64_t offset, size_t length)
{
    uint64_t number = offset / WINDOW, at = offset % WINDOW;
    char *none = NULL;
    if (number >= VIEW_WINDOWS || length > WINDOW - at)
        return NULL;
    char *window = atomic_load_explicit(&view->window[number], memory_order_acquire);
    if (window)
        return window + at;
    window = mmap(NULL, WINDOW, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, (off_t)(number * WINDOW));
    if (window == MAP_FAILED)
        return NULL;
    if (!atomic_compare_exchange_strong(&view->window[number], &none, window)) {
        munmap(window, WINDOW);
        window = none; /* another thread was faster */
    }
    return window + at;
}

void view_close(struct view *view)
{
    for (unsigned i = 0; i < VIEW_WINDOWS; i++)
        if (view->window[i])
            munmap(view->window[i], WINDOW);
}
