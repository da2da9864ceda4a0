"""From files to a machine: a prepared VMM gets its disk, its changed memory and its device state."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from aenv._native import memory
from aenv.errors import VmmError
from aenv.snapshot.capture import THREADS
from aenv.vmm.base import Disk, Vm


async def restore(vm: Vm, *, state: Path, disk: Disk, delta: Path | None = None) -> None:
    """PREPARED → PAUSED. `vm` maps the image that `delta` changes. The caller resumes it, or kills it on failure.

    Raises VmmError.
    """
    if delta is None:
        await vm.attach_disk(disk)
    else:
        # The VMM opens the disk while threads of ours fill its memory.
        results = await asyncio.gather(vm.attach_disk(disk), apply_delta(vm, delta), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    await vm.load_state(state)


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
            return memory.apply(fd, regions[0].pid, spans, size, threads=THREADS)
        except memory.LayerError as error:
            raise VmmError(f"{delta} is damaged: {error}") from error
        except OSError as error:
            raise VmmError(f"cannot load {delta} into the machine: {error}") from error
        finally:
            os.close(fd)

    return await asyncio.to_thread(apply)
