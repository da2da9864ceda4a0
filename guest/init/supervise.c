/* The rest of PID 1's life: keep envd running, run the image's own init if asked, reap, power off. */
#define _GNU_SOURCE /* pipe2, clone flags, AT_EMPTY_PATH */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    BACKOFF_FIRST_MS = 100, /* the first restart is at once; then 100, 200, ... */
    BACKOFF_MAX_MS = 5000,
    STEADY_MS = 10000, /* lived that long: the next death starts from zero again */
    STOP_MS = 3000,    /* between SIGTERM to everybody and SIGKILL */
};

struct supervisor {
    int envd_fd;
    pid_t envd;           /* 0 while it does not run */
    int64_t started_ms;   /* when envd was started */
    int64_t restart_ms;   /* when to start it again */
    int backoff_ms;
    pid_t user_init;      /* 0 when there is none (any more) */
    sigset_t signals;
};

static char *const ENVIRONMENT[] = {
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", NULL,
};

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct timespec span(int64_t ms) {
    if (ms < 0)
        ms = 0;
    return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}

/* In the child: undo what PID 1 did to its signals and start a session of its own. */
static void become_program(const sigset_t *signals) {
    sigprocmask(SIG_UNBLOCK, signals, NULL);
    setsid();
}

static void protect_from_oom(void) {
    if (file_write("/proc/self/oom_score_adj", "-1000", 0, false) != 0)
        log_errno("oom_score_adj");
}

/* Tell the parent that exec failed; the pipe closes by itself when it did not. */
static void report(int fd) {
    int error = errno;
    ssize_t written = write(fd, &error, sizeof error);
    _exit(written == sizeof error ? 127 : 126);
}

/* Wait for the verdict of a child's exec. Returns 0, or the errno of the child. */
static int exec_verdict(int fd) {
    int error = 0;
    ssize_t got;
    do {
        got = read(fd, &error, sizeof error);
    } while (got < 0 && errno == EINTR);
    return got == sizeof error ? error : 0;
}

/* Start envd from its descriptor: the file was unlinked with the initramfs and the image never sees it.
 * Returns 0 or an errno. */
static int start_envd(struct supervisor *self) {
    int verdict[2];
    if (pipe2(verdict, O_CLOEXEC) != 0)
        return errno;
    self->started_ms = now_ms();
    pid_t pid = fork();
    if (pid == 0) {
        static char *const arguments[] = {"envd", NULL};
        become_program(&self->signals);
        protect_from_oom();
        syscall(SYS_execveat, self->envd_fd, "", arguments, ENVIRONMENT, AT_EMPTY_PATH);
        report(verdict[1]);
    }
    int error = pid < 0 ? errno : 0;
    close(verdict[1]);
    if (!error)
        error = exec_verdict(verdict[0]);
    close(verdict[0]);
    self->envd = pid > 0 ? pid : 0;
    return error;
}

/* The image's init expects to be PID 1 and to see its own /proc, so it gets a PID namespace; its mounts are shared
 * with ours, so what it mounts shows in the sandbox. `container` is how systemd learns that the devices and the
 * clock are not its business. */
static void run_user_init(struct supervisor *self, const char *path) {
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0L, 0L, 0L, 0L);
    if (pid < 0) {
        log_errno("start %s", path);
        return;
    }
    if (pid > 0) {
        self->user_init = pid;
        log_line("started %s as pid %d", path, (int)pid);
        return;
    }
    static char *const environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                                        "HOME=/root", "LANG=C.UTF-8", "TERM=linux", "container=aenv", NULL};
    char *arguments[] = {(char *)path, NULL};
    become_program(&self->signals);
    /* private first, or the new /proc would travel back into the parent's namespace */
    if (mount(NULL, "/proc", NULL, MS_PRIVATE, NULL) != 0 ||
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
        log_errno("/proc of %s", path);
    execve(path, arguments, environment);
    log_errno("run %s", path);
    _exit(127);
}

static void kill_everybody(int signal) {
    if (kill(-1, signal) != 0 && errno != ESRCH)
        log_errno("signal %d to all", signal);
}

/* Wait until no child is left, at most `ms`. */
static void drain(const struct supervisor *self, int64_t ms) {
    int64_t end = now_ms() + ms;
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid > 0)
            continue;
        if (pid < 0 || now_ms() >= end)
            return;
        struct timespec wait = span(end - now_ms());
        sigtimedwait(&self->signals, NULL, &wait);
    }
}

static void shut_down(const struct supervisor *self) {
    log_line("powering off");
    kill_everybody(SIGTERM);
    drain(self, STOP_MS);
    kill_everybody(SIGKILL);
    drain(self, STOP_MS);
    sync();
    /* read-only is as good as unmounted: the journal is empty and the disk image is clean */
    if (mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL) != 0)
        log_errno("remount the root disk read-only");
    power_off();
}

static void describe(int status, char *text, size_t size) {
    if (WIFSIGNALED(status))
        snprintf(text, size, "was killed by signal %d", WTERMSIG(status));
    else
        snprintf(text, size, "exited with status %d", WEXITSTATUS(status));
}

static void envd_died(struct supervisor *self, int status) {
    char how[64];
    int64_t now = now_ms();
    if (now - self->started_ms >= STEADY_MS)
        self->backoff_ms = 0;
    describe(status, how, sizeof how);
    log_line("envd %s; restart in %d ms", how, self->backoff_ms);
    self->envd = 0;
    self->restart_ms = now + self->backoff_ms;
    self->backoff_ms = self->backoff_ms ? self->backoff_ms * 2 : BACKOFF_FIRST_MS;
    if (self->backoff_ms > BACKOFF_MAX_MS)
        self->backoff_ms = BACKOFF_MAX_MS;
}

static void user_init_died(struct supervisor *self, int status) {
    char how[64];
    describe(status, how, sizeof how);
    log_line("the image's init %s", how);
    self->user_init = 0;
    /* reboot(2) inside a PID namespace kills that namespace's init: SIGHUP stands for restart, SIGINT for power off
     * or halt (pid_namespaces(7)). */
    if (WIFSIGNALED(status) && (WTERMSIG(status) == SIGHUP || WTERMSIG(status) == SIGINT))
        shut_down(self);
}

static void reap(struct supervisor *self) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == self->envd)
            envd_died(self, status);
        else if (pid == self->user_init)
            user_init_died(self, status);
    }
}

static void restart_envd(struct supervisor *self) {
    int error = start_envd(self);
    if (error)
        log_line("start envd: %s", strerror(error));
    if (!self->envd) /* no process at all, so no SIGCHLD will come: try again later */
        self->restart_ms = now_ms() + BACKOFF_MAX_MS;
}

static int wait_for_signal(const struct supervisor *self) {
    if (self->envd)
        return sigwaitinfo(&self->signals, NULL);
    struct timespec wait = span(self->restart_ms - now_ms());
    return sigtimedwait(&self->signals, NULL, &wait);
}

static void raise_limits(void) {
    struct rlimit files = {.rlim_cur = 65536, .rlim_max = 1048576};
    if (setrlimit(RLIMIT_NOFILE, &files) != 0)
        log_errno("limit of open files");
}

void supervise(int envd, const struct options *options) {
    struct supervisor self = {.envd_fd = envd};
    sigemptyset(&self.signals);
    /* SIGINT is Ctrl-Alt-Del (see RB_DISABLE_CAD), SIGPWR the power button, SIGUSR1/2 are what busybox sends. */
    static const int watched[] = {SIGCHLD, SIGTERM, SIGINT, SIGPWR, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof watched / sizeof *watched; i++)
        sigaddset(&self.signals, watched[i]);
    sigprocmask(SIG_BLOCK, &self.signals, NULL);
    raise_limits();
    int error = start_envd(&self);
    if (error)
        fatal("start envd: %s", strerror(error));
    if (*options->init)
        run_user_init(&self, options->init);
    log_line("ready in %lld ms", (long long)now_ms());
    for (;;) {
        int signal = wait_for_signal(&self);
        if (signal > 0 && signal != SIGCHLD)
            shut_down(&self);
        reap(&self);
        if (!self.envd && now_ms() >= self.restart_ms)
            restart_envd(&self);
    }
}
