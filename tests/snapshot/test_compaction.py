"""Merging of neighbouring layers against a model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv._native import lsmt
from aenv._native.lsmt import Layer, Stack, Stop
from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.snapshot.compaction import compact, worth_merging
from tests.snapshot.test_map import PAGES, SIZE, layer

LAYERS = st.lists(
    st.dictionaries(st.integers(0, PAGES - 1), st.sampled_from([None, 0, 1, 2, 255]), min_size=1, max_size=20),
    min_size=2,
    max_size=6,
)


@given(contents=LAYERS, data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merged_layers_show_the_same(tmp_path, contents, data):
    """Whichever neighbours are merged; zeros go on hiding what lies below."""
    for old in tmp_path.iterdir():
        old.unlink()
    paths = [layer(tmp_path / str(i), parts) for i, parts in enumerate(contents)]
    before = Stack([Layer(path) for path in paths]).read(0, SIZE)
    first = data.draw(st.integers(0, len(paths) - 1))
    end = data.draw(st.integers(first + 1, len(paths)))
    result = asyncio.run(compact(paths[first:end], tmp_path / "merged", below=first > 0))
    assert result.file_size == (tmp_path / "merged").stat().st_size
    merged = Layer(tmp_path / "merged")
    assert merged.info.virtual_size == SIZE
    if first == 0:
        assert not any(s.zeroed for s in merged.segments()), "nothing lies below that zeros could hide"
    paths[first:end] = [tmp_path / "merged"]
    assert Stack([Layer(path) for path in paths]).read(0, SIZE) == before


def test_cancelled_merge_leaves_nothing(tmp_path: Path, monkeypatch):
    paths = [layer(tmp_path / str(i), {i: 1}) for i in range(2)]

    async def main() -> None:
        task = asyncio.ensure_future(compact(paths, tmp_path / "out", below=False))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_stopped_merge_leaves_nothing(tmp_path: Path):
    stack = Stack([Layer(layer(tmp_path / str(i), {i: 1})) for i in range(2)])
    stop = Stop()
    stop.set()
    with (tmp_path / "out").open("w+b") as out, pytest.raises(UnavailableError, match="stopped"):
        stack.commit_in_background(out.fileno(), stop)


def test_wrong_input_leaves_nothing(tmp_path: Path):
    good, bad = layer(tmp_path / "good", {1: 1}), tmp_path / "bad"
    bad.write_bytes(bytes(8192))
    with pytest.raises(InvalidInputError):
        asyncio.run(compact([good, bad], tmp_path / "out", below=False))
    with pytest.raises(NotFoundError):
        asyncio.run(compact([good, tmp_path / "none"], tmp_path / "out", below=False))
    with pytest.raises((ConflictError, UnavailableError), match="good"):
        asyncio.run(compact([good, good], good, below=False))
    assert sorted(os.listdir(tmp_path)) == ["bad", "good"]
    assert Layer(good).info.virtual_size == SIZE, "what was in the way is untouched"


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch):
    paths = [layer(tmp_path / str(i), {i: 1}) for i in range(2)]
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: real("/dev/full", os.O_RDWR))
    with pytest.raises(UnavailableError, match="No space"):
        asyncio.run(compact(paths, tmp_path / "out", below=False))
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_more_segments_than_a_layer_holds(tmp_path: Path):
    """Others refuse more than a million: then the layers stay as they are, rather than grow."""
    paths = [layer(tmp_path / str(i), dict.fromkeys(range(i, PAGES, 4), 1)) for i in (0, 2)]
    stack = Stack([Layer(path) for path in paths])
    with (tmp_path / "out").open("w+b") as out, pytest.raises(InvalidInputError, match="segments"):
        stack.commit_in_background(out.fileno(), Stop(), keep_zeros=True, max_entries=5)
    assert lsmt.MAX_ENTRIES == 1_000_000


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([], None),
        ([100] * 8, None),
        ([1000, 90, 80, 70, 60, 50, 40, 30, 20], slice(1, 9)),
        ([1000, 100, 1, 1, 1, 1, 1, 1, 1], slice(2, 9)),
        ([1] * 9, slice(0, 9)),
        ([10**9] + [1] * 9, slice(1, 10)),
        ([3**n for n in range(10, 0, -1)], slice(7, 10)),
    ],
)
def test_what_is_worth_merging(sizes: list[int], found: slice | None):
    assert worth_merging(sizes) == found


@given(sizes=st.lists(st.integers(8192, 1 << 40), max_size=60))
def test_a_chain_is_short_after_a_merge(sizes):
    found = worth_merging(sizes)
    if found is None:
        assert len(sizes) <= 8
    else:
        assert found.stop == len(sizes)
        assert len(sizes) - (found.stop - found.start) + 1 <= 8


def test_each_byte_is_copied_a_logarithmic_number_of_times():
    sizes, copied = [], 0
    for _ in range(1000):
        sizes.append(1)
        found = worth_merging(sizes)
        if found is not None:
            copied += sum(sizes[found])
            sizes[found] = [sum(sizes[found])]
    assert sum(sizes) == 1000
    assert copied < 10 * 1000
