"""Which bytes of which file are a snapshot's RAM: its base image, and over it the data of its delta layers themselves.

A machine maps the files of all its snapshot's layers, so every machine that has a layer shares its page cache, and no
server stands between a page fault and the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aenv._native.lsmt import Layer, Stack
from aenv.vmm.base import MAX_EXTENTS, MAX_FILES, MemoryMap

PLAIN = "lsmt"  # `LayerInfo.kind` of a layer whose data lies in its file as it is


def memory_map(
    size: int, base: Path | None, layers: Sequence[Path], zero: Path, *, limit: int | None = MAX_EXTENTS
) -> MemoryMap | None:
    """RAM of `size` bytes: the raw image `base` (None: zeros), and what `layers` (lowest first) map over it.

    `zero` is a sparse file of `size` bytes; it stands where a layer hides the base with zeros. None when a machine
    cannot map it so: more than `limit` extents, too many layers, or one that is compressed, wrapped, or not made of
    whole pages. Then the whole stack is served as one image. Blocking: it reads the indexes of the layers.

    Raises InvalidInputError (naming the field) for a layer that is damaged or of another size, NotFoundError and
    UnavailableError for one that cannot be read.
    """
    if len(layers) + 2 > MAX_FILES:
        return None
    if not layers:
        return MemoryMap.of(size, (), ()) if base is None else MemoryMap.whole(base, size)
    opened = [Layer(path) for path in layers]
    if any(layer.info.kind != PLAIN for layer in opened):
        return None
    stack = Stack(opened)
    if base is None:
        extents = stack.memory_extents(size, limit=limit)
        return None if extents is None else MemoryMap(size, tuple(layers), extents)
    extents = stack.memory_extents(size, base=0, layers=1, zero=len(layers) + 1, limit=limit)
    return None if extents is None else MemoryMap(size, (base, *layers, zero), extents)
