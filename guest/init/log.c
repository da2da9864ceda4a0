/* Lines on the console, and the end of the machine. */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/reboot.h>
#include <unistd.h>

/* PID 1 starts with the console node of the initramfs, which is about to be removed; take that of devtmpfs. */
void log_open(void) {
    int fd = open("/dev/console", O_RDWR | O_NOCTTY);
    if (fd < 0)
        return;
    for (int standard = 0; standard <= 2; standard++)
        if (fd != standard)
            dup2(fd, standard);
    if (fd > 2)
        close(fd);
}

static void print(const char *format, va_list values, int error) {
    char line[512] = "aenv-init: ";
    size_t used = strlen(line), room = sizeof line - 1;
    int length = vsnprintf(line + used, room - used, format, values);
    used = length < 0 ? used : used + (size_t)length < room ? used + (size_t)length : room - 1;
    if (error) {
        length = snprintf(line + used, room - used, ": %s", strerror(error));
        used = used + (size_t)length < room ? used + (size_t)length : room - 1;
    }
    line[used++] = '\n';
    /* One write, so that lines of the kernel and of envd do not cut ours. A dead console is not our problem. */
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written;
}

void log_line(const char *format, ...) {
    va_list values;
    va_start(values, format);
    print(format, values, 0);
    va_end(values);
}

void log_errno(const char *format, ...) {
    int error = errno;
    va_list values;
    va_start(values, format);
    print(format, values, error);
    va_end(values);
}

void power_off(void) {
    sync();
    reboot(RB_POWER_OFF);
    /* Without ACPI power-off the kernel halts instead and the VMM would sit there for ever; a reset ends it. */
    reboot(RB_AUTOBOOT);
    for (;;)
        pause();
}

void fatal(const char *format, ...) {
    va_list values;
    va_start(values, format);
    print(format, values, 0);
    va_end(values);
    log_line("fatal: powering off");
    power_off();
}

void fatal_errno(const char *format, ...) {
    int error = errno;
    va_list values;
    va_start(values, format);
    print(format, values, error);
    va_end(values);
    log_line("fatal: powering off");
    power_off();
}
