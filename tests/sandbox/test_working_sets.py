"""Working sets: recorded once, read ahead once, and never the reason of a failure."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import pytest

from aenv.errors import VmmError
from aenv.sandbox.working_sets import WorkingSets
from aenv.vmm.base import Machine, MemoryMap, Vm

SHAPE = Machine(1, 1, Path("/k"), Path("/i"), "")
SIZE = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> MemoryMap:
    file = tmp_path / "image"
    file.write_bytes(b"x" * SIZE)
    return MemoryMap.whole(file, SIZE)


def recording(monkeypatch: pytest.MonkeyPatch, outcome: list[tuple[int, int]] | Exception) -> list[object]:
    calls: list[object] = []

    async def record(vm: object) -> list[tuple[int, int]]:
        calls.append(vm)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("aenv.sandbox.working_sets.record_working_set", record)
    return calls


def reading(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    calls: list[list[tuple[int, int]]] = []

    async def prefetch(content: MemoryMap, ranges: list[tuple[int, int]]) -> int:
        calls.append(ranges)
        return 0

    monkeypatch.setattr("aenv.sandbox.working_sets.prefetch", prefetch)
    return calls


def test_recorded_once_and_read_ahead_once_a_daemon(
    tmp_path: Path, image: MemoryMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, read = recording(monkeypatch, [(0, 8192), (65536, 4096)]), reading(monkeypatch)

    async def main() -> None:
        first = WorkingSets(tmp_path / "sets")
        await first.read_ahead(image, "base.lsmt")  # nobody knows it yet
        for _ in range(2):
            await first.record(cast(Vm, object()), ["base.lsmt"], SHAPE)
        await first.record(cast(Vm, object()), ["base.lsmt", "delta.lsmt"], SHAPE)  # not what others share
        assert len(recorded) == 1
        assert [p.name for p in (tmp_path / "sets").iterdir()] == ["base.lsmt"]
        assert read == []
        second = WorkingSets(tmp_path / "sets")
        for _ in range(2):
            await second.read_ahead(image, "base.lsmt")
        assert read == [[(0, 8192), (65536, 4096)]]

    asyncio.run(main())


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"AENVWSET" + b"\0" * 24])
def test_a_damaged_file_is_told_and_nothing_more(
    tmp_path: Path, image: MemoryMap, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "base.lsmt").write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        asyncio.run(WorkingSets(tmp_path).read_ahead(image, "base.lsmt"))
    assert "working_set." in caplog.text


def test_a_machine_that_cannot_be_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording(monkeypatch, VmmError("it has just ended"))
    with caplog.at_level(logging.WARNING):
        asyncio.run(WorkingSets(tmp_path / "sets").record(cast(Vm, object()), ["base.lsmt"], SHAPE))
    assert "it has just ended" in caplog.text
    assert not (tmp_path / "sets").exists()
