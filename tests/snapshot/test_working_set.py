"""The file of a working set, whole and damaged."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aenv.errors import InvalidInputError
from aenv.snapshot.working_set import joined, load_working_set, save_working_set
from aenv.vmm.base import PAGE

SIZE = 1 << 30
RANGES = [(0, PAGE), (3 * PAGE, 2 * PAGE), (SIZE - PAGE, PAGE)]


def test_round_trip(tmp_path: Path):
    save_working_set(tmp_path / "set", SIZE, RANGES)
    assert load_working_set(tmp_path / "set", SIZE) == RANGES
    save_working_set(tmp_path / "set", SIZE, [])
    assert load_working_set(tmp_path / "set", SIZE) == []


def made(ranges: list[tuple[int, int]], *, version: int = 1, count: int | None = None, size: int = SIZE) -> bytes:
    body = b"".join(struct.pack("<II", *r) for r in ranges)
    tail = struct.pack("<QQ", size, len(ranges) if count is None else count) + body
    return struct.pack("<8sII", b"AENVWSET", version, zlib.crc32(tail)) + tail


HOSTILE = {
    "empty": (b"", "size"),
    "short": (made([])[:-1], "size"),
    "magic": (b"X" + made([])[1:], "magic"),
    "version": (made([], version=2), "version"),
    "count": (made([(0, 1)], count=2), "count"),
    "count-huge": (made([(0, 1)], count=1 << 61), "count"),
    "many": (made([(2 * n, 1) for n in range(16385)]), "count"),
    "crc": (made([(0, 1)])[:-1] + b"\1", "crc"),
    "memory": (made([(0, 1)], size=2 * SIZE), "memory"),
    "nothing": (made([(5, 0)]), "ranges"),
    "overlap": (made([(5, 2), (6, 1)]), "ranges"),
    "disorder": (made([(5, 2), (1, 1)]), "ranges"),
    "beyond": (made([(SIZE // PAGE - 1, 2)]), "ranges"),
    "far-beyond": (made([(0xFFFFFFFF, 0xFFFFFFFF)]), "ranges"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damage_is_refused(tmp_path: Path, name: str):
    content, field = HOSTILE[name]
    (tmp_path / "set").write_bytes(content)
    with pytest.raises(InvalidInputError) as caught:
        load_working_set(tmp_path / "set", SIZE)
    assert caught.value.field == f"working_set.{field}"


def test_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load_working_set(tmp_path / "set", SIZE)


@example({0: 3, 1: 1}, 1)
@given(st.dictionaries(st.integers(0, 200), st.integers(1, 5)), st.integers(1, 20))
def test_joined_ranges_cover_all_with_few(pages, limit):
    found = joined(sorted(pages.items()), limit)
    assert len(found) <= limit
    covered = {n for offset, length in found for n in range(offset, offset + length)}
    assert {n for offset, length in pages.items() for n in range(offset, offset + length)} <= covered
    assert all(sum(a) < b[0] for a, b in itertools.pairwise(found))
