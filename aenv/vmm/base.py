"""The one interface to a VMM. Nothing above this package knows which VMM it talks to.

Life of a machine: `Vmm.boot` gives a RUNNING one; `Vmm.prepare` gives a PREPARED one (process started, RAM mapped,
waiting for device state), which `attach_disk` and `load_state` turn into a PAUSED one, and `resume` into a RUNNING one.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


class VmmKind(enum.StrEnum):
    """What runs the guest's instructions. A snapshot can be restored only by the kind that made it."""

    QEMU_TCG = "qemu-tcg"
    QEMU_KVM = "qemu-kvm"
    FIRECRACKER = "firecracker"


class VmState(enum.Enum):
    PREPARED = "prepared"  # process started, RAM mapped, no device state yet
    PAUSED = "paused"  # vCPUs stopped
    RUNNING = "running"
    EXITED = "exited"  # the process is gone


@dataclass(frozen=True, slots=True)
class Machine:
    """What must be equal for a snapshot to be restored: sizes, kernel and command line."""

    vcpus: int
    memory_mib: int
    kernel: Path
    initrd: Path
    cmdline: str


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device image the VMM opens. `format` is `raw` or `qcow2`.

    `backing` is the raw image under a qcow2 overlay. The name inside the qcow2 file is ignored: a VMM could write any
    path there. `read_only` is for boot only: a prepared machine takes a writable disk.
    """

    path: Path
    format: str
    read_only: bool = False
    backing: Path | None = None


@dataclass(frozen=True, slots=True)
class Nic:
    """A tap queue, already open in the sandbox's network namespace. The VMM process inherits `tap_fd`; the caller
    closes its own copy after the VMM has started."""

    tap_fd: int
    mac: str


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A piece of guest RAM in the address space of process `pid`. All numbers are bytes; page-aligned."""

    pid: int
    address: int
    guest_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Exit:
    """Why a VMM process ended: the reason in words and the last lines of the guest's serial console."""

    reason: str
    serial_tail: str


class Vm(ABC):
    """One machine: a VMM process and our control connection to it. Methods raise `VmmError`."""

    kind: VmmKind
    pid: int
    start_time: int  # of the process, as `Vmm.adopt` takes it
    state: VmState
    run_dir: Path
    exited: asyncio.Future[Exit]  # done as soon as the process ends or the guest shuts down by itself

    @abstractmethod
    async def attach_disk(self, disk: Disk) -> None:
        """PREPARED only: give the machine its disk."""

    @abstractmethod
    async def load_state(self, state: Path) -> None:
        """PREPARED → PAUSED: load the device state that `save_state` wrote."""

    @abstractmethod
    async def pause(self) -> None:
        """RUNNING → PAUSED: stop the vCPUs and drain disk requests. No-op when paused."""

    @abstractmethod
    async def resume(self) -> None:
        """PAUSED → RUNNING. End A of a restore is when this returns. Nothing to do when it runs already."""

    @abstractmethod
    async def save_state(self, state: Path) -> None:
        """PAUSED only: write device state without RAM to a new file. The machine stays usable."""

    @abstractmethod
    async def memory_regions(self) -> list[MemoryRegion]:
        """Where guest RAM lies in the VMM's address space."""

    @abstractmethod
    async def serial_tail(self, limit: int = 4096) -> str:
        """The last `limit` bytes of the guest's serial console, as text."""

    @abstractmethod
    async def serial_since(self, position: int) -> tuple[bytes, int]:
        """What the guest has written to its serial console after byte `position` (0: from the start), as far as it is
        still kept, and the position to ask with next time."""

    @abstractmethod
    async def kill(self) -> None:
        """End the process and wait until it is gone; remove `run_dir`. Works in every state, may be called twice."""

    @abstractmethod
    async def detach(self) -> None:
        """Close our control connection and leave the machine running (the daemon is stopping)."""


class Vmm(ABC):
    """Starts machines of one kind."""

    kind: VmmKind
    version: str

    @property
    @abstractmethod
    def cpu_model(self) -> str:
        """The guest's CPU in the VMM's words. Like kind and version, a snapshot needs the same."""

    @abstractmethod
    async def boot(self, machine: Machine, *, memory_image: Path, disk: Disk, nic: Nic | None, run_dir: Path) -> Vm:
        """Cold boot. `memory_image` is a file of `memory_mib` MiB, mapped MAP_PRIVATE (all-zero, sparse for a boot)."""

    @abstractmethod
    async def prepare(
        self, machine: Machine, *, memory_image: Path, nic: Nic | None, run_dir: Path, base: Path | None = None
    ) -> Vm:
        """Start a process that waits for device state. RAM maps `memory_image` MAP_PRIVATE: shared page cache.

        `base` is the raw image that the disk to come will have as its backing: opened now, it saves time later.
        """

    @abstractmethod
    async def adopt(self, pid: int, start_time: int, run_dir: Path) -> Vm:
        """Take over a machine that an earlier daemon started. `start_time` is field 22 of `/proc/PID/stat`, in clock
        ticks: with the pid it names one process for ever. Raises `NotFoundError` when that process is gone."""
