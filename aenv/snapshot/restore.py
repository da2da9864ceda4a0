"""From files to a machine: a prepared VMM gets its disk, its memory and its device state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

from aenv.vmm.base import Disk, MemoryMap, Vm


async def restore(
    vm: Vm,
    *,
    state: Path,
    disk: Disk,
    memory: MemoryMap,
    working_set: Sequence[tuple[int, int]] = (),
) -> None:
    """PREPARED → PAUSED. The caller resumes it, or kills it on failure.

    `memory` is what RAM shall be; pages of `working_set` (see `working_set.py`) are mapped
    ahead, while the device state is loaded. Raises VmmError, InvalidInputError and LimitError.
    """
    await _all(vm.attach_disk(disk), vm.map_memory(memory))
    if working_set:
        await _all(vm.load_state(state), vm.populate(working_set))
    else:
        await vm.load_state(state)


async def _all(*work: Awaitable[None]) -> None:
    """The VMM works on all at once; the first error is raised when all have ended."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
