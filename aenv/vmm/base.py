"""The one interface to a VMM. Nothing above this package knows which VMM it talks to.

Life of a machine: `Vmm.boot` gives a RUNNING one; `Vmm.prepare` gives a PREPARED one (process started, RAM empty),
which `map_memory`, `attach_disk` and `load_state` turn into a PAUSED one, and `resume` into a RUNNING one. A disk that
fails stops a RUNNING machine (IO_ERROR) until `resume`.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import InvalidInputError

PAGE = 4096
# Extents and files of one map. Each extent is a mapping of the VMM process, of which Linux allows 65530.
MAX_EXTENTS = 16384
MAX_FILES = 512
_EXTENT = struct.Struct("=QQIIQ")


class VmmKind(enum.StrEnum):
    """What runs the guest's instructions. A snapshot can be restored only by the kind that made it."""

    QEMU_TCG = "qemu-tcg"
    QEMU_KVM = "qemu-kvm"
    FIRECRACKER = "firecracker"


class VmState(enum.Enum):
    PREPARED = "prepared"  # process started, no device state yet
    PAUSED = "paused"  # vCPUs stopped
    RUNNING = "running"
    IO_ERROR = "io-error"  # vCPUs stopped by themselves: a disk request failed and waits to be tried again
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
    """A block device or file that the VMM opens past the page cache. `format` is `raw`: layers are the block server's
    business. `read_only` is for boot only: a prepared machine takes a writable disk."""

    path: Path
    format: str = "raw"
    read_only: bool = False


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
class MemoryExtent:
    """`length` bytes of guest RAM at `guest_offset` are those of file number `file` at `file_offset`. Page-aligned."""

    guest_offset: int
    length: int
    file: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """What guest RAM of `size` bytes shall consist of. `extents` are records of native u64 guest_offset, u64 length,
    u32 file (index into `files`), u32 0, u64 file_offset; sorted by guest_offset, not overlapping. RAM that no extent
    covers stays what it is. Every extent lies inside its file, which must not shrink while a machine maps it."""

    size: int
    files: tuple[Path, ...]
    extents: bytes

    @classmethod
    def of(cls, size: int, files: Iterable[Path], extents: Iterable[MemoryExtent]) -> MemoryMap:
        packed = b"".join(_EXTENT.pack(e.guest_offset, e.length, e.file, 0, e.file_offset) for e in extents)
        return cls(size, tuple(files), packed)

    @classmethod
    def whole(cls, file: Path, size: int) -> MemoryMap:
        """All of RAM is one file of `size` bytes."""
        return cls.of(size, (file,), (MemoryExtent(0, size, 0, 0),))

    @property
    def count(self) -> int:
        return len(self.extents) // _EXTENT.size

    def check(self, size: int) -> None:
        """Raises InvalidInputError when this cannot be a map of `size` bytes of RAM. Single extents are checked by the
        VMM, before it maps the first."""
        if self.size != size:
            raise InvalidInputError("map.size", f"the machine has {size} bytes, not {self.size}")
        if len(self.extents) % _EXTENT.size:
            raise InvalidInputError("map.extents", f"{len(self.extents)} bytes are no whole number of records")
        if self.count > MAX_EXTENTS:
            raise InvalidInputError("map.extents", f"{self.count} are more than {MAX_EXTENTS}")
        if len(self.files) > MAX_FILES:
            raise InvalidInputError("map.files", f"{len(self.files)} are more than {MAX_FILES}")


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
    # Called with what failed when the state becomes IO_ERROR. The guest has seen nothing; `resume` tries again.
    on_io_error: Callable[[str], None] | None

    @abstractmethod
    async def map_memory(self, map: MemoryMap) -> None:
        """PREPARED, or PAUSED: make RAM of these extents, private copies of files opened for reading only. A machine
        that has run must be given the content that it has already.

        Raises InvalidInputError and LimitError with nothing changed. After VmmError, or when cancelled, RAM may be half
        mapped: the machine is good for nothing but `kill`.
        """

    @abstractmethod
    async def populate(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Map pages of RAM before the guest needs them: (guest offset, length) in bytes, page-aligned, sorted, not
        overlapping, at most MAX_EXTENTS. Reads files as far as they are not in the page cache. Works in every state;
        after VmmError the machine is as before."""

    @abstractmethod
    async def attach_disk(self, disk: Disk) -> None:
        """PREPARED only: give the machine its disk."""

    @abstractmethod
    async def load_state(self, state: Path) -> None:
        """PREPARED → PAUSED: load the device state that `save_state` wrote."""

    @abstractmethod
    async def quiet(self, patience: float) -> bool:
        """Wait until the vCPUs have had nothing to do for some milliseconds, at most `patience` seconds. Tells whether
        that came; a machine that does not run has nothing to do."""

    @abstractmethod
    async def pause(self) -> None:
        """RUNNING or IO_ERROR → PAUSED: stop the vCPUs and drain disk requests. No-op when paused."""

    @abstractmethod
    async def resume(self) -> None:
        """PAUSED or IO_ERROR → RUNNING: a failed disk request is tried again. End A of a restore is when this returns.
        Nothing to do when it runs already."""

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
    def devices(self) -> str:
        """Names the set of devices that machines have, in this version of the program. A snapshot needs the same."""

    @property
    @abstractmethod
    def cpu_model(self) -> str:
        """The guest's CPU in the VMM's words. Like kind and version, a snapshot needs the same."""

    @abstractmethod
    async def boot(self, machine: Machine, *, disk: Disk, nic: Nic | None, run_dir: Path) -> Vm:
        """Cold boot, with empty RAM."""

    @abstractmethod
    async def prepare(self, machine: Machine, *, nic: Nic | None, run_dir: Path) -> Vm:
        """Start a process with empty RAM that waits for memory, disk and device state: good for every snapshot of this
        `machine`. Of that only sizes count: kernel and command line are in RAM."""

    @abstractmethod
    async def adopt(self, pid: int, start_time: int, run_dir: Path) -> Vm:
        """Take over a machine that an earlier daemon started. `start_time` is field 22 of `/proc/PID/stat`, in clock
        ticks: with the pid it names one process for ever. Raises `NotFoundError` when that process is gone."""
