"""A guest with several processors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import Sandbox

from tests.integration.conftest import Daemon, NewDaemon, wait_until

pytestmark = pytest.mark.vm

# The kernel rewrites its scheduler while both processors run it: each of these switches is a static key.
LIVE_PATCHES = """
for i in 1 2 3; do while :; do /bin/true; done & done
for i in $(seq 100); do
    for on in 1 0; do
        echo $on > /proc/sys/kernel/sched_schedstats
        echo $on > /proc/sys/kernel/task_delayacct
    done
done
kill $(jobs -p)
"""
# Threads of one process write code and run it: a page of machine code returns a number that changes.
SELF_MODIFYING = """
import ctypes, mmap, threading
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
call = ctypes.CFUNCTYPE(ctypes.c_int)(address)
page[:6] = b"\\xb8" + (0).to_bytes(4, "little") + b"\\xc3"  # mov eax, 0; ret
written, wrong, over = 0, [], threading.Event()
def reader():
    while not over.is_set():
        before = written
        got = call()
        if not before <= got <= written + 1:
            wrong.append((before, got, written))
threads = [threading.Thread(target=reader) for _ in range(2)]
for thread in threads: thread.start()
for number in range(1, 2000):
    ctypes.c_int.from_address(address + 1).value = number
    written = number
over.set()
for thread in threads: thread.join()
print(wrong[:3], call())
"""
CLOCKS = """
for c in 0 1; do
    taskset -c $c sh -c "while :; do date +%s%N > /tmp/tick.new-$c; mv /tmp/tick.new-$c /tmp/tick-$c; done" &
done
wait
"""


@pytest.fixture(scope="module")
def two(module_daemons: NewDaemon) -> Iterator[Sandbox]:
    daemon: Daemon = module_daemons()
    built = daemon.aenv("template", "build", "base", "--cpu", "2", "--force")
    assert built.returncode == 0, built.stderr
    sandbox = daemon.start().create()
    yield sandbox
    sandbox.kill()


def test_it_has_them(two: Sandbox) -> None:
    assert two.commands.run("nproc").stdout == "2\n"
    assert two.get_info().cpu_count == 2


def test_the_kernel_may_patch_itself(two: Sandbox) -> None:
    two.commands.run(LIVE_PATCHES, user="root", timeout=60)
    assert two.commands.run("dmesg | grep -c Oops || true", user="root").stdout == "0\n"


def test_a_program_may_patch_itself(two: Sandbox) -> None:
    two.files.write("/tmp/patch.py", SELF_MODIFYING)
    assert two.commands.run("python3 /tmp/patch.py", timeout=60).stdout == "[] 1999\n"


def test_both_go_on_after_a_pause(two: Sandbox) -> None:
    running = two.commands.run(CLOCKS, background=True)
    wait_until(lambda: all(two.files.exists(f"/tmp/tick-{c}") for c in (0, 1)), "both processors at work")
    two.pause()
    two.connect()
    before = [two.files.read(f"/tmp/tick-{c}") for c in (0, 1)]
    wait_until(lambda: all(two.files.read(f"/tmp/tick-{c}") != before[c] for c in (0, 1)), "both going on")
    running.kill()
    two.commands.run("pkill -f tick-")


def test_its_children_have_them(two: Sandbox) -> None:
    children = two.fork(count=2, timeout=60)
    try:
        assert [child.commands.run("nproc").stdout for child in children] == ["2\n", "2\n"]
    finally:
        for child in children:
            child.kill()
