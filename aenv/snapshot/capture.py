"""From a running machine to files: stop the vCPUs, save the device state, collect the memory that has changed.

The machine stays paused, whatever happens: the caller resumes or kills it. On failure nothing is left in the directory.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aenv._native import memory
from aenv.errors import VmmError
from aenv.snapshot.manifest import DELTA_NAME, MEMORY_NAME, STATE_NAME, sync_directory
from aenv.vmm.base import MemoryRegion, Vm

# Reading another process's pages is limited by memory bandwidth; two streams fill it on small hosts.
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Sizes and times (seconds) of one capture. `stored_pages` of 4096 bytes went into the delta."""

    dirty_pages: int
    stored_pages: int
    zero_pages: int
    memory_bytes: int
    state_bytes: int
    pause_s: float
    state_s: float
    memory_s: float
    sync_s: float

    @property
    def total_s(self) -> float:
        return self.pause_s + self.state_s + self.memory_s + self.sync_s


async def capture_delta(vm: Vm, directory: Path, *, parent_image: Path | None, sync: bool = True) -> CaptureStats:
    """Write `state` and `memory.lsmt`, the changes to `parent_image` (the image the machine maps; None for zeros).

    With `sync` both are durable when this returns. Raises VmmError.
    """
    state, delta = directory / STATE_NAME, directory / DELTA_NAME
    try:
        begin = time.perf_counter()
        await vm.pause()
        paused = time.perf_counter()
        await vm.save_state(state)
        saved = time.perf_counter()
        regions = await vm.memory_regions()
        stats = await asyncio.to_thread(_collect, regions, parent_image, delta)
        collected = time.perf_counter()
        if sync:
            await asyncio.to_thread(_sync, state, delta)
        synced = time.perf_counter()
        state_bytes = state.stat().st_size
    except BaseException:
        for path in (state, delta):
            path.unlink(missing_ok=True)
        raise
    return CaptureStats(
        dirty_pages=stats["dirty_pages"],
        stored_pages=stats["stored_pages"],
        zero_pages=stats["zero_pages"],
        memory_bytes=stats["file_bytes"],
        state_bytes=state_bytes,
        pause_s=paused - begin,
        state_s=saved - paused,
        memory_s=collected - saved,
        sync_s=synced - collected,
    )


async def capture_template(vm: Vm, directory: Path, *, parent_image: Path | None) -> CaptureStats:
    """Write `state` and `memory`, the whole RAM as a sparse image, durably.

    A caller that wants its guest back sooner takes `capture_delta`, resumes, and then calls `flatten`.
    """
    stats = await capture_delta(vm, directory, parent_image=parent_image, sync=False)
    try:
        size = sum(region.length for region in await vm.memory_regions())
        await asyncio.to_thread(flatten, directory, parent_image, size)
    except BaseException:
        (directory / STATE_NAME).unlink(missing_ok=True)
        raise
    return stats


def flatten(directory: Path, parent_image: Path | None, size: int) -> None:
    """Turn the delta in `directory` over `parent_image` into the complete image `memory` of `size` bytes, durably.

    The delta is removed, on failure too. Blocking: for a thread.
    """
    delta, image = directory / DELTA_NAME, directory / MEMORY_NAME
    try:
        with ExitStack() as stack:
            layer = _opened(stack, delta, os.O_RDONLY)
            parent = -1 if parent_image is None else _opened(stack, parent_image, os.O_RDONLY)
            out = _opened(stack, image, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            memory.write_image([layer], size, parent, out)
        _sync(directory / STATE_NAME, image)
    except (memory.LayerError, OSError) as error:
        image.unlink(missing_ok=True)
        raise VmmError(f"cannot write the memory image {image}: {error}") from error
    except BaseException:
        image.unlink(missing_ok=True)
        raise
    finally:
        delta.unlink(missing_ok=True)


def _collect(regions: list[MemoryRegion], parent_image: Path | None, delta: Path) -> memory.Stats:
    size = sum(region.length for region in regions)
    with ExitStack() as stack:
        try:
            parent = -1 if parent_image is None else _opened(stack, parent_image, os.O_RDONLY)
            out = _opened(stack, delta, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            return memory.capture(
                regions[0].pid,
                [(r.address, r.guest_offset, r.length) for r in regions],
                size,
                parent,
                out,
                threads=THREADS,
                uuid=str(uuid.uuid4()),
            )
        except (memory.LayerError, OSError) as error:
            raise VmmError(f"cannot capture the memory: {error}") from error


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_directory(paths[0].parent)


def _opened(stack: ExitStack, path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd
