"""The trace of a running daemon in its home: the lock that makes it the only one, and where it listens."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from aenv.errors import ConflictError

RECORD_NAME = "daemon.json"
LOCK_NAME = "lock"


class Daemon(msgspec.Struct):
    """What `aenv serve` writes to HOME/daemon.json, so that commands on the same machine find it."""

    url: str
    pid: int

    def write(self, home: Path) -> None:
        """Replace the record atomically."""
        draft = home / f".{RECORD_NAME}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(self))
        draft.rename(home / RECORD_NAME)

    @classmethod
    def read(cls, home: Path) -> Daemon:
        """Raises FileNotFoundError when no daemon runs, msgspec.MsgspecError for a damaged record."""
        return msgspec.json.decode((home / RECORD_NAME).read_bytes(), type=cls)

    @staticmethod
    def remove(home: Path) -> None:
        (home / RECORD_NAME).unlink(missing_ok=True)


def lock_home(home: Path) -> int:
    """Become the only daemon of a home; the lock lasts as long as the returned descriptor, or this process.

    Raises ConflictError when another one serves it.
    """
    fd = os.open(home / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConflictError(f"another daemon serves {home}", hint="use another --home, or stop it") from error
    return fd
