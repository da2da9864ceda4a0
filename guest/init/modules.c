/* Kernel modules: every file that the list names, in the order of the list. */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        log_errno("module %s", path);
        return;
    }
    /* A driver that is not needed here (no such device) is no reason to stop; a missing disk shows at the mount. */
    if (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST)
        log_errno("module %s", path);
    close(fd);
}

void modules_load(const char *list) {
    char text[8192];
    if (file_read(list, text, sizeof text) < 0) {
        if (errno != ENOENT)
            log_errno("%s", list);
        return;
    }
    char *rest = NULL;
    for (char *path = strtok_r(text, "\n", &rest); path; path = strtok_r(NULL, "\n", &rest))
        load(path);
}
