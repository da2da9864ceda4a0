"""Which pages of RAM a machine touches right after it was resumed: when they are not in the page cache, they are read
all at once the next time.

The file: header (magic, version, CRC-32 of the rest, memory size, number of ranges), then pairs of guest offset and
length in pages, all little-endian.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from aenv._native import memory
from aenv.errors import InvalidInputError, VmmError
from aenv.snapshot.manifest import write_atomically
from aenv.vmm.base import MAX_EXTENTS, PAGE, MemoryMap, Vm

MAGIC = b"AENVWSET"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
_RANGE = struct.Struct("<II")
_RUN = struct.Struct("=QQ")

Ranges = list[tuple[int, int]]


async def record_working_set(vm: Vm) -> Ranges:
    """What is mapped now, as (guest offset, length) in bytes, sorted, at most MAX_EXTENTS. Raises VmmError."""
    regions = await vm.memory_regions()
    spans = [(r.address, r.guest_offset, r.length) for r in regions]
    size = sum(r.length for r in regions)
    try:
        found = await asyncio.to_thread(memory.pages, regions[0].pid, spans, size, written=False)
    except OSError as error:
        raise VmmError(f"cannot read the page map of the machine: {error}") from error
    return joined(sorted(found), MAX_EXTENTS)


def joined(ranges: Iterable[tuple[int, int]], limit: int) -> Ranges:
    """Sorted ranges, with those made one that touch, and then those with the narrowest gaps until `limit` are left."""
    result: Ranges = []
    for offset, length in ranges:
        if result and offset <= sum(result[-1]):
            start, before = result[-1]
            result[-1] = (start, max(before, offset + length - start))
        else:
            result.append((offset, length))
    if len(result) <= limit:
        return result
    gaps = sorted(range(1, len(result)), key=lambda i: result[i][0] - sum(result[i - 1]))
    bridged = set(gaps[: len(result) - limit])
    return joined(
        [(o, sum(result[i + 1]) - o) if i + 1 in bridged else (o, n) for i, (o, n) in enumerate(result)], limit
    )


async def prefetch(content: MemoryMap, ranges: Sequence[tuple[int, int]]) -> int:
    """Begin to read what these ranges of RAM consist of, as far as it is not in the page cache. Returns how many bytes
    that is: 0 when all is warm. A file that cannot be read says so when the guest needs it."""
    if not ranges or not content.extents:
        return 0
    runs = b"".join(_RUN.pack(*r) for r in ranges)
    return await asyncio.to_thread(
        _prefetch, content.files, memory.home(runs, content.extents, len(ranges) + content.count)
    )


def _prefetch(files: Sequence[Path], extents: bytes) -> int:
    cold = 0
    with ExitStack() as stack, contextlib.suppress(OSError):
        opened: dict[int, int] = {}
        for _, length, number, _, offset in struct.iter_unpack("=QQIIQ", extents):
            if number not in opened:
                opened[number] = os.open(files[number], os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, opened[number])
            cold += memory.prefetch(opened[number], offset, length)
    return cold


def save_working_set(path: Path, size: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Write them durably and in one step. `size` is that of RAM in bytes."""
    body = b"".join(_RANGE.pack(offset // PAGE, length // PAGE) for offset, length in ranges)
    tail = struct.pack("<QQ", size, len(ranges)) + body
    write_atomically(path, _HEADER.pack(MAGIC, VERSION, zlib.crc32(tail), size, len(ranges)) + body)


def load_working_set(path: Path, size: int) -> Ranges:
    """Raises InvalidInputError, naming the field, for a file that is damaged or for another size of RAM."""
    content = path.read_bytes()
    if len(content) < _HEADER.size:
        raise InvalidInputError("working_set.size", f"{path} has only {len(content)} bytes")
    magic, version, crc, recorded, count = _HEADER.unpack_from(content)
    body = content[_HEADER.size :]
    for field, wrong in (
        ("magic", magic != MAGIC),
        ("version", version != VERSION),
        ("count", count > MAX_EXTENTS or count * _RANGE.size != len(body)),
        ("crc", crc != zlib.crc32(content[16:])),
        ("memory", recorded != size),
    ):
        if wrong:
            raise InvalidInputError(f"working_set.{field}", f"{path} is damaged or of another snapshot")
    ranges = [(offset * PAGE, length * PAGE) for offset, length in _RANGE.iter_unpack(body)]
    done = 0
    for offset, length in ranges:
        if offset < done or length == 0 or offset + length > size:
            raise InvalidInputError("working_set.ranges", f"{path}: not sorted, empty, or beyond the memory")
        done = offset + length
    return ranges
