from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.kernel import ublk_kernel
from tests.kernel.root import build_initramfs, build_root, make_ext4
from tests.kernel.vm import Machine
from tests.leftovers import nothing_left_behind

DATA_BYTES = 2 << 30  # of the disk for images; sparse


@pytest.fixture(scope="package")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One machine for all tests: each leaves it as it was, which is one of the tests."""
    cache = Path(os.environ.get("AENV_CACHE") or Path.home() / ".cache/aenv")
    folder = tmp_path_factory.mktemp("kernel")
    kernel = ublk_kernel(cache, print)
    build_initramfs(kernel, folder / "initramfs")
    build_root(kernel, folder, folder / "root.img")
    make_ext4(folder / "data.img", DATA_BYTES)
    with nothing_left_behind():
        running = Machine(kernel, folder / "initramfs", folder / "root.img", folder / "data.img", folder)
        yield running
        running.end()


@pytest.fixture
def no_leaks(machine: Machine) -> Iterator[None]:
    """The machine lives on after a test; nothing else does."""
    with nothing_left_behind():
        yield
