"""This terminal, attached to a process in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence

from aenv.agent.process import Ended, Output, Processes, Started
from aenv.cli.source import Source
from aenv.errors import UnavailableError


def terminal_size(fd: int) -> tuple[int, int]:
    """(columns, rows) of a terminal."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return columns or 80, rows or 24


@contextlib.contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Every key goes through as it is; the former mode comes back at the end."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def require_terminal() -> int:
    """The descriptor of our terminal. Raises UnavailableError when stdin is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UnavailableError("stdin is not a terminal", hint="use `aenv exec ID -- COMMAND`, or `aenv start -d`")
    return sys.stdin.fileno()


async def attach(
    processes: Processes,
    command: str = "/bin/bash",
    arguments: Sequence[str] = ("-i", "-l"),
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run a command with a terminal of its own and join it with ours; the exit status is the command's.

    Raises UnavailableError when stdin is no terminal.
    """
    source = require_terminal()
    variables = {
        "TERM": os.environ.get("TERM", "xterm-256color"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        **(env or {}),
    }
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    resized = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    loop.add_signal_handler(signal.SIGTERM, me.cancel)  # so that the terminal gets its mode back
    senders: list[asyncio.Task[None]] = []
    status = 1
    with raw_mode(source):
        try:
            stream = processes.start(command, arguments, env=variables, cwd=cwd, pty=terminal_size(source))
            async for event in stream:
                match event:
                    case Started(pid):
                        senders.append(asyncio.create_task(_send_keys(processes, pid, source)))
                        senders.append(asyncio.create_task(_send_sizes(processes, pid, source, resized)))
                    case Output(_, data):
                        write_all(sys.stdout.fileno(), data)
                    case Ended():
                        status = event.shell_status
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            loop.remove_signal_handler(signal.SIGTERM)
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)
    return status


async def _send_keys(processes: Processes, pid: int, source: int) -> None:
    keys = Source(source)
    while data := await keys.read():
        await processes.send_input(pid, data, pty=True)
    await processes.signal(pid, "SIGNAL_SIGKILL")  # the terminal is gone; an interactive shell ignores SIGTERM


async def _send_sizes(processes: Processes, pid: int, source: int, resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        await processes.resize(pid, *terminal_size(source))


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, whoever may have made the descriptor non-blocking."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            select.select([], [fd], [])
