"""`aenv start` and `aenv exec -t` under a terminal of their own."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from aenv.cli.terminal import raw_mode, terminal_size, write_all
from aenv.http.message import Response
from tests.cli.conftest import AENV, Fixture


class Terminal:
    """The user's side of a terminal with a command in it."""

    def __init__(self, daemon: Fixture, words: tuple[str, ...], size: tuple[int, int]) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.mode = termios.tcgetattr(self.slave)
        self.flags = fcntl.fcntl(self.slave, fcntl.F_GETFL)
        self.shown = b""
        self.process = subprocess.Popen(
            [*AENV, *words], stdin=self.slave, stdout=self.slave, stderr=self.slave, env=daemon.environ,
            start_new_session=True,
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, text: bytes) -> None:
        deadline = time.monotonic() + 30
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.shown
            self.shown += os.read(self.master, 65536)

    def wait(self) -> int:
        """The exit status; what the command still says is read meanwhile, as a terminal does."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.master], [], [], 0.02)[0]:
                self.shown += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.shown += os.read(self.master, 65536)
        return self.process.returncode

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self.slave) == self.mode
        assert fcntl.fcntl(self.slave, fcntl.F_GETFL) == self.flags

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            try:
                os.close(fd)
            except OSError:
                continue  # closed by the test


@contextlib.contextmanager
def terminal(daemon: Fixture, *words: str, size: tuple[int, int] = (90, 30)) -> Iterator[Terminal]:
    t = Terminal(daemon, words, size)
    try:
        yield t
    finally:
        t.close()


def keys_sent(daemon: Fixture) -> bytes:
    return b"".join(base64.b64decode(a["input"]["pty"]) for m, a in daemon.fake.asked if m == "SendInput")


def test_a_shell_gets_every_key_and_its_status_is_ours(daemon: Fixture) -> None:
    with terminal(daemon, "start", "base") as t:
        t.read_until(b"prompt> ")
        every = bytes(b for b in range(256) if b != 4)
        t.type(every)
        daemon.fake.wait_asked("SendInput")
        while keys_sent(daemon) != every:
            t.read_until(b">")
            daemon.fake.wait_asked("SendInput", len(daemon.fake.wait_asked("SendInput")))
        t.type(b"\x04")
        assert t.wait() == 7
        t.assert_restored()
        assert b"started in" in t.shown
    (asked,) = daemon.fake.wait_asked("Start")
    assert asked["pty"] == {"size": {"cols": 90, "rows": 30}}
    assert asked["process"]["envs"]["TERM"] == "xterm"
    assert [c[:2] for c in daemon.fake.calls] == [
        ("POST", "/v2/sandboxes"), ("POST", "/v2/sandboxes/i1/connect"), ("DELETE", "/sandboxes/i1"),
    ]  # fmt: skip


def test_keep_keeps(daemon: Fixture) -> None:
    with terminal(daemon, "start", "base", "--keep") as t:
        t.read_until(b"prompt> ")
        t.type(b"\x04")
        assert t.wait() == 7
    assert "DELETE" not in {c[0] for c in daemon.fake.calls}


def test_a_sandbox_that_ended_first_is_no_error(daemon: Fixture) -> None:
    daemon.fake.answers["DELETE /sandboxes/i1"] = Response.error(404, "gone")
    with terminal(daemon, "start", "base") as t:
        t.read_until(b"prompt> ")
        t.type(b"\x04")
        assert t.wait() == 7
        assert b"gone" not in t.shown


def test_the_window_size_follows_while_keys_are_typed(daemon: Fixture) -> None:
    with terminal(daemon, "exec", "-t", "i1", "/bin/bash") as t:
        t.read_until(b"prompt> ")
        for number in range(1, 4):
            t.type(b"x" * 50)
            t.resize(100 + number, 40)
            t.process.send_signal(signal.SIGWINCH)  # the kernel sends it to a terminal's foreground group
            t.type(b"y" * 50)
            sizes = daemon.fake.wait_asked("Update", number)
            assert sizes[-1] == {"process": {"pid": 7}, "pty": {"size": {"cols": 100 + number, "rows": 40}}}
        t.type(b"\x04")
        assert t.wait() == 7
        t.assert_restored()
    assert keys_sent(daemon) == (b"x" * 50 + b"y" * 50) * 3 + b"\x04"


def test_much_output_for_a_slow_terminal_arrives_whole(daemon: Fixture) -> None:
    with terminal(daemon, "exec", "-t", "i1", "flood", "40") as t:
        while t.process.poll() is None or select.select([t.master], [], [], 0)[0]:
            if select.select([t.master], [], [], 0.02)[0]:
                t.shown += os.read(t.master, 3000)
        assert t.process.returncode == 0, t.shown[-500:]
        assert t.shown.count(b"x") == 40 * 32768
        t.assert_restored()


@pytest.mark.parametrize(("command", "argument", "status"), [("exit", "5", 5), ("die", "killed", 137)])
def test_the_status_of_a_command(daemon: Fixture, command: str, argument: str, status: int) -> None:
    with terminal(daemon, "exec", "-t", "i1", command, argument) as t:
        assert t.wait() == status
        t.assert_restored()


@pytest.mark.parametrize(("command", "text"), [("missing", b"no such program"), ("cut", b"ended in the middle")])
def test_the_terminal_is_restored_after_an_error(daemon: Fixture, command: str, text: bytes) -> None:
    with terminal(daemon, "exec", "-t", "i1", command) as t:
        assert t.wait() == 1
        assert text in t.shown
        assert b"Traceback" not in t.shown
        t.assert_restored()


def test_the_terminal_is_restored_and_the_sandbox_ended_by_sigterm(daemon: Fixture) -> None:
    with terminal(daemon, "start", "base") as t:
        t.read_until(b"prompt> ")
        t.process.send_signal(signal.SIGTERM)
        assert t.wait() == 128 + signal.SIGTERM
        assert b"Traceback" not in t.shown
        t.assert_restored()
    assert daemon.fake.calls[-1][:2] == ("DELETE", "/sandboxes/i1")


def test_a_terminal_that_goes_away_ends_the_shell(daemon: Fixture) -> None:
    with terminal(daemon, "start", "base") as t:
        t.read_until(b"prompt> ")
        os.close(t.slave)
        os.close(t.master)  # its session has no controlling terminal: there is no SIGHUP, reading says EIO
        assert daemon.fake.wait_asked("SendSignal")[0]["signal"] == "SIGNAL_SIGKILL"
        t.process.wait(30)
    assert daemon.fake.calls[-1][:2] == ("DELETE", "/sandboxes/i1")


def test_ls_is_a_table_for_people(daemon: Fixture) -> None:
    with terminal(daemon, "ls", size=(200, 30)) as t:
        assert t.wait() == 0
    assert b"ID" in t.shown
    assert b"user=7" in t.shown
    assert b"{" not in t.shown
    daemon.fake.boxes = []
    with terminal(daemon, "ls") as t:
        t.wait()
        assert b"no sandboxes" in t.shown


# The parts


def test_raw_mode_is_undone_after_an_exception() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    with contextlib.suppress(ZeroDivisionError), raw_mode(slave):
        assert termios.tcgetattr(slave) != before
        raise ZeroDivisionError
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_a_terminal_without_size_has_a_usual_one() -> None:
    master, slave = pty.openpty()
    assert terminal_size(slave) == (80, 24)
    os.close(master)
    os.close(slave)


def test_write_all_waits_for_a_full_pipe_that_does_not_block() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    child = os.fork()
    if child == 0:
        got = 0
        os.close(writer)
        while data := os.read(reader, 4096):
            got += len(data)
        os._exit(0 if got == 1 << 20 else 1)
    os.close(reader)
    write_all(writer, b"x" * (1 << 20))
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
