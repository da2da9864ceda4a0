"""This terminal, attached to a process in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence

from aenv.agent.process import Ended, Output, Processes, Started
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
    source = sys.stdin.fileno()
    if not os.isatty(source):
        raise UnavailableError("stdin is not a terminal", hint="use `aenv exec ID -- COMMAND`, or `aenv start -d`")
    variables = {
        "TERM": os.environ.get("TERM", "xterm-256color"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        **(env or {}),
    }
    keys: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    sender: asyncio.Task[None] | None = None
    status = 1
    with raw_mode(source):
        try:
            stream = processes.start(command, arguments, env=variables, cwd=cwd, pty=terminal_size(source))
            async for event in stream:
                match event:
                    case Started(pid):
                        loop.add_reader(source, lambda: keys.put_nowait(os.read(source, 4096)))
                        loop.add_signal_handler(signal.SIGWINCH, keys.put_nowait, None)
                        sender = asyncio.create_task(_send(processes, pid, source, keys))
                    case Output(_, data):
                        os.write(sys.stdout.fileno(), data)
                    case Ended(exit_code, _):
                        status = exit_code if exit_code >= 0 else 1
        finally:
            loop.remove_reader(source)
            loop.remove_signal_handler(signal.SIGWINCH)
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
    return status


async def _send(processes: Processes, pid: int, source: int, keys: asyncio.Queue[bytes | None]) -> None:
    """Keys in order, and the new size whenever the window changes (None in the queue)."""
    while True:
        item = await keys.get()
        if item is None:
            await processes.resize(pid, *terminal_size(source))
            continue
        while not keys.empty() and (more := keys.get_nowait()) is not None:
            item += more
        if item:
            await processes.send_input(pid, item, pty=True)
