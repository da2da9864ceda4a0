"""Starting, watching and adopting processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import stat
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aenv._native import spawn as native
from aenv.errors import NotFoundError, UnavailableError
from aenv.vmm.spawn import (
    Process,
    User,
    exit_reason,
    find_binary,
    process_start_time,
    run,
    run_sync,
    set_background,
    spawn,
    start,
)

SHELL = "/bin/sh"


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """Run a coroutine on either loop: both must see our children end, and neither may reap them for us."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def call(main: Awaitable[Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main)  # type: ignore[arg-type]

    return call


@pytest.fixture(scope="module", autouse=True)
def _uvloop_is_warm():
    """The first loop of a process opens a signal pipe that stays."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def _no_leaks():
    """No descriptor and no child may be left."""
    before = len(os.listdir("/proc/self/fd")), children()
    yield
    assert (len(os.listdir("/proc/self/fd")), children()) == before


def children() -> set[str]:
    """Our child processes, zombies too; other tests' fixtures may have some that stay."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found.update((task / "children").read_text().split())
    return found


def test_run_returns_output_and_status(loop_run):
    done = loop_run(run([SHELL, "-c", "cat; echo problem >&2; exit 3"], input=b"x" * 3_000_000, check=False))
    assert (done.status, len(done.stdout), done.stderr) == (3, 3_000_000, b"problem\n")


def test_run_failure_names_command_and_last_words(loop_run):
    with pytest.raises(UnavailableError, match=r"`/bin/sh -c .*` exited with status 4: it broke"):
        loop_run(run([SHELL, "-c", "echo it broke >&2; exit 4"]))


def test_run_kills_on_timeout_and_on_cancel(loop_run):
    with pytest.raises(UnavailableError, match=r"did not end within 0\.05 s: started"):
        loop_run(run([SHELL, "-c", "echo started; exec sleep 60"], timeout=0.05))

    async def cancelled() -> None:
        task = asyncio.create_task(run(["sleep", "60"]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop_run(cancelled())


def test_run_sync_is_the_same_without_a_loop():
    assert run_sync([SHELL, "-c", "cat"], input=b"in").stdout == b"in"
    with pytest.raises(UnavailableError, match="exited with status 1"):
        run_sync(["false"])
    with pytest.raises(UnavailableError, match="did not end"):
        run_sync(["sleep", "60"], timeout=0.05)


def test_missing_program_hints_at_the_package(monkeypatch):
    monkeypatch.setattr("aenv.vmm.spawn.SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="apt-get install qemu-utils"):
        find_binary("qemu-img")
    with pytest.raises(UnavailableError, match="PATH"):
        run_sync(["no-such-tool"])


def test_program_that_cannot_be_executed(tmp_path: Path):
    with pytest.raises(UnavailableError, match="execve: No such file"):
        start([tmp_path / "none"])
    (tmp_path / "text").write_text("plain")
    with pytest.raises(UnavailableError, match="execve: Permission denied"):
        start([tmp_path / "text"])


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"cwd": b"/no/such/dir"}, "chdir"),
        ({"cgroups": [999_999]}, "cgroup"),
        ({"oom_score_adj": 5000}, "oom_score_adj"),
        ({"limits": [(resource.RLIMIT_NOFILE, 2, 1)]}, "setrlimit"),
        ({"limits": [(9999, 1, 1)]}, "setrlimit"),
    ],
)
def test_failing_step_is_named(options: dict[str, Any], step: str):
    with pytest.raises(OSError, match=f"{step}: "):
        native.spawn(b"/bin/true", [b"true"], [], [], **options)


def test_bad_descriptors_and_zero_bytes_are_refused():
    with pytest.raises(OSError, match="fds: Bad file"):
        native.spawn(b"/bin/true", [b"true"], [], [(999_999, 0)])
    for bad in ((-1, 0), (0, -1), (0, 10**6)):
        with pytest.raises(ValueError, match="descriptor"):
            native.spawn(b"/bin/true", [b"true"], [], [bad])
    for argv, env in (([b"a\0b"], []), ([b"true"], [b"A=\0"])):
        with pytest.raises(ValueError, match="zero byte"):
            native.spawn(b"/bin/true", argv, env, [])


def test_child_sees_only_the_named_descriptors(loop_run):
    """Also when sources and targets are swapped or equal."""
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.set_inheritable(first, True)
    extra = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(extra, True)
    try:
        script = 'for n in /proc/self/fd/*; do echo "${n##*/} $(readlink $n)"; done'
        done = loop_run(run([SHELL, "-c", script], fds={first: second, second: first, 50: first}))
    finally:
        for fd in (first, second, extra):
            os.close(fd)
    seen = dict(line.split(" ", 1) for line in done.stdout.decode().splitlines() if " /" in line)
    assert {int(n) for n, path in seen.items() if "first" in path} == {second, 50}
    assert {int(n) for n, path in seen.items() if "second" in path} == {first}
    assert str(extra) not in seen or extra in (first, second)


def test_child_has_clean_signals_session_and_environment(loop_run):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        done = loop_run(
            run(["cat", "/proc/self/status", "/proc/self/stat", "/proc/self/environ"], env={"ONLY": "this"})
        )
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    *status, stat_line, environ = done.stdout.decode().splitlines()
    fields = dict(line.split(":\t", 1) for line in status)
    assert int(fields["SigBlk"], 16) == int(fields["SigIgn"], 16) == 0
    assert environ == "ONLY=this\0"
    assert stat_line.split()[0] == stat_line.split()[5], "leader of its own session"


def test_child_has_clean_signals_below_a_parent_that_has_not(tmp_path: Path):
    """glibc's posix_spawn leaves the signals 32 and 33 ignored: so it is below make."""
    program = "from aenv.vmm.spawn import run_sync; print(run_sync(['cat', '/proc/self/status']).stdout.decode())"
    out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    arguments = [sys.executable, "-c", program]
    pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])
    assert os.waitpid(pid, 0)[1] == 0
    os.close(out)
    fields = dict(line.split(":\t", 1) for line in (tmp_path / "out").read_text().splitlines() if ":\t" in line)
    assert int(fields["SigBlk"], 16) == int(fields["SigIgn"], 16) == 0


def test_background_and_back(loop_run):
    async def main() -> list[int]:
        child = spawn([SHELL, "-c", "kill -STOP $$"])
        policies = [os.sched_getscheduler(child.pid)]
        for background in (True, False):
            set_background(child.pid, background)
            policies.append(os.sched_getscheduler(child.pid))
        await child.kill()
        set_background(child.pid, True)  # it is gone: nothing happens
        return policies

    assert loop_run(main()) == [os.SCHED_OTHER, os.SCHED_IDLE, os.SCHED_OTHER]


def test_cpu_time_is_that_of_all_threads_and_stands_still_while_it_waits(loop_run):
    async def main() -> None:
        busy = "import threading; [threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start() for _ in '12']"
        child = spawn([sys.executable, "-c", busy])
        while child.cpu_time() < 50_000_000:
            await asyncio.sleep(0.01)
        child.signal(signal.SIGSTOP)
        used = 0
        while used != child.cpu_time():  # its threads stop one after the other
            used = child.cpu_time()
            await asyncio.sleep(0.02)
        assert used >= 50_000_000
        await child.kill()
        assert child.cpu_time() == 0

    loop_run(main())


@pytest.mark.root
def test_child_runs_as_the_unprivileged_user(loop_run, tmp_path: Path):
    log = tmp_path / "log"

    async def main() -> None:
        user = User(1_900_000_000, 1_900_000_001, (7, 8))
        child = spawn(["cat", "/proc/self/status"], user=user, log=log, oom_score_adj=500)
        assert await child.wait() == 0

    loop_run(main())
    fields = dict(line.split(":\t", 1) for line in log.read_text().splitlines())
    assert set(fields["Uid"].split()) == {"1900000000"}
    assert set(fields["Gid"].split()) == {"1900000001"}
    assert fields["Groups"].split() == ["7", "8"]
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert os.getuid() == 0, "the parent keeps its identity"
    with open("/proc/self/oom_score_adj") as f:
        assert f.read().strip() == "0", "the parent keeps its score"


def test_exit_is_seen_with_its_reason(loop_run):
    async def main() -> None:
        quick = spawn([SHELL, "-c", "exit 7"])
        killed = spawn(["sleep", "60"])
        stubborn = spawn([SHELL, "-c", "trap '' TERM; echo; while :; do sleep 1; done"])
        assert await quick.wait() == 7
        assert not quick.alive
        quick.signal(signal.SIGKILL)  # a no-op by now
        killed.signal(signal.SIGTERM)
        assert await killed.wait() == -signal.SIGTERM
        assert await stubborn.kill() == -signal.SIGKILL
        assert exit_reason(7) == "exited with status 7"
        assert exit_reason(-9) == "was killed by SIGKILL"
        assert "unknown" in exit_reason(None)

    loop_run(main())


def test_children_of_the_loop_are_not_disturbed(loop_run):
    """Our children and those of the loop's own subprocess support each get their own status."""

    async def main() -> None:
        ours = [spawn([SHELL, "-c", f"exit {n}"]) for n in range(10)]
        theirs = [await asyncio.create_subprocess_exec(SHELL, "-c", f"exit {n + 20}") for n in range(5)]
        assert [await p.wait() for p in ours] == list(range(10))
        assert [await p.wait() for p in theirs] == [20, 21, 22, 23, 24]

    loop_run(main())


def test_adopting_a_process_that_is_not_our_child(loop_run, tmp_path: Path):
    async def main() -> None:
        await run([SHELL, "-c", f"sleep 60 & echo $! > {tmp_path}/pid"])
        pid = int((tmp_path / "pid").read_text())
        adopted = Process.adopt(pid, process_start_time(pid))
        with pytest.raises(NotFoundError, match="another"):
            Process.adopt(pid, adopted.start_time + 1)
        adopted.signal(signal.SIGKILL)
        assert await adopted.wait() is None
        with pytest.raises(NotFoundError):
            Process.adopt(pid, adopted.start_time)

    # A subreaper would make it our child again; without one init takes it.
    loop_run(main())


def test_detached_process_goes_on(loop_run):
    async def main() -> int:
        process = spawn(["sleep", "60"])
        process.detach()
        assert process_start_time(process.pid) == process.start_time
        return process.pid

    pid = loop_run(main())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_spawning_from_many_threads(loop_run):
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(20):
                assert run_sync([SHELL, "-c", f"exit {n}"], check=False).status == n
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
