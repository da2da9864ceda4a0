"""Snapshots, forks and rollbacks of real guests: everything that runs goes on, in each of them on its own."""

from __future__ import annotations

import contextlib
import time

import pytest
from e2b import Sandbox, SandboxException

from tests.integration.conftest import LISTENS, Daemon, wait_until
from tests.integration.test_pause import counter, start_counter

pytestmark = pytest.mark.vm

CHILDREN = 4
IDENTITY = "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1"


def test_a_snapshot_branches_and_the_source_goes_on(daemon: Daemon) -> None:
    source = daemon.create()
    pid = start_counter(source)
    source.files.write("/home/user/kept", "before")
    before, identity = counter(source)
    snapshot = source.create_snapshot(name="branch", **daemon.options)
    source.files.write("/home/user/kept", "after")
    first, second = (Sandbox.create(snapshot.snapshot_id, **daemon.options) for _ in range(2))
    try:
        for box in (first, second):
            assert box.files.read("/home/user/kept") == "before"
            number, same = counter(box)
            assert number >= before
            assert same == identity
            assert str(pid) in box.commands.run("pgrep -f counter.py").stdout.split()
        first.files.write("/home/user/kept", "first")
        assert second.files.read("/home/user/kept") == "before"
        assert source.files.read("/home/user/kept") == "after"
        assert counter(source)[0] > before
    finally:
        for box in (first, second, source):
            box.kill()
    third = Sandbox.create("branch", **daemon.options)  # long after its source has gone
    try:
        assert third.files.read("/home/user/kept") == "before"
    finally:
        third.kill()
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **daemon.options)
        assert not Sandbox.delete_snapshot(snapshot.snapshot_id, **daemon.options)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("branch", **daemon.options)


def test_children_of_a_fork_share_the_past_and_nothing_else(daemon: Daemon) -> None:
    source = daemon.create()
    source.files.write("/home/user/page/index.html", "hello")
    source.commands.run("exec python3 -m http.server 8000 -d /home/user/page", background=True, timeout=0)
    source.commands.run(LISTENS)
    source.commands.run("echo unsynced > /dev/shm/page; exec 9>/tmp/open; echo one >&9")
    children = source.fork(count=CHILDREN, timeout=300)
    try:
        assert [type(child) for child in children] == [Sandbox] * CHILDREN
        assert len({source.sandbox_id, *(child.sandbox_id for child in children)}) == CHILDREN + 1
        told = [box.commands.run(IDENTITY).stdout.split("\n") for box in (source, *children)]
        for position in range(4):
            assert len({lines[position] for lines in told}) == CHILDREN + 1, f"line {position} is not unique: {told}"
        for box, lines in zip((source, *children), told, strict=True):
            assert lines[0] == box.sandbox_id
        for child in children:
            before = time.time()
            there = float(child.commands.run("date +%s.%N").stdout)
            assert before - 0.1 < there < time.time() + 0.1
            assert daemon.get(child, 8000, "/index.html") == (200, b"hello")
            assert child.files.read("/dev/shm/page") == "unsynced\n"
            child.files.write("/home/user/page/index.html", child.sandbox_id)
        for child in children:
            assert daemon.get(child, 8000, "/index.html") == (200, child.sandbox_id.encode())
        assert daemon.get(source, 8000, "/index.html") == (200, b"hello")
    finally:
        for box in (source, *children):
            box.kill()


def test_a_rollback_is_in_place(daemon: Daemon) -> None:
    sandbox = daemon.create()
    start_counter(sandbox)
    sandbox.files.write("/home/user/kept", "one")
    snapshot = sandbox.create_snapshot(**daemon.options)
    marked, identity = counter(sandbox)
    sandbox.files.write("/home/user/kept", "two")
    sandbox.commands.run("pkill -f [c]ounter.py; rm /tmp/count")
    for state in ("running", "paused"):
        if state == "paused":
            sandbox.pause()
        status, body = daemon.request(
            "POST", f"/sandboxes/{sandbox.sandbox_id}/rollback", {"snapshotID": snapshot.snapshot_id}
        )
        assert status == 200, body
        assert body["sandboxID"] == sandbox.sandbox_id
        assert sandbox.files.read("/home/user/kept") == "one"
        number, same = counter(sandbox)
        assert same == identity
        assert number < marked + 400
        sandbox.files.write("/home/user/kept", "two")
    sandbox.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id, **daemon.options)


def test_a_chain_of_snapshots_restores_each_of_them(daemon: Daemon) -> None:
    sandbox = daemon.create()
    snapshots = []
    for number in range(12):
        sandbox.commands.run(
            f"echo {number} > /home/user/disk; echo {number} > /dev/shm/memory; head -c {1 << 20} /dev/urandom > "
            f"/dev/shm/r{number}; sha256sum /dev/shm/r* > /home/user/sums"
        )
        snapshots.append(sandbox.create_snapshot(**daemon.options).snapshot_id)
    sandbox.kill()
    try:
        for number in (0, 5, 11):
            box = Sandbox.create(snapshots[number], **daemon.options)
            try:
                assert box.files.read("/home/user/disk") == box.files.read("/dev/shm/memory") == f"{number}\n"
                assert box.commands.run("sha256sum -c --quiet /home/user/sums").exit_code == 0
            finally:
                box.kill()
        for gone in snapshots[:-1]:  # the last one stands on all of them
            assert Sandbox.delete_snapshot(gone, **daemon.options)
        box = Sandbox.create(snapshots[-1], **daemon.options)
        try:
            assert box.commands.run("sha256sum -c --quiet /home/user/sums").exit_code == 0
        finally:
            box.kill()
    finally:
        Sandbox.delete_snapshot(snapshots[-1], **daemon.options)


def test_space_is_given_back(daemon: Daemon) -> None:
    def layers() -> dict[tuple[int, int], int]:
        """Bytes of each file once, under however many names; an inode number may be used again, so the time counts."""
        found: dict[tuple[int, int], int] = {}
        for path in daemon.home.root.rglob("*.lsmt"):
            with contextlib.suppress(FileNotFoundError):  # the daemon deletes as we look
                stat = path.stat()
                found[stat.st_ino, stat.st_mtime_ns] = stat.st_blocks * 512
        return found

    def used() -> int:
        return sum(size for file, size in layers().items() if file not in before)

    before = layers()
    sandbox = daemon.create()
    sandbox.commands.run("head -c 8000000 /dev/urandom > /home/user/bulk; sync")
    snapshot = sandbox.create_snapshot(**daemon.options)
    children = sandbox.fork(count=2, timeout=300)
    assert used() >= 8_000_000
    for box in (sandbox, *children):
        box.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id, **daemon.options)
    wait_until(lambda: used() <= 4 << 20, "files of the sandbox are gone")  # pools may have refilled
