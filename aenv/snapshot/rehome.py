"""Move a machine onto its own snapshot: pages that it has written become mappings of the layers that hold them now.

Then they are shared with the machines that start from the snapshot, and the next capture has to look only at what was
written since.
"""

from __future__ import annotations

from aenv._native import memory
from aenv.snapshot.capture import CaptureStats
from aenv.vmm.base import MAX_EXTENTS, PAGE, MemoryMap, Vm

# Linux lets a process have 65530 mappings (vm.max_map_count).
MAPPING_LIMIT = 30_000
# One costs 4 to 9 µs while the guest is stopped; pages outside of them are compared again next time.
EXTENT_LIMIT = 384


async def rehome(vm: Vm, stats: CaptureStats, content: MemoryMap, limit: int = EXTENT_LIMIT) -> int:
    """PAUSED only, between a capture and the resume: map files over the pages that the capture has found written.

    `content` is what RAM is now: the parent of the capture, with the new layer on top; it may have any number of
    extents. The longest pieces are mapped, at most `limit`. Returns the number of pages.

    Raises LimitError and InvalidInputError with nothing changed: the machine may run on. After VmmError RAM may be half
    mapped: the machine is good for nothing but `kill`.
    """
    # Each extent cuts a mapping into three at worst.
    count = max(0, min(limit, (MAPPING_LIMIT - stats.mappings) // 2, MAX_EXTENTS))
    extents = memory.home(stats.written, content.extents, count)
    if not extents:
        return 0
    await vm.map_memory(MemoryMap(content.size, content.files, extents))
    return sum(memoryview(extents).cast("Q")[1::4]) // PAGE  # the second word of each record is its length
