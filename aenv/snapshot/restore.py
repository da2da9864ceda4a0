"""From files to a machine: a prepared VMM gets its disk, its memory and its device state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

from aenv.snapshot.working_set import prefetch
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

    `memory` is what RAM shall be; what is not in the page cache of its `working_set` (see `working_set.py`) begins to
    be read. Raises VmmError, InvalidInputError and LimitError.
    """
    await _all(prefetch(memory, working_set), vm.attach_disk(disk), vm.map_memory(memory))
    await vm.load_state(state)


async def _all(*work: Awaitable[object]) -> None:
    """The VMM works on all at once; the first error is raised when all have ended."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
