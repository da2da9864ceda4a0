"""From a running machine to files: stop the vCPUs, save the device state, collect the memory that has changed.

The machine stays paused, whatever happens: the caller resumes or kills it. What is slow and needs no stopped guest is
done before (`capture` looks for space) or after (`sync_capture`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from aenv._native import memory
from aenv.errors import VmmError
from aenv.snapshot.manifest import sync_directory
from aenv.vmm.base import MemoryMap, MemoryRegion, Vm

# Reading another process's pages is limited by memory bandwidth; two streams fill it on small hosts.
THREADS = min(4, os.cpu_count() or 1)
# Index, trailer and what the guest writes between the look at its memory and its stop.
SPACE_MARGIN = 16 << 20
# The part of the host's available memory that is made ready ahead as page cache for one layer.
ROOM_SHARE = 4
# An entry of the index has 16 bytes for a page at least. The guest may write so much between look and stop before its
# pages take the slower way; what is left over is given back while it stands still, so it must not be much.
INDEX_SHARE = 256
ROOM_MARGIN = 8 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Sizes and times (seconds) of one capture. `stored_pages` of 4096 bytes went into the layer.

    The guest was stopped for `frozen_s`: `pause_s`, and then the longest of `state_s`, `memory_s` and `beside_s`, which
    overlap. `prepare_s` was before. `mappings` is how many the VMM process had, and `written` what it had written,
    stored or not: records of u64 guest offset and u64 length in bytes, sorted.
    """

    dirty_pages: int
    stored_pages: int
    zero_pages: int
    memory_bytes: int
    state_bytes: int
    pause_s: float
    state_s: float
    memory_s: float
    sync_s: float = 0.0
    equal_pages: int = 0
    segments: int = 0
    mappings: int = 0
    written: bytes = dataclasses.field(default=b"", repr=False)
    prepare_s: float = 0.0
    beside_s: float = 0.0
    frozen_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.frozen_s + self.sync_s


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """`beside` is what the work beside the capture has returned."""

    stats: CaptureStats
    beside: T


class _Collector:
    """Memory of one machine on its way into one layer. It has a thread of its own: a stopped guest must not wait for a
    place in a pool that others fill."""

    def __init__(self, vm: Vm, layer: Path, parent: MemoryMap | None, ahead: bool) -> None:
        self._vm = vm
        self._layer = layer
        self._parent = parent
        self._ahead = ahead
        self._room: memory.Room | None = None
        self._executor = ThreadPoolExecutor(1, "capture")
        self._stack = ExitStack()
        self._fds: list[int] = []
        self._out = -1
        self.mappings = 0

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def prepare(self) -> None:
        """Open all files, and see that there is space for the layer."""
        await self._run(self._open, await self._vm.memory_regions())

    def _open(self, regions: list[MemoryRegion]) -> None:
        try:
            pid = regions[0].pid
            expected = memory.written_bytes(pid, _spans(regions), _size(regions))
            self.mappings = Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
            free = _free_bytes(self._layer.parent)
            if expected + SPACE_MARGIN > free:
                raise VmmError(
                    f"cannot capture the memory: {expected >> 20} MiB have changed, "
                    f"{free >> 20} MiB are free in {self._layer.parent}"
                )
            self._fds = [_opened(self._stack, path, os.O_RDONLY) for path in self._parent.files] if self._parent else []
            self._out = _opened(self._stack, self._layer, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if self._ahead and expected:
                room = expected + expected // INDEX_SHARE + min(expected // 8, ROOM_MARGIN)
                room = min(room, _available_bytes() // ROOM_SHARE)
                self._room = memory.Room(self._out, room, threads=THREADS)
                self._stack.callback(self._room.close)
        except OSError as error:
            raise VmmError(f"cannot capture the memory: {error}") from error

    async def collect(self) -> tuple[memory.Stats, bytes]:
        """PAUSED only."""
        return await self._run(self._collect, await self._vm.memory_regions())

    def _collect(self, regions: list[MemoryRegion]) -> tuple[memory.Stats, bytes]:
        try:
            return memory.capture(
                regions[0].pid,
                _spans(regions),
                _size(regions),
                self._fds,
                self._parent.extents if self._parent else b"",
                self._out,
                room=self._room,
                threads=THREADS,
                uuid=str(uuid.uuid4()),
            )
        except (memory.ParentError, OSError) as error:
            raise VmmError(f"cannot capture the memory: {error}") from error

    def undo(self) -> None:
        """Remove the layer, if it is ours."""
        if self._out >= 0:
            self._layer.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()
        self._executor.shutdown(wait=False)


async def capture(
    vm: Vm,
    *,
    state: Path,
    layer: Path,
    parent: MemoryMap | None,
    beside: Callable[[], Awaitable[T]],
    ahead: bool = True,
) -> Captured[T]:
    """Stop the vCPUs and write two new files: the device state, and a sealed layer of what differs from `parent`.

    `parent` is what RAM was when nothing was written to it yet (None: zeros); any map that shows the same content will
    do, with as many extents as it takes. `beside` is called when the vCPUs have stopped and runs meanwhile; it has run
    to its end in any case. Nothing is durable yet: see `sync_capture`.

    `ahead`: take time before the vCPUs stop to make space for the layer, so that they stop for less. Without it all is
    done sooner, which is better for a machine that will not go on.

    On failure neither file is there. Raises VmmError, and what `beside` raises.
    """
    begin = time.perf_counter()
    collector = _Collector(vm, layer, parent, ahead)
    saved = False

    async def save() -> None:
        nonlocal saved
        await vm.save_state(state)
        saved = True

    try:
        await _to_the_end(collector.prepare())
        prepared = time.perf_counter()
        await vm.pause()
        paused = time.perf_counter()
        (_, state_s), ((found, written), memory_s), (result, beside_s) = await _to_the_end(
            _timed(save()), _timed(collector.collect()), _timed(beside())
        )
        done = time.perf_counter()
        state_bytes = state.stat().st_size
    except BaseException:
        collector.undo()
        if saved:
            state.unlink(missing_ok=True)
        raise
    finally:
        collector.close()
    stats = CaptureStats(
        dirty_pages=found["dirty_pages"],
        stored_pages=found["stored_pages"],
        zero_pages=found["zero_pages"],
        equal_pages=found["equal_pages"],
        segments=found["segments"],
        memory_bytes=found["file_bytes"],
        state_bytes=state_bytes,
        mappings=collector.mappings,
        written=written,
        prepare_s=prepared - begin,
        pause_s=paused - prepared,
        state_s=state_s,
        memory_s=memory_s,
        beside_s=beside_s,
        frozen_s=done - prepared,
    )
    return Captured(stats, result)


async def nothing_beside() -> None:
    """For a capture without more work."""


async def sync_capture(state: Path, layer: Path) -> None:
    """Make the files of a capture and their names durable. The guest may run. Raises VmmError."""
    await asyncio.to_thread(_sync, state, layer)


async def write_base(vm: Vm, *, state: Path, layer: Path) -> CaptureStats:
    """The whole RAM of a machine that was booted, as one durable layer for the block server to serve; and its state.

    The machine stays paused. On failure neither file is there. Raises VmmError.
    """
    captured = await capture(vm, state=state, layer=layer, parent=None, beside=nothing_beside, ahead=False)
    begin = time.perf_counter()
    try:
        await sync_capture(state, layer)
    except BaseException:
        for path in (state, layer):
            path.unlink(missing_ok=True)
        raise
    return dataclasses.replace(captured.stats, sync_s=time.perf_counter() - begin)


def _available_bytes() -> int:
    """Memory that can be had without swapping (MemAvailable of proc(5))."""
    found = re.search(rb"^MemAvailable: +([0-9]+) kB$", Path("/proc/meminfo").read_bytes(), re.MULTILINE)
    return 0 if found is None else int(found[1]) << 10


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _spans(regions: list[MemoryRegion]) -> list[memory.Region]:
    return [(r.address, r.guest_offset, r.length) for r in regions]


def _size(regions: list[MemoryRegion]) -> int:
    return sum(region.length for region in regions)


async def _timed(work: Awaitable[T]) -> tuple[T, float]:
    begin = time.perf_counter()
    return await work, time.perf_counter() - begin


async def _to_the_end(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all at once; when this returns or raises none is running any more, for threads cannot be cancelled. The first
    error in the order of the arguments is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [task.result() for task in tasks]


def _sync(*paths: Path) -> None:
    try:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for directory in {path.parent for path in paths}:
            sync_directory(directory)
    except OSError as error:
        raise VmmError(f"cannot make {paths[-1]} durable: {error}") from error


def _opened(stack: ExitStack, path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd
