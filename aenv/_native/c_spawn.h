/* Start of a process without a copy of the parent's address space. See c_spawn.c. */
#ifndef AENV_SPAWN_H
#define AENV_SPAWN_H

#include <sys/resource.h>
#include <sys/types.h>

/* The steps of the child, in order; the failing one is reported to the parent. */
enum spawn_step {
  SPAWN_OK = 0,
  SPAWN_CLONE,
  SPAWN_SETSID,
  SPAWN_CGROUP,
  SPAWN_OOM,
  SPAWN_FDS,
  SPAWN_CLOSE_RANGE,
  SPAWN_CWD,
  SPAWN_RLIMIT,
  SPAWN_GROUPS,
  SPAWN_GID,
  SPAWN_UID,
  SPAWN_NO_NEW_PRIVS,
  SPAWN_EXEC,
};

struct spawn_fd {
  int source; /* descriptor in the parent; overwritten by the child with a scratch number */
  int target; /* its number in the new program */
};

struct spawn_limit {
  int resource;
  struct rlimit value;
};

/* Everything the child needs, made ready before the clone: it runs on borrowed memory and must not allocate. */
struct spawn_request {
  const char *path;
  char *const *argv;
  char *const *envp;
  const char *cwd; /* NULL: inherit */
  struct spawn_fd *fds;
  int fd_count;
  const int *cgroup_fds; /* open cgroup.procs files */
  int cgroup_count;
  const char *oom_score_adj; /* decimal text, NULL: inherit */
  const struct spawn_limit *limits;
  int limit_count;
  int change_user;
  uid_t uid;
  gid_t gid;
  const gid_t *groups; /* supplementary */
  int group_count;
  int no_new_privs;
  int new_session;
  /* results */
  int step;  /* enum spawn_step that failed */
  int error; /* its errno */
};

/* Returns the pid and sets *pidfd (close-on-exec), or -1 with request->step and ->error set and no child left. */
pid_t spawn_process(struct spawn_request *request, int *pidfd);

#endif
