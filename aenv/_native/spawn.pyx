"""Cython shell of c_spawn.c: turns Python values into one C request and runs it without the GIL."""

from libc.stdlib cimport calloc, free
from posix.types cimport gid_t, pid_t, uid_t

import os


cdef extern from "sys/resource.h" nogil:
    ctypedef unsigned long rlim_t
    struct rlimit:
        rlim_t rlim_cur
        rlim_t rlim_max


cdef extern from "c_spawn.h" nogil:
    struct spawn_fd:
        int source
        int target

    struct spawn_limit:
        int resource
        rlimit value

    struct spawn_request:
        const char *path
        char **argv
        char **envp
        const char *cwd
        spawn_fd *fds
        int fd_count
        const int *cgroup_fds
        int cgroup_count
        const char *oom_score_adj
        const spawn_limit *limits
        int limit_count
        int change_user
        uid_t uid
        gid_t gid
        const gid_t *groups
        int group_count
        int no_new_privs
        int new_session
        int step
        int error

    pid_t spawn_process(spawn_request *request, int *pidfd)


# In the order of enum spawn_step.
STEPS = (
    "ok", "clone", "setsid", "cgroup", "oom_score_adj", "fds", "close_range", "chdir", "setrlimit", "setgroups",
    "setresgid", "setresuid", "no_new_privs", "execve",
)

# Room for any table a caller has a use for; a bound keeps the C arithmetic trivially safe.
LIMIT = 100_000


cdef void *_zeroed(size_t count, size_t size) except NULL:
    cdef void *memory = calloc(count + 1, size)
    if memory == NULL:
        raise MemoryError
    return memory


def spawn(
    bytes path not None, list argv not None, list envp not None, list fds not None, *, bytes cwd=None,
    cgroups=(), oom_score_adj=None, limits=(), user=None, bint no_new_privs=True, bint new_session=True,
):
    """Start `path`; returns (pid, pidfd). See aenv.vmm.spawn for the typed interface.

    Raises OSError whose `filename` is the path and whose text names the step that failed.
    """
    cgroups, limits = list(cgroups), list(limits)
    groups = [] if user is None else list(user[2])
    if max(len(argv), len(envp), len(fds), len(cgroups), len(limits), len(groups)) > LIMIT:
        raise ValueError("too many arguments")
    cdef bytes item
    for item in (*argv, *envp, path, *(() if cwd is None else (cwd,))):
        if b"\0" in item:
            raise ValueError(f"zero byte in {item!r}")
    cdef bytes oom = None if oom_score_adj is None else b"%d" % oom_score_adj
    cdef spawn_request request
    cdef int pidfd = -1
    cdef pid_t pid
    cdef char **c_argv = NULL
    cdef char **c_envp = NULL
    cdef spawn_fd *c_fds = NULL
    cdef int *c_cgroups = NULL
    cdef spawn_limit *c_limits = NULL
    cdef gid_t *c_groups = NULL
    cdef Py_ssize_t i
    try:
        c_argv = <char **>_zeroed(len(argv), sizeof(char *))
        c_envp = <char **>_zeroed(len(envp), sizeof(char *))
        c_fds = <spawn_fd *>_zeroed(len(fds), sizeof(spawn_fd))
        c_cgroups = <int *>_zeroed(len(cgroups), sizeof(int))
        c_limits = <spawn_limit *>_zeroed(len(limits), sizeof(spawn_limit))
        c_groups = <gid_t *>_zeroed(len(groups), sizeof(gid_t))
        for i in range(len(groups)):
            c_groups[i] = groups[i]
        for i in range(len(argv)):
            c_argv[i] = <bytes>argv[i]
        for i in range(len(envp)):
            c_envp[i] = <bytes>envp[i]
        for i in range(len(fds)):
            c_fds[i].source, c_fds[i].target = fds[i]
            if c_fds[i].source < 0 or not 0 <= c_fds[i].target < LIMIT:
                raise ValueError(f"bad descriptor mapping {fds[i]}")
        for i in range(len(cgroups)):
            c_cgroups[i] = cgroups[i]
        for i in range(len(limits)):
            c_limits[i].resource, c_limits[i].value.rlim_cur, c_limits[i].value.rlim_max = limits[i]
        request.path = path
        request.argv, request.envp = c_argv, c_envp
        request.cwd = NULL
        if cwd is not None:
            request.cwd = cwd
        request.fds, request.fd_count = c_fds, <int>len(fds)
        request.cgroup_fds, request.cgroup_count = c_cgroups, <int>len(cgroups)
        request.oom_score_adj = NULL
        if oom is not None:
            request.oom_score_adj = oom
        request.limits, request.limit_count = c_limits, <int>len(limits)
        request.change_user = user is not None
        request.uid, request.gid = (0, 0) if user is None else user[:2]
        request.groups, request.group_count = c_groups, <int>len(groups)
        request.no_new_privs, request.new_session = no_new_privs, new_session
        with nogil:
            pid = spawn_process(&request, &pidfd)
    finally:
        free(c_argv)
        free(c_envp)
        free(c_fds)
        free(c_cgroups)
        free(c_limits)
        free(c_groups)
    if pid < 0:
        raise OSError(request.error, f"{STEPS[request.step]}: {os.strerror(request.error)}", os.fsdecode(path))
    return pid, pidfd
