"""The single way to start a process.

`find_binary` finds a program, `run` waits for a short tool and returns its output, `spawn` starts a long-lived process
and gives a `Process` that is watched by pidfd. A `Process` may also be one that an earlier daemon started (`adopt`).
Children share the daemon's memory until execve (vfork semantics, see `_native/c_spawn.c`), start in their own session
and inherit only the descriptors that are named.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from aenv._native import spawn as native
from aenv.errors import NotFoundError, UnavailableError

# Program → Debian package, for the hint when it is missing.
PACKAGES = {
    "apt-get": "apt",
    "busybox": "busybox-static",
    "debugfs": "e2fsprogs",
    "dpkg-deb": "dpkg",
    "e2fsck": "e2fsprogs",
    "mke2fs": "e2fsprogs",
    "mkfs.ext4": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "resize2fs": "e2fsprogs",
    "tar": "tar",
}
# What the administration tools live in and a user's PATH may lack.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_LIMIT = 64 << 20  # bytes of a tool's output that are read back
# include/linux/posix-timers.h: the clock of a process's CPU time has its pid, inverted, above these three bits.
CPUCLOCK_SCHED = 2
ERROR_TAIL = 2000  # characters of its last words in an error message

Command = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class User:
    """Numeric identity of a process; `groups` are the supplementary ones."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A tool that has ended. `status` is the exit status, or minus the signal that killed it."""

    status: int
    stdout: bytes
    stderr: bytes


def find_binary(name: str) -> Path:
    """The absolute path of a program. Raises UnavailableError naming the package that has it."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if found is None:
        package = PACKAGES.get(name)
        hint = f"install it: apt-get install {package}" if package else "install it, or put its directory into PATH"
        raise UnavailableError(f"the program {name} is not on this machine", hint=hint)
    return Path(found).absolute()


def process_start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat in clock ticks: with the pid it names one process for ever.

    Raises NotFoundError when there is no such process, or only its zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFoundError(f"there is no process {pid}") from error
    # The name in field 2 may hold spaces and parentheses: fields are counted from the last one.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        raise NotFoundError(f"process {pid} has ended")
    return int(fields[19])


def processes_in(directory: Path) -> list[tuple[int, int]]:
    """(pid, start time) of every process whose working directory is `directory`: how a VMM of a daemon that was killed
    is found, because it was started with its run directory as working directory."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, NotFoundError):
                if os.readlink(f"/proc/{entry.name}/cwd") == str(directory.resolve()):
                    found.append((int(entry.name), process_start_time(int(entry.name))))
    return found


def set_background(pid: int, background: bool) -> None:
    """Let every thread of a process run only when nobody else wants the processor (SCHED_IDLE), or normally again.

    Linux keeps a policy per thread; new threads inherit it. No-op when the process has ended.
    """
    policy = os.SCHED_IDLE if background else os.SCHED_OTHER
    with suppress(FileNotFoundError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))


def exit_reason(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "ended (not our child: status unknown)"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class Process:
    """A watched process. `exited` is done as soon as it ends: with its status as in `Completed`, or None for one that
    is not our child. Must be used from the loop's thread. Owns its pidfd until the process ends or `detach`."""

    def __init__(self, pid: int, pidfd: int, start_time: int) -> None:
        self.pid = pid
        self.start_time = start_time
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    @classmethod
    def adopt(cls, pid: int, start_time: int) -> Process:
        """Watch a process started by someone else. Raises NotFoundError when exactly that one is gone."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise NotFoundError(f"there is no process {pid}") from error
        # Read after the pidfd is open: the number cannot be given to another process in between.
        try:
            if process_start_time(pid) != start_time:
                raise NotFoundError(f"process {pid} is another one by now")
            return cls(pid, pidfd, start_time)
        except BaseException:
            os.close(pidfd)
            raise

    def _on_exit(self) -> None:
        status: int | None = None
        try:
            status = reap(self._pidfd)
        finally:
            self._close()
        if not self.exited.done():
            self.exited.set_result(status)

    def _close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0

    def cpu_time(self) -> int:
        """Nanoseconds of CPU time that all its threads have used. 0 when the process has ended."""
        if self._pidfd < 0:
            return 0
        with suppress(OSError):  # it has just ended
            return time.clock_gettime_ns(~self.pid << 3 | CPUCLOCK_SCHED)
        return 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no-op when the process has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self) -> int | None:
        return await asyncio.shield(self.exited)

    async def kill(self) -> int | None:
        """SIGKILL and wait until it is gone."""
        self.signal(signal.SIGKILL)
        return await self.wait()

    async def terminate(self, grace: float) -> int | None:
        """SIGTERM, and SIGKILL after `grace` seconds."""
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), grace)
        return await self.kill()

    def detach(self) -> None:
        """Stop watching and leave it running. `exited` is cancelled."""
        self._close()
        self.exited.cancel()


def reap(pidfd: int) -> int | None:
    """Take the exit status of a child that has ended; None when it is not our child."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def start(
    argv: Command,
    *,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: User | None = None,
    log: Path | int | None = None,
    cgroups: Sequence[Path] = (),
    oom_score_adj: int | None = None,
    limits: Mapping[int, tuple[int, int]] | None = None,
    no_new_privs: bool = True,
) -> tuple[int, int]:
    """Start `argv` and return (pid, pidfd); the caller reaps it.

    `fds` maps a descriptor number of the new process to one of ours; 0 to 2 default to /dev/null, 1 and 2 to `log` (a
    descriptor, or a file that is appended to). `env` None gives only PATH and LANG. `cgroups` are directories to join.
    `limits` maps RLIMIT_* to (soft, hard); without one there are no core files. Raises UnavailableError when the
    program cannot be executed, else OSError naming the step.
    """
    program = str(argv[0])
    binary = Path(program) if "/" in program else find_binary(program)
    environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"} if env is None else env
    all_limits = {resource.RLIMIT_CORE: (0, 0)} | dict(limits or {})  # a core file would hold a guest's memory
    with ExitStack() as stack:

        def opened(path: Path | str, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            return fd

        mapping = dict(fds or {})
        if missing := {0, 1, 2} - mapping.keys():
            null = opened("/dev/null", os.O_RDWR)
            if isinstance(log, Path):
                log = opened(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for target in missing:
                mapping[target] = null if target == 0 or log is None else log
        try:
            return native.spawn(
                os.fsencode(binary),
                [os.fsencode(a) for a in argv],
                [os.fsencode(f"{k}={v}") for k, v in environment.items()],
                [(ours, theirs) for theirs, ours in mapping.items()],
                cwd=None if cwd is None else os.fsencode(cwd),
                cgroups=[opened(c / "cgroup.procs", os.O_WRONLY) for c in cgroups],
                oom_score_adj=oom_score_adj,
                limits=[(name, soft, hard) for name, (soft, hard) in all_limits.items()],
                user=None if user is None else (user.uid, user.gid, user.groups),
                no_new_privs=no_new_privs,
            )
        except OSError as error:
            if error.strerror and error.strerror.startswith("execve"):
                raise UnavailableError(f"the program {binary} cannot be started: {error.strerror}") from error
            raise


def spawn(
    argv: Command,
    *,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: User | None = None,
    log: Path | int | None = None,
    cgroups: Sequence[Path] = (),
    oom_score_adj: int | None = None,
    limits: Mapping[int, tuple[int, int]] | None = None,
    no_new_privs: bool = True,
) -> Process:
    """Start a long-lived process and watch it from the running loop. Arguments and errors as in `start`."""
    pid, pidfd = start(
        argv, fds=fds, env=env, cwd=cwd, user=user, log=log, cgroups=cgroups, oom_score_adj=oom_score_adj,
        limits=limits, no_new_privs=no_new_privs,
    )  # fmt: skip
    try:
        return Process(pid, pidfd, process_start_time(pid))
    except NotFoundError:
        # Already a zombie: the pidfd is readable and the watch reports it at once.
        return Process(pid, pidfd, 0)


class _Tool:
    """A short tool whose output goes into memory files: nothing has to be read while it runs."""

    def __init__(
        self,
        argv: Command,
        *,
        input: bytes,
        log: Path | int | None,
        fds: Mapping[int, int] | None,
        env: Mapping[str, str] | None,
        cwd: Path | None,
        user: User | None,
    ) -> None:
        self.argv = argv
        self._files = ExitStack()
        try:
            self._out, self._err, stdin = (self._memory_file(name) for name in ("stdout", "stderr", "stdin"))
            _write_all(stdin, input)
            os.lseek(stdin, 0, os.SEEK_SET)
            mapping = {0: stdin, 1: self._out} | ({2: self._err} if log is None else {}) | dict(fds or {})
            self.pid, self.pidfd = start(argv, fds=mapping, log=log, env=env, cwd=cwd, user=user, no_new_privs=False)
        except BaseException:
            self._files.close()
            raise

    def _memory_file(self, name: str) -> int:
        fd = os.memfd_create(name)
        self._files.callback(os.close, fd)
        return fd

    def finish(self, status: int, check: bool) -> Completed:
        with self._files:
            done = Completed(status, _read_all(self._out), _read_all(self._err))
        if check and status != 0:
            raise _failure(self.argv, exit_reason(status), done)
        return done

    def timed_out(self, timeout: float) -> UnavailableError:
        done = self.finish(0, check=False)
        return _failure(self.argv, f"did not end within {timeout:g} s", done)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    size = min(os.fstat(fd).st_size, OUTPUT_LIMIT)
    parts, offset = [], 0
    while offset < size and (part := os.pread(fd, size - offset, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _failure(argv: Command, what: str, done: Completed) -> UnavailableError:
    command = " ".join(os.fspath(a) for a in argv)
    said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")[-ERROR_TAIL:]
    return UnavailableError(f"`{command[:500]}` {what}" + (f": {said}" if said else ""))


async def run(
    argv: Command,
    *,
    timeout: float = 60,
    check: bool = True,
    input: bytes = b"",
    log: Path | int | None = None,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: User | None = None,
) -> Completed:
    """Run a tool to its end. Its stderr goes to `log` when that is given, else it is returned.

    Raises UnavailableError when the program is missing, when it does not end within `timeout` seconds (it is killed),
    and, with `check`, when it fails; the message holds the command and its last words. A cancelled call kills it.
    """
    tool = _Tool(argv, input=input, log=log, fds=fds, env=env, cwd=cwd, user=user)
    process = Process(tool.pid, tool.pidfd, 0)
    try:
        status = await asyncio.wait_for(process.wait(), timeout)
    except TimeoutError:
        await process.kill()
        raise tool.timed_out(timeout) from None
    except BaseException:
        await process.kill()
        tool.finish(0, check=False)
        raise
    assert status is not None
    return tool.finish(status, check)


def run_sync(
    argv: Command,
    *,
    timeout: float = 60,
    check: bool = True,
    input: bytes = b"",
    log: Path | int | None = None,
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    user: User | None = None,
) -> Completed:
    """`run` for code that has no event loop (the command line, build steps in a thread)."""
    tool = _Tool(argv, input=input, log=log, fds=fds, env=env, cwd=cwd, user=user)
    try:
        poll = select.poll()
        poll.register(tool.pidfd, select.POLLIN)
        deadline = time.monotonic() + timeout
        ended = False
        while not ended and (left := deadline - time.monotonic()) > 0:
            ended = bool(poll.poll(left * 1000))
        if not ended:
            signal.pidfd_send_signal(tool.pidfd, signal.SIGKILL)
            poll.poll()
        status = reap(tool.pidfd)
    except BaseException:
        signal.pidfd_send_signal(tool.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, tool.pidfd, os.WEXITED)
        tool.finish(0, check=False)
        raise
    finally:
        os.close(tool.pidfd)
    assert status is not None
    if not ended:
        raise tool.timed_out(timeout)
    return tool.finish(status, check)
