"""Capture against a base that the block server shows as a file, as the base of every machine is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv._native import memory
from aenv.snapshot.map import memory_map
from aenv.vmm.base import MemoryMap
from tests.blocks.test_server import Blockd, run
from tests.native.test_memory import PAGE, PAGES, SIZE, Child, capture, page, places
from tests.snapshot.test_map import layer
from ublk.client import BlockClient

pytestmark = pytest.mark.root


def test_served_base(tmp_path: Path):
    """Zeros over zeros are left out, as far as the page cache tells; other pages are not compared with it."""
    stored = layer(tmp_path / "layer", dict.fromkeys(range(100), 9), size=SIZE)
    zero = tmp_path / "zero"
    zero.touch()
    os.truncate(zero, SIZE)

    async def body(server: Blockd, client: BlockClient) -> None:
        image = await client.open("base", [stored], cached=True, mode=0o666)
        base = MemoryMap.whole(Path(image["path"]), SIZE)
        child = Child()
        try:
            child.new(base, write={1: 9, 2: 0, 300: 0, 301: 1, 600: 0})
            delta = tmp_path / "delta"
            first, written = capture(child, delta, base)
            assert (first["stored_pages"], first["zero_pages"], first["equal_pages"]) == (2, 1, 2)
            content = memory_map(SIZE, Path(image["path"]), [delta], zero)
            assert content is not None
            child(map=places(MemoryMap(SIZE, content.files, memory.home(written, content.extents, 100))))
            assert memory.written_bytes(child.pid, child.regions, SIZE) == 0
            expected = page(9) * 100 + page(0) * (PAGES - 100)
            expected = expected[: 2 * PAGE] + page(0) + expected[3 * PAGE :]
            assert child.read() == expected[: 301 * PAGE] + page(1) + expected[302 * PAGE :]
            child(write={301: 2})
            again, _ = capture(child, tmp_path / "again", content)
            assert (again["dirty_pages"], again["stored_pages"]) == (1, 1)
        finally:
            child.end()

    run(tmp_path, body)
