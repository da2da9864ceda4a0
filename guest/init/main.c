/* The order of the boot. PID 1 of the initramfs; ends only with the machine. */
#include "init.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <unistd.h>

int main(void) {
    struct options options;
    if (getpid() != 1) {
        log_line("runs only as process 1");
        return 1;
    }
    mounts_early();
    log_open();
    reboot(RB_DISABLE_CAD);
    options_read(&options);
    /* Opened before the initramfs is emptied; the open descriptor keeps the program alive. */
    int envd = open("/envd", O_RDONLY | O_CLOEXEC);
    if (envd < 0)
        fatal_errno("/envd in the initramfs");
    modules_load("/modules.list");
    network_up(&options);
    mounts_switch_root("/dev/vda", options.rootflags);
    mounts_inside_root();
    /* Shared, as under systemd: mounts made in one mount namespace of the sandbox are seen in those made from it. */
    if (mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL) != 0)
        log_errno("share mounts");
    identity_apply(&options);
    supervise(envd, &options);
}
