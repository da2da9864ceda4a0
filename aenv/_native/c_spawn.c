/* clone(CLONE_VM | CLONE_VFORK | CLONE_PIDFD): the child borrows the parent's memory until it calls execve, so the cost
 * does not grow with the parent's heap. While it runs, only the calling thread is stopped; all other threads go on.
 *
 * Rules for child code: no allocation, no locks, no libc calls that keep state of the parent's process. In particular
 * uid and gid are changed by raw system calls: glibc's wrappers broadcast to all threads it finds in (shared!) memory.
 */
#define _GNU_SOURCE
#include "c_spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STACK_SIZE (64 * 1024)

static int write_all(int fd, const char *text) {
  ssize_t length = (ssize_t)strlen(text), done = write(fd, text, length);
  if (done == length) return 0;
  if (done >= 0) errno = EIO;
  return -1;
}

static int write_oom_score(const char *text) {
  int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  int result = write_all(fd, text);
  int saved = errno;
  close(fd);
  errno = saved;
  return result;
}

static int join_cgroups(const struct spawn_request *r) {
  for (int i = 0; i < r->cgroup_count; i++)
    if (write_all(r->cgroup_fds[i], "0") < 0) return -1; /* 0 means the writer itself */
  return 0;
}

/* Sources are first lifted above all targets, so that no dup2 overwrites a source still needed. */
static int map_fds(struct spawn_request *r) {
  int above = 3;
  for (int i = 0; i < r->fd_count; i++)
    if (r->fds[i].target >= above) above = r->fds[i].target + 1;
  for (int i = 0; i < r->fd_count; i++) {
    int lifted = fcntl(r->fds[i].source, F_DUPFD_CLOEXEC, above);
    if (lifted < 0) return -1;
    r->fds[i].source = lifted;
  }
  for (int i = 0; i < r->fd_count; i++)
    if (dup2(r->fds[i].source, r->fds[i].target) < 0) return -1;
  return 0;
}

/* Everything from 3 on closes at execve, then the wanted ones are opened to it again. */
static int hide_other_fds(const struct spawn_request *r) {
  if (syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC) < 0) return -1;
  for (int i = 0; i < r->fd_count; i++)
    if (fcntl(r->fds[i].target, F_SETFD, 0) < 0) return -1;
  return 0;
}

static int set_limits(const struct spawn_request *r) {
  for (int i = 0; i < r->limit_count; i++)
    if (setrlimit(r->limits[i].resource, &r->limits[i].value) < 0) return -1;
  return 0;
}

/* Handlers of the parent must not run in its memory on the child's behalf, and ignored signals would pass execve.
 *
 * A raw system call: glibc's wrapper refuses its internal signals 32 and 33, which its own posix_spawn leaves ignored in
 * every child (so below make, for one, we have inherited that). All zero is SIG_DFL with no flags in the kernel's
 * struct, whose size the mask's 8 bytes are part of. */
static void reset_signals(void) {
  const unsigned long action[4] = {0};
  for (int number = 1; number < NSIG; number++)
    if (number != SIGKILL && number != SIGSTOP) syscall(SYS_rt_sigaction, number, action, NULL, 8);
}

static int run_steps(struct spawn_request *r) {
  reset_signals();
  if (r->new_session && setsid() < 0) return SPAWN_SETSID;
  if (join_cgroups(r) < 0) return SPAWN_CGROUP;
  if (r->oom_score_adj && write_oom_score(r->oom_score_adj) < 0) return SPAWN_OOM;
  if (map_fds(r) < 0) return SPAWN_FDS;
  if (hide_other_fds(r) < 0) return SPAWN_CLOSE_RANGE;
  if (r->cwd && chdir(r->cwd) < 0) return SPAWN_CWD;
  if (set_limits(r) < 0) return SPAWN_RLIMIT;
  if (r->change_user) {
    if (syscall(SYS_setgroups, r->group_count, r->groups) < 0) return SPAWN_GROUPS;
    if (syscall(SYS_setresgid, r->gid, r->gid, r->gid) < 0) return SPAWN_GID;
    if (syscall(SYS_setresuid, r->uid, r->uid, r->uid) < 0) return SPAWN_UID;
  }
  if (r->no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) return SPAWN_NO_NEW_PRIVS;
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  execve(r->path, r->argv, r->envp);
  return SPAWN_EXEC;
}

static int child_main(void *argument) {
  struct spawn_request *r = argument;
  int step = run_steps(r);
  r->error = errno;
  r->step = step;
  _exit(127);
}

pid_t spawn_process(struct spawn_request *r, int *pidfd) {
  r->step = SPAWN_OK;
  r->error = 0;
  *pidfd = -1;
  char *stack = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) {
    r->step = SPAWN_CLONE;
    r->error = errno;
    return -1;
  }
  /* No signal may reach the child before its handlers are reset. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pid_t pid = clone(child_main, stack + STACK_SIZE, CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, r, pidfd);
  int error = errno;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  munmap(stack, STACK_SIZE);
  if (pid < 0) {
    r->step = SPAWN_CLONE;
    r->error = error;
    return -1;
  }
  if (r->step != SPAWN_OK) {
    siginfo_t info;
    while (waitid(P_PIDFD, (id_t)*pidfd, &info, WEXITED) < 0 && errno == EINTR) {
    }
    close(*pidfd);
    *pidfd = -1;
    return -1;
  }
  return pid;
}
