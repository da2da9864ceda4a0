/* File systems: those that PID 1 needs, the root disk, and those that programs expect. */
#include "init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static const char NEW_ROOT[] = "/newroot";

struct mount_point {
    const char *type, *target;
    unsigned long flags;
    const char *options;
    mode_t mode;
    bool needed;
};

static void mount_one(const struct mount_point *point) {
    if (mkdir(point->target, point->mode) != 0 && errno != EEXIST && point->needed)
        log_errno("mkdir %s", point->target);
    if (mount(point->type, point->target, point->type, point->flags, point->options) == 0)
        return;
    if (point->needed)
        fatal_errno("mount %s on %s", point->type, point->target);
    if (errno != ENODEV) /* the kernel was built without it: nothing to tell */
        log_errno("mount %s on %s", point->type, point->target);
}

static void mount_all(const struct mount_point *points, size_t count) {
    for (size_t i = 0; i < count; i++)
        mount_one(&points[i]);
}

void mounts_early(void) {
    static const struct mount_point points[] = {
        {"devtmpfs", "/dev", MS_NOSUID, "mode=0755", 0755, true},
        {"proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "", 0555, true},
        {"sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, "", 0555, true},
    };
    umask(0);
    mount_all(points, sizeof points / sizeof *points);
}

/* Remove everything below `dir` on the file system `device`. The initramfs lives in RAM until it is unlinked, and
 * would be part of every snapshot. Takes over the descriptor. */
static void remove_tree(int dir, dev_t device, int depth) {
    DIR *stream = fdopendir(dir);
    if (!stream) {
        close(dir);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(stream))) {
        struct stat status;
        const char *name = entry->d_name;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        if (fstatat(dir, name, &status, AT_SYMLINK_NOFOLLOW) != 0 || status.st_dev != device)
            continue;
        if (S_ISDIR(status.st_mode)) {
            int child = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (child >= 0 && depth < 16)
                remove_tree(child, device, depth + 1);
            else if (child >= 0)
                close(child);
            unlinkat(dir, name, AT_REMOVEDIR);
        } else {
            unlinkat(dir, name, 0);
        }
    }
    closedir(stream);
}

static void move_into(const char *name) {
    char target[PATH_MAX];
    snprintf(target, sizeof target, "%s%s", NEW_ROOT, name);
    if (mkdir(target, 0755) != 0 && errno != EEXIST)
        log_errno("mkdir %s in the image", name);
    if (mount(name, target, NULL, MS_MOVE, NULL) != 0)
        fatal_errno("move %s into the root disk", name);
}

/* Every sandbox of a snapshot repeats what the guest does after the capture, in its own memory and on its own layer.
 * So reading a file must not write to the disk (noatime), and the thread that reads all block bitmaps some seconds
 * after the mount must not be there. Kernels before 5.11 do not know that option. */
static int mount_root(const char *device, const char *options) {
    char all[VALUE_MAX + 64];
    snprintf(all, sizeof all, "no_prefetch_block_bitmaps%s%s", *options ? "," : "", options);
    if (mount(device, NEW_ROOT, "ext4", MS_NOATIME, all) == 0)
        return 0;
    return errno == EINVAL ? mount(device, NEW_ROOT, "ext4", MS_NOATIME, options) : -1;
}

void mounts_switch_root(const char *device, const char *options) {
    if (mkdir(NEW_ROOT, 0755) != 0 && errno != EEXIST)
        fatal_errno("mkdir %s", NEW_ROOT);
    if (mount_root(device, options) != 0)
        fatal_errno("mount the root disk %s", device);
    int old = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat status;
    if (old < 0 || fstat(old, &status) != 0)
        fatal_errno("open the initramfs");
    move_into("/dev");
    move_into("/proc");
    move_into("/sys");
    if (chdir(NEW_ROOT) != 0 || mount(".", "/", NULL, MS_MOVE, NULL) != 0 || chroot(".") != 0 || chdir("/") != 0)
        fatal_errno("switch to the root disk");
    remove_tree(old, status.st_dev, 0);
}

static void link_at(const char *target, const char *path) {
    if (symlink(target, path) != 0 && errno != EEXIST)
        log_errno("link %s", path);
}

/* Every controller by itself: a kernel without one of them refuses the whole line otherwise. */
static void delegate_controllers(void) {
    static const char *const controllers[] = {"+cpu", "+cpuset", "+memory", "+io", "+pids"};
    for (size_t i = 0; i < sizeof controllers / sizeof *controllers; i++)
        if (file_write("/sys/fs/cgroup/cgroup.subtree_control", controllers[i], 0, false) != 0 && errno != EINVAL &&
            errno != ENOENT)
            log_errno("cgroup controller %s", controllers[i]);
}

void mounts_inside_root(void) {
    static const struct mount_point points[] = {
        {"devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666", 0755, true},
        {"tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777", 01777, true},
        {"mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, "", 01777, false},
        {"tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755", 0755, true},
        {"cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, "nsdelegate", 0755, false},
    };
    mount_all(points, sizeof points / sizeof *points);
    delegate_controllers();
    /* devtmpfs knows devices only; these names are a habit of user space. */
    link_at("/proc/self/fd", "/dev/fd");
    link_at("fd/0", "/dev/stdin");
    link_at("fd/1", "/dev/stdout");
    link_at("fd/2", "/dev/stderr");
    if (mkdir("/tmp", 01777) != 0 && errno != EEXIST)
        log_errno("mkdir /tmp");
    if (mkdir("/run/lock", 01777) != 0 && errno != EEXIST)
        log_errno("mkdir /run/lock");
    umask(022);
}
