"""From files to a machine: a prepared VMM gets its disk, its memory and its device state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path

from aenv._native import memory as native
from aenv.errors import VmmError
from aenv.snapshot.capture import THREADS
from aenv.vmm.base import Disk, MemoryMap, Vm


async def restore(
    vm: Vm,
    *,
    state: Path,
    disk: Disk,
    memory: MemoryMap | None = None,
    working_set: Sequence[tuple[int, int]] = (),
    delta: Path | None = None,
) -> None:
    """PREPARED → PAUSED. The caller resumes it, or kills it on failure.

    `memory` is what RAM shall be (None: what it is already); pages of `working_set` (see `working_set.py`) are mapped
    ahead, while the device state is loaded. Raises VmmError, InvalidInputError and LimitError.
    """
    await _all(vm.attach_disk(disk), _fill(vm, memory, delta))
    if working_set:
        await _all(vm.load_state(state), vm.populate(working_set))
    else:
        await vm.load_state(state)


async def _fill(vm: Vm, memory: MemoryMap | None, delta: Path | None) -> None:
    if memory is not None:
        await vm.map_memory(memory)
    if delta is not None:
        await apply_delta(vm, delta)


async def _all(*work: Awaitable[None]) -> None:
    """The VMM works on all at once; the first error is raised when all have ended."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def apply_delta(vm: Vm, delta: Path) -> int:
    """Write the pages of a memory layer into a machine that does not run; returns their number."""
    regions = await vm.memory_regions()
    size = sum(region.length for region in regions)

    def apply() -> int:
        try:
            fd = os.open(delta, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise VmmError(f"cannot open {delta}: {error.strerror}") from error
        try:
            spans = [(r.address, r.guest_offset, r.length) for r in regions]
            return native.apply(fd, regions[0].pid, spans, size, threads=THREADS)
        except native.LayerError as error:
            raise VmmError(f"{delta} is damaged: {error}") from error
        except OSError as error:
            raise VmmError(f"cannot load {delta} into the machine: {error}") from error
        finally:
            os.close(fd)

    return await asyncio.to_thread(apply)
