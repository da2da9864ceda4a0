"""The record of every sandbox in SQLite: what survives kill -9 of the daemon.

One row a sandbox: its state in a column of its own, so that a transition is one compare-and-set, and the rest as JSON.
SQLite runs in WAL mode with synchronous=NORMAL: a commit that returned survives the death of any process; a power cut
may take back the last commits, but then the VMs they speak of are gone too.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.sandbox.service import CreateOptions, SandboxState

SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Machine(msgspec.Struct, frozen=True):
    """The VMM process of a running sandbox. `start_time` is field 22 of /proc/PID/stat in clock ticks."""

    pid: int
    start_time: int
    run_dir: str
    slot: int  # index of the network slot
    disk: str  # name of its disk at the block server
    incarnation: str  # differs after every resume; names connections that must not be reused


class Record(msgspec.Struct, kw_only=True):
    """All that is known of a sandbox. Times are seconds since the epoch.

    `disk`, `memory` and `state_file` are names of files in its directory. `disk` has the sealed layers below the one
    that a running machine writes to, `upper`; a pause adds that one. `memory` has the layers of the last capture, of
    which the RAM of a running machine is made together with what it has changed since; it is empty when the machine
    was booted. `lineage` names what it came from, nearest first: snapshots, templates, and sandboxes it was forked
    from.
    """

    id: str
    template_id: str
    options: CreateOptions
    started_at: float
    end_at: float
    state: SandboxState = SandboxState.STARTING
    machine: Machine | None = None
    disk: list[str] = []
    upper: str | None = None
    memory: list[str] = []
    state_file: str | None = None  # device state of a paused sandbox; None when only its file system was kept
    unsettled: str | None = None  # id of the boot of the host in which the last pause was not on the disk yet
    lineage: list[str] = []
    killed: bool = False  # it is to go: clients see it no more, whatever its state
    machine_id: str | None = None  # /etc/machine-id of the guest: the same for all incarnations


class Store:
    """The table. Calls are synchronous and take some 50 µs; later errors of SQLite itself are not caught.

    Raises UnavailableError for a file that is no data base, ConflictError for one of another schema version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Private before SQLite sees it: records hold environment variables. SQLite's other files copy the mode.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
            self._db = sqlite3.connect(path, isolation_level=None)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise UnavailableError(
                f"{path} cannot be used: {error}", hint="restore a backup of it, or move it away"
            ) from error

    def _prepare(self) -> None:
        try:
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise ConflictError(
                    f"{self._path} has schema version {version}, this program knows {SCHEMA_VERSION}",
                    hint="use the program version that made it, or another --home",
                )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if version == 0:
                self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def insert(self, record: Record) -> None:
        """Add a new record. Raises sqlite3.IntegrityError when the id exists."""
        self._db.execute(
            "INSERT INTO sandboxes VALUES (?, ?, ?)", (record.id, record.state, msgspec.json.encode(record))
        )

    def save(self, record: Record, *, durable: bool = False) -> None:
        """Write a changed record back. The state must not have changed: that is `transition`'s work."""
        with self._durably(durable):
            done = self._db.execute(
                "UPDATE sandboxes SET record = ? WHERE id = ? AND state = ?",
                (msgspec.json.encode(record), record.id, record.state),
            )
        if done.rowcount != 1:
            raise NotFoundError(f"sandbox {record.id} is not in state {record.state} in the store")

    @contextmanager
    def _durably(self, durable: bool) -> Iterator[None]:
        """With `durable` the commit also survives a power cut, at the price of some milliseconds."""
        if durable:
            self._db.execute("PRAGMA synchronous=FULL")  # the WAL is synced with this commit
        try:
            yield
        finally:
            if durable:
                self._db.execute("PRAGMA synchronous=NORMAL")

    def transition(self, record: Record, sources: Iterable[SandboxState], target: SandboxState) -> None:
        """Compare-and-set of the state; writes the whole record with it.

        Raises ConflictError (and changes nothing) when the sandbox is in none of `sources`.
        """
        sources = tuple(sources)
        before = record.state
        if before not in sources:
            raise ConflictError(f"sandbox {record.id} is {before.value}")
        record.state = target
        try:
            done = self._db.execute(
                "UPDATE sandboxes SET state = ?, record = ? WHERE id = ? AND state = ?",
                (target, msgspec.json.encode(record), record.id, before),
            )
        except BaseException:
            record.state = before  # what is in memory is what is on disk
            raise
        if done.rowcount != 1:
            record.state = before
            raise ConflictError(f"sandbox {record.id} is no longer {before.value}")

    def delete(self, sandbox_id: str) -> None:
        self._db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def load(self) -> list[Record]:
        """All records, for the start of the daemon. Raises InvalidInputError naming a damaged one."""
        rows = self._db.execute("SELECT id, state, record FROM sandboxes ORDER BY id").fetchall()
        records = []
        for identity, state, blob in rows:
            try:
                record = msgspec.json.decode(blob, type=Record)
                record.state = SandboxState(state)
            except (ValueError, RecursionError) as error:
                raise InvalidInputError(
                    f"sandbox {identity}", f"its record in {self._path} is damaged: {error}"
                ) from error
            records.append(record)
        return records


def boot_id() -> str:
    """Names this boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
