"""One sandbox in memory: its record, its machine while it has one, and its timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from aenv.sandbox.machines import Running
from aenv.sandbox.service import PauseMode, SandboxInfo, SandboxState
from aenv.sandbox.store import Record
from aenv.snapshot.checkpoint import Checkpoint
from aenv.storage.disks import OpenDisk
from aenv.storage.repository import Template

ENVD_VERSION = "0.6.13"
CLIENT_ID = "local"


class Sandbox:
    """`lock` is held by the one operation that changes the state; reading needs no lock.

    `doomed` is set by a kill: an operation that waits for the guest stops waiting.
    """

    def __init__(self, record: Record, template: Template) -> None:
        self.record = record
        self.template = template
        self.running: Running | None = None
        self.former: Running | None = None  # the machine of the last pause, until it is gone: it holds the disk
        self.parked: Running | None = None  # the machine of the last pause, kept for the next resume
        self.ending: asyncio.Task[None] | None = None  # ends the former, or makes the parked one fit for use
        self.settling: asyncio.Task[None] | None = None  # makes the pause of the parked one durable
        self._starts: dict[object, float] = {}  # programs whose output somebody waits for: when each was started
        self.timer: asyncio.TimerHandle | None = None
        self.lock = asyncio.Lock()
        self.doomed = False

    @property
    def is_up(self) -> bool:
        """Its guest runs, or is stopped for an instant only: clients may talk to it."""
        return self.record.state in (SandboxState.RUNNING, SandboxState.SNAPSHOTTING, SandboxState.FORKING)

    @property
    def machines(self) -> tuple[Running | None, ...]:
        """All that have its files open."""
        return self.running, self.former, self.parked

    def note_restack(self, disk: OpenDisk) -> None:
        """Bring the record up to date with its disk, which may have got a new writable layer."""
        record = self.record
        if record.upper is not None and record.upper != disk.upper:
            record.disk, record.upper = [*record.disk, record.upper], disk.upper

    def begin_start(self) -> Callable[[], None]:
        """A program is started in its guest. To be told when its output has ended: call what this returns."""
        key = object()
        self._starts[key] = asyncio.get_running_loop().time()

        def ended() -> None:
            self._starts.pop(key, None)

        return ended

    @property
    def since_start(self) -> float:
        """Seconds since a program was started that has not ended yet, as far as it is known."""
        return asyncio.get_running_loop().time() - max(self._starts.values(), default=float("-inf"))

    def checkpoint(self, folder: Path) -> Checkpoint:
        """What its next machine is made from, in its directory."""
        record = self.record
        return Checkpoint(
            folder,
            self.template.machine,
            tuple(record.disk),
            self.template.disk_size,
            tuple(record.memory) if record.state_file is not None else (),
            record.state_file,
        )

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> SandboxState:
        return self.record.state

    def info(self, *, envd_token: str | None, traffic_token: str | None, domain: str | None) -> SandboxInfo:
        """The sandbox as the API shows it."""
        record, manifest = self.record, self.template.manifest
        paused = record.state in (SandboxState.PAUSED, SandboxState.PAUSING)
        return SandboxInfo(
            id=record.id,
            template_id=record.template_id,
            client_id=CLIENT_ID,
            envd_version=ENVD_VERSION,
            started_at=datetime.fromtimestamp(record.started_at, UTC),
            end_at=datetime.fromtimestamp(record.end_at, UTC),
            state=record.state,
            cpu_count=manifest.vcpus,
            memory_mib=manifest.memory_mib,
            disk_mib=self.template.disk_size >> 20,
            alias=self.template.names[0] if self.template.names else None,
            envd_token=envd_token,
            traffic_token=traffic_token,
            domain=domain,
            metadata=record.options.metadata,
            network=record.options.network,
            on_timeout=record.options.on_timeout,
            auto_resume=record.options.auto_resume,
            pause_mode=(PauseMode.FULL if record.state_file is not None else PauseMode.FILESYSTEM) if paused else None,
        )
