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


# What pauses and resumes, it does with machines that wait for the next resume and with machines that end.
BOTH = ("test_model", "test_pause", "test_recovery", "test_rollback", "test_snapshots", "test_steps")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any(mark.args[0] == "parked" for mark in metafunc.definition.iter_markers("parametrize"))
    if metafunc.module.__name__.rpartition(".")[2] in BOTH and not chosen:
        metafunc.parametrize("parked", [8, 0], indirect=True, ids=["parked", "ended"])


@pytest.fixture(autouse=True)
def parked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "parked", getattr(request, "param", World.parked))
