"""The command line against a real daemon and real guests."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.integration.conftest import AENV, PATIENCE, Daemon

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def sandbox_id(daemon: Daemon) -> Iterator[str]:
    done = daemon.aenv("start", "-d", "base", "-e", "COLOUR=blue", "-m", "owner=cli")
    assert done.returncode == 0, done.stderr
    sandbox_id = json.loads(done.stdout)["sandboxID"]
    yield sandbox_id
    done = daemon.aenv("rm", sandbox_id)
    assert done.returncode == 0, done.stderr
    assert daemon.list() == {}


@pytest.fixture
def no_leaks(sandbox_id: str) -> None:
    """The module's sandbox is looked at when it ends."""


def test_exec_has_output_status_and_input(daemon: Daemon, sandbox_id: str) -> None:
    done = daemon.aenv("exec", sandbox_id, "--", "sh", "-c", "echo $COLOUR; echo no >&2; exit 9")
    assert (done.stdout, done.stderr, done.returncode) == (b"blue\n", b"no\n", 9)
    content = os.urandom(300_000)
    done = daemon.aenv("exec", sandbox_id, "--", "sh", "-c", "cat > /tmp/in; cat /tmp/in", stdin=content)
    assert (done.stdout == content, done.stderr, done.returncode) == (True, b"", 0)
    done = daemon.aenv("exec", "-u", "root", "-w", "/etc", "-e", "A=b", sandbox_id, "sh", "-c", "id -u; pwd; echo $A")
    assert done.stdout == b"0\n/etc\nb\n"
    assert daemon.aenv("exec", sandbox_id, "no-such-program").returncode != 0
    assert daemon.aenv("exec", sandbox_id, "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_ls(daemon: Daemon, sandbox_id: str) -> None:
    done = daemon.aenv("ls", "--json")
    boxes = {b["sandboxID"]: b for b in json.loads(done.stdout)}
    assert boxes[sandbox_id]["state"] == "running"
    assert boxes[sandbox_id]["metadata"] == {"owner": "cli"}


def test_pause_and_resume(daemon: Daemon, sandbox_id: str) -> None:
    daemon.aenv("exec", sandbox_id, "--", "sh", "-c", "echo kept > /dev/shm/word")
    assert daemon.aenv("pause", sandbox_id).returncode == 0
    assert daemon.list()[sandbox_id] == "paused"
    assert daemon.vmms().keys().isdisjoint({0})
    assert daemon.aenv("resume", sandbox_id).returncode == 0
    assert daemon.list()[sandbox_id] == "running"
    assert daemon.aenv("exec", sandbox_id, "cat", "/dev/shm/word").stdout == b"kept\n"


def test_rm(daemon: Daemon, sandbox_id: str) -> None:
    other = json.loads(daemon.aenv("start", "-d", "base").stdout)["sandboxID"]
    assert daemon.aenv("pause", other).returncode == 0
    assert daemon.aenv("rm", other).returncode == 0
    assert set(daemon.list()) == {sandbox_id}
    done = daemon.aenv("rm", other)
    assert done.returncode == 1
    assert done.stderr.startswith(b"aenv: ")


def test_a_shell_in_a_terminal(daemon: Daemon, sandbox_id: str) -> None:
    shown, status = in_terminal(daemon, "start", "base", keys=b"tty; echo sum $((40 + 2)); exit 5\r")
    assert status == 5
    assert b"/dev/pts/" in shown
    assert b"sum 42" in shown
    assert set(daemon.list()) == {sandbox_id}, "it ended with its shell"


def test_exec_in_a_terminal(daemon: Daemon, sandbox_id: str) -> None:
    shown, status = in_terminal(daemon, "exec", "-t", sandbox_id, "bash", keys=b"stty size; tty; exit 4\r")
    assert (status, b"/dev/pts/" in shown) == (4, True)


def in_terminal(daemon: Daemon, *words: str, keys: bytes) -> tuple[bytes, int]:
    """Run a command in a terminal, type `keys` when its prompt is there; what it showed and its status."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*AENV, "--home", str(daemon.home.root), *words],
        stdin=slave, stdout=slave, stderr=slave, env=daemon.environment | {"TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown, typed = b"", False
    deadline = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    shown += os.read(master, 65536)
                except OSError:
                    break  # the other side is closed: the command has ended
            if not typed and b"$ " in shown:
                os.write(master, keys)
                typed = True
        return shown, process.wait(PATIENCE)
    finally:
        process.kill()
        os.close(master)
