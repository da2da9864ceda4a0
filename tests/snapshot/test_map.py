"""Memory maps of chains of layers, and layers that cannot be mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import InvalidInputError, NotFoundError
from aenv.snapshot.map import memory_map
from aenv.vmm.base import MAX_EXTENTS, MAX_FILES, PAGE, MemoryExtent, MemoryMap

PAGES = 64
SIZE = PAGES * PAGE


def layer(path: Path, parts: dict[int, int | None], *, size: int = SIZE, unit: int = PAGE, **options: object) -> Path:
    """A sealed layer: at `unit`s of the key, one of them is full of this byte, or zeroed (None)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        writer = Writer(fd, size, **options)  # type: ignore[arg-type]
        for at, byte in sorted(parts.items()):
            if byte is None:
                writer.add_zeros(at * unit, unit)
            else:
                writer.add(at * unit, bytes([byte]) * unit)
        writer.finish()
    finally:
        os.close(fd)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.write_bytes(b"\x09" * SIZE)
    return path


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    path = tmp_path / "zero"
    path.touch()
    os.truncate(path, SIZE)
    return path


def test_topmost_layer_wins_and_neighbours_join(tmp_path: Path, base: Path, zero: Path):
    low = layer(tmp_path / "low", {1: 1, 2: 1, 3: 1, 10: 1})
    high = layer(tmp_path / "high", {2: 2, 10: None, 11: None, 63: 2})
    found = memory_map(SIZE, base, [low, high], zero)
    assert found == MemoryMap.of(
        SIZE,
        [base, low, high, zero],
        [
            MemoryExtent(0, PAGE, 0, 0),
            MemoryExtent(PAGE, PAGE, 1, PAGE),
            MemoryExtent(2 * PAGE, PAGE, 2, PAGE),
            MemoryExtent(3 * PAGE, PAGE, 1, 3 * PAGE),
            MemoryExtent(4 * PAGE, 6 * PAGE, 0, 4 * PAGE),
            MemoryExtent(10 * PAGE, 2 * PAGE, 3, 10 * PAGE),
            MemoryExtent(12 * PAGE, 51 * PAGE, 0, 12 * PAGE),
            MemoryExtent(63 * PAGE, PAGE, 2, 2 * PAGE),
        ],
    )
    without = memory_map(SIZE, None, [low, high], zero)
    assert without == MemoryMap.of(
        SIZE,
        [low, high],
        [
            MemoryExtent(PAGE, PAGE, 0, PAGE),
            MemoryExtent(2 * PAGE, PAGE, 1, PAGE),
            MemoryExtent(3 * PAGE, PAGE, 0, 3 * PAGE),
            MemoryExtent(63 * PAGE, PAGE, 1, 2 * PAGE),
        ],
    ), "zeros over nothing are nothing"


def test_without_layers(base: Path, zero: Path):
    assert memory_map(SIZE, base, [], zero) == MemoryMap.whole(base, SIZE)
    assert memory_map(SIZE, None, [], zero) == MemoryMap.of(SIZE, (), ())


def test_data_longer_than_an_entry_is_one_extent(tmp_path: Path, zero: Path):
    """An entry holds 16383 sectors: others cut there, inside a page."""
    size = 16 << 20
    path = layer(tmp_path / "long", {0: 7}, size=size, unit=size)
    assert len(list(Layer(path).segments())) > 1
    found = memory_map(size, None, [path], zero)
    assert found is not None
    assert found.extents == MemoryMap.of(size, (), [MemoryExtent(0, size, 0, PAGE)]).extents


def test_too_scattered_is_none(tmp_path: Path, base: Path, zero: Path):
    path = layer(tmp_path / "layer", dict.fromkeys(range(1, PAGES - 1, 2), 5))
    count = PAGES - 1  # 31 pages, and the base before, between and after them
    found = memory_map(SIZE, base, [path], zero, limit=count)
    assert found is not None
    assert found.count == count
    assert memory_map(SIZE, base, [path], zero, limit=count - 1) is None
    assert memory_map(SIZE, base, [path], zero, limit=None) == found
    assert memory_map(SIZE, base, [path] * (MAX_FILES - 1), zero) is None
    assert MAX_EXTENTS < 65530 // 2


@pytest.mark.parametrize("options", [{"form": "lz4"}, {"form": "zstd"}, {"tar": True}])
def test_wrapped_layer_is_none(tmp_path: Path, base: Path, zero: Path, options: dict[str, object]):
    assert memory_map(SIZE, base, [layer(tmp_path / "layer", {1: 1}, **options)], zero) is None


@pytest.mark.parametrize("parts", [{1: 1}, {9: None}, {8: 1, 9: 1, 10: 1}])
def test_layer_of_parts_of_pages_is_none(tmp_path: Path, base: Path, zero: Path, parts: dict[int, int | None]):
    assert memory_map(SIZE, base, [layer(tmp_path / "layer", parts, unit=512)], zero) is None


def test_data_at_an_odd_place_is_none(tmp_path: Path, base: Path, zero: Path):
    path = layer(tmp_path / "layer", {1: 1, 16: 2, 17: 2, 18: 2, 19: 2, 20: 2, 21: 2, 22: 2, 23: 2}, unit=512)
    above = layer(tmp_path / "above", {0: 3})
    assert Stack([Layer(path), Layer(above)]).read(2 * PAGE, PAGE) == b"\2" * PAGE
    assert memory_map(SIZE, base, [path, above], zero) is None, "page 2 begins 512 bytes into a page of the file"


def test_layer_of_another_size_is_refused(tmp_path: Path, base: Path, zero: Path):
    other = layer(tmp_path / "other", {1: 1}, size=2 * SIZE)
    with pytest.raises(InvalidInputError) as caught:
        memory_map(SIZE, base, [other], zero)
    assert caught.value.field == "virtual_size"


def test_segment_beyond_the_memory_is_refused(tmp_path: Path, base: Path, zero: Path):
    """The topmost layer decides the size; one below may have grown since."""
    low = layer(tmp_path / "low", {2 * PAGES - 1: 1}, size=2 * SIZE)
    high = layer(tmp_path / "high", {1: 1})
    with pytest.raises(InvalidInputError) as caught:
        memory_map(SIZE, base, [low, high], zero)
    assert caught.value.field == "index.offset"


def test_damaged_and_missing_layers_are_refused(tmp_path: Path, base: Path, zero: Path):
    path = layer(tmp_path / "layer", {1: 1})
    content = bytearray(path.read_bytes())
    content[-4096 + 32] ^= 1  # index_offset
    path.write_bytes(content)
    with pytest.raises(InvalidInputError) as caught:
        memory_map(SIZE, base, [path], zero)
    assert caught.value.field == "trailer.index_offset"
    with pytest.raises(NotFoundError):
        memory_map(SIZE, base, [tmp_path / "none"], zero)
