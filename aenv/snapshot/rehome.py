"""Move a machine onto its own snapshot: what it wrote before the capture becomes a mapping of the new layer.

Then these pages are shared with the machines that start from the snapshot, and the next capture has to look only at
what was written since.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aenv.snapshot.map import longest_extents
from aenv.vmm.base import MAX_EXTENTS, PAGE, MemoryMap, Vm

# Linux lets a process have 65530 mappings (vm.max_map_count); some room is for the next machine memory.
MAPPING_LIMIT = 30_000
# One costs a microsecond and a half while the guest is stopped; pages outside of them are compared again next time.
EXTENT_LIMIT = 2048


async def rehome(vm: Vm, layer: Path, mappings: int, limit: int = EXTENT_LIMIT) -> int:
    """PAUSED only, between a `capture` into `layer` and the resume: map its longest extents over RAM, at most `limit`.

    `mappings` is `CaptureStats.mappings`: no more extents are mapped than `MAPPING_LIMIT` leaves room for. Returns the
    number of pages. Raises VmmError: RAM may be half mapped, the machine is good for nothing but `kill`. Any other
    AenvError leaves it as it was, and it may run on.
    """
    # Each extent cuts a mapping into three at worst.
    count = max(0, min(limit, (MAPPING_LIMIT - mappings) // 2, MAX_EXTENTS))
    if count == 0:
        return 0
    size = sum(region.length for region in await vm.memory_regions())
    extents = await asyncio.to_thread(longest_extents, size, layer, count)
    if extents.count == 0:
        return 0
    await vm.map_memory(extents)
    return _covered(extents) // PAGE


def _covered(extents: MemoryMap) -> int:
    """Bytes; the second word of each record is its length."""
    return sum(memoryview(extents.extents).cast("Q")[1 :: len(extents.extents) // extents.count // 8])
