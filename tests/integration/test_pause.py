"""Pause and resume: what was running goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import time

import pytest
from e2b import Sandbox, SandboxException

from aenv.snapshot.compaction import DEPTH_LIMIT
from tests.integration.conftest import LISTENS, Daemon, NewDaemon, wait_until

pytestmark = pytest.mark.vm

CYCLES = 20


@pytest.fixture(scope="module", params=[0, 8], ids=["ended", "parked"])
def daemon(module_daemons: NewDaemon, request: pytest.FixtureRequest) -> Daemon:
    """One that ends the machines of paused sandboxes, and one that parks them."""
    return module_daemons(AENV_VMM_PARKED=str(request.param)).start()


def parks(daemon: Daemon) -> bool:
    return daemon.environment["AENV_VMM_PARKED"] != "0"


# Counts in memory only; answers with its number and what it was told at its start.
COUNTER = """
import os, time
n, secret = 0, os.urandom(1 << 20)
import hashlib
while True:
    n += 1
    with open("/tmp/count.new", "w") as f:
        f.write(f"{n} {os.getpid()} {hashlib.sha256(secret).hexdigest()}")
    os.rename("/tmp/count.new", "/tmp/count")
    time.sleep(0.05)
"""


def counter(sandbox: Sandbox) -> tuple[int, str]:
    number, rest = sandbox.files.read("/tmp/count").split(" ", 1)
    return int(number), rest


def start_counter(sandbox: Sandbox) -> int:
    sandbox.files.write("/home/user/counter.py", COUNTER)
    pid = sandbox.commands.run("exec python3 counter.py", background=True, timeout=0).pid
    sandbox.commands.run("until test -e /tmp/count; do sleep 0.05; done")
    return pid


def test_memory_processes_and_files_survive(daemon: Daemon) -> None:
    sandbox = daemon.create()
    pid = start_counter(sandbox)
    boot = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    sandbox.files.write("/home/user/kept", "before")
    sandbox.commands.run("echo unsynced > /dev/shm/page")
    number, identity = counter(sandbox)
    vmm = daemon.vmm_of(sandbox)

    sandbox.pause()
    assert daemon.list()[sandbox.sandbox_id] == "paused"
    assert not sandbox.is_running()
    if not parks(daemon):
        wait_until(lambda: vmm not in daemon.vmms(), "end of its process")
    with pytest.raises(SandboxException):
        sandbox.commands.run("true", request_timeout=20)

    again = daemon.connect(sandbox.sandbox_id)
    try:
        assert again.sandbox_id == sandbox.sandbox_id
        assert (daemon.vmm_of(again) == vmm) == parks(daemon)
        later, same = counter(again)
        assert (later >= number, same) == (True, identity), "the same process with the same memory"
        wait_until(lambda: counter(again)[0] > later, "progress of the counter")
        assert pid in [p.pid for p in again.commands.list()]
        assert again.files.read("/home/user/kept") == "before"
        assert again.commands.run("cat /dev/shm/page /proc/sys/kernel/random/boot_id").stdout == f"unsynced\n{boot}"
    finally:
        again.kill()


def test_what_must_be_right_or_new_after_resume(daemon: Daemon) -> None:
    sandbox = daemon.create()
    try:
        before = sandbox.commands.run("hostname; cat /etc/machine-id").stdout
        sandbox.pause()
        sandbox = daemon.connect(sandbox.sandbox_id)
        asked = time.time()
        told = float(sandbox.commands.run("date +%s.%N").stdout)
        assert asked - 1 < told < time.time() + 1, "the clock is right again"
        assert sandbox.commands.run("hostname; cat /etc/machine-id").stdout == before, "it is the same sandbox"
    finally:
        sandbox.kill()


def test_no_random_number_is_seen_again_after_resumes_of_one_pause(daemon: Daemon) -> None:
    """A pause is resumed once; what followed the template's snapshot and what follows a pause never repeats."""
    sandbox = daemon.create()
    seen = []
    try:
        for _ in range(3):
            seen.append(sandbox.commands.run("head -c 24 /dev/urandom | base64").stdout)
            sandbox.pause()
            sandbox = daemon.connect(sandbox.sandbox_id)
        assert len(set(seen)) == 3
    finally:
        sandbox.kill()


def test_many_cycles(daemon: Daemon) -> None:
    """Memory and disk are checked in each; what a cycle leaves must not add up."""
    sandbox = daemon.create()
    try:
        start_counter(sandbox)
        number, identity = counter(sandbox)
        sums = ""
        for cycle in range(CYCLES):
            disk, memory = f"/home/user/disk-{cycle}", f"/dev/shm/memory-{cycle}"
            sandbox.commands.run(
                f"head -c 200000 /dev/urandom > {disk}; head -c 50000 /dev/urandom > {memory}; "
                f"sha256sum {disk} {memory} >> /home/user/sums"
            )
            sums = sandbox.files.read("/home/user/sums")
            sandbox.pause()
            sandbox = daemon.connect(sandbox.sandbox_id)
            assert sandbox.files.read("/home/user/sums") == sums
            later, same = counter(sandbox)
            assert (later >= number, same) == (True, identity)
            number = later
        assert len(sums.splitlines()) == 2 * CYCLES
        done = sandbox.commands.run(
            "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches >/dev/null; sha256sum -c --quiet sums"
        )
        assert done.exit_code == 0, "on the disk, not only in the guest's cache"
        folder = daemon.home.sandboxes / sandbox.sandbox_id
        assert not list(folder.glob("*.state")), "of use only with the memory as it was"
        # Of disk and memory: the template's layer, the layers above it before some are merged, and what is open.
        most = 2 * (1 + DEPTH_LIMIT + 2)
        wait_until(lambda: len(list(folder.glob("*.lsmt"))) <= most, "merging of layers")
        wait_until(lambda: len(daemon.vmms()) <= 6, "end of former processes")
    finally:
        sandbox.kill()


def test_auto_pause_at_the_time_out(daemon: Daemon) -> None:
    sandbox = daemon.create(timeout=300, lifecycle={"on_timeout": "pause"})
    try:
        sandbox.commands.run("echo kept > /dev/shm/word")
        sandbox.set_timeout(1)
        end = time.time() + 1
        wait_until(lambda: daemon.list()[sandbox.sandbox_id] == "paused", "its pause")
        assert time.time() - end < 6, "a second on an idle machine"
        sandbox = daemon.connect(sandbox.sandbox_id)
        assert sandbox.commands.run("cat /dev/shm/word").stdout == "kept\n"
        assert sandbox.get_info().lifecycle["on_timeout"] == "pause"
    finally:
        sandbox.kill()


def test_auto_resume_on_traffic(daemon: Daemon) -> None:
    sandbox = daemon.create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        sandbox.files.write("site/index.html", "awake")
        sandbox.commands.run("exec python3 -m http.server 8000 -d site", background=True, timeout=0)
        sandbox.commands.run(LISTENS)
        sandbox.pause()
        assert daemon.get(sandbox, 8000, "/index.html") == (200, b"awake")
        assert daemon.list()[sandbox.sandbox_id] == "running"
        sandbox.pause()
        assert sandbox.commands.run("echo woken").stdout == "woken\n", "the SDK's calls are traffic too"
    finally:
        sandbox.kill()


def test_pause_of_the_disk_only(daemon: Daemon) -> None:
    """Resuming is a boot: files stay, memory does not."""
    sandbox = daemon.create()
    try:
        sandbox.commands.run("echo disk > /home/user/word; echo memory > /dev/shm/word; sync")
        boot = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
        sandbox.pause(mode="filesystem")
        sandbox = daemon.connect(sandbox.sandbox_id)
        assert sandbox.commands.run("cat /home/user/word").stdout == "disk\n"
        assert not sandbox.files.exists("/dev/shm/word")
        assert sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout != boot
        assert sandbox.commands.run("hostname").stdout.strip() == sandbox.sandbox_id
    finally:
        sandbox.kill()


def test_a_paused_sandbox_can_be_killed_and_is_paused_once(daemon: Daemon) -> None:
    sandbox = daemon.create()
    assert sandbox.pause() is True
    assert daemon.request("POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {})[0] == 409
    assert daemon.request("POST", f"/sandboxes/{sandbox.sandbox_id}/timeout", {"timeout": 5})[0] in (404, 409)
    assert sandbox.kill() is True
    assert sandbox.sandbox_id not in daemon.list()
    assert not (daemon.home.sandboxes / sandbox.sandbox_id).exists()


@pytest.mark.parametrize("killed", ["machine", "daemon", "block server"])
def test_what_is_parked_may_go_at_any_moment(new_daemon: NewDaemon, killed: str) -> None:
    """A pause is in files: its process only saves time."""
    daemon = new_daemon(AENV_VMM_PARKED="8").start()
    sandbox = daemon.create()
    vmm = daemon.vmm_of(sandbox)
    sandbox.commands.run("echo memory > /dev/shm/word; echo disk > /home/user/word")
    sandbox.pause()
    assert vmm in daemon.vmms()
    if killed == "machine":
        os.kill(vmm, signal.SIGKILL)
    elif killed == "daemon":
        daemon.crash()
        daemon.start()
        assert vmm not in daemon.vmms()
    else:
        server = daemon.block_server()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: daemon.block_server(besides=server), "another block server")
    again = daemon.connect(sandbox.sandbox_id)
    assert again.commands.run("cat /dev/shm/word /home/user/word").stdout == "memory\ndisk\n"
    again.pause()
    again = daemon.connect(sandbox.sandbox_id)
    assert again.commands.run("cat /dev/shm/word /home/user/word").stdout == "memory\ndisk\n"
    again.kill()
    assert daemon.stop() == 0


def test_a_parked_machine_has_its_time(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(AENV_VMM_PARKED="1", AENV_VMM_PARKED_TIME="1").start()
    first, second = daemon.create(), daemon.create()
    vmms = [daemon.vmm_of(first), daemon.vmm_of(second)]
    first.pause()
    second.pause()
    wait_until(lambda: not set(vmms) & set(daemon.vmms()), "end of both, of one for the other and of one by itself")
    for sandbox in (first, second):
        again = daemon.connect(sandbox.sandbox_id)
        assert again.commands.run("echo fine").stdout == "fine\n"
        again.kill()
