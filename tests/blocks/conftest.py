from __future__ import annotations

import lzma
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv._native import lsmt

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference layers, unpacked. Read-only for the tests."""
    folder = tmp_path_factory.mktemp("vectors")
    for path in VECTORS.iterdir():
        if path.suffix == ".xz":
            (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture
def new_writable(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Make the files of an empty writable layer."""

    def make(name: str, size: int) -> tuple[Path, Path]:
        data, index = tmp_path / f"{name}.data", tmp_path / f"{name}.index"
        lsmt.create_writable(data, index, size, uuid=str(uuid.uuid4()))
        return data, index

    return make
