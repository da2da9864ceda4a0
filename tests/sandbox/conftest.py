from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox import doubles
from tests.sandbox.world import World


@pytest.fixture(scope="package", autouse=True)
def _doubles() -> Iterator[None]:
    with doubles.patched():
        yield


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "home")
    yield world
    world.clear()
