"""Overlays are judged by qemu-img, the reference reader of the format."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv.errors import InvalidInputError
from aenv.storage.overlay import create_overlay

pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


def qemu(*words: str | Path) -> str:
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("size", [512, 1 << 20, 2 << 30, (512 << 30) + 512, 5 << 40])
def test_overlay_of_any_size_is_valid(tmp_path: Path, size: int) -> None:
    base, overlay = tmp_path / "base.raw", tmp_path / "top.qcow2"
    with base.open("wb") as file:
        file.truncate(min(size, 1 << 30))
    create_overlay(overlay, base, size)
    info = json.loads(qemu("qemu-img", "info", "--output=json", overlay))
    assert info["virtual-size"] == size
    assert info["format"] == "qcow2"
    assert info["full-backing-filename"] == str(base)
    assert info["backing-filename-format"] == "raw"
    check = json.loads(qemu("qemu-img", "check", "--output=json", overlay))
    assert (check.get("corruptions", 0), check.get("leaks", 0), check["check-errors"]) == (0, 0, 0)


def test_overlay_shows_the_base_and_keeps_writes_private(tmp_path: Path) -> None:
    base, overlay = tmp_path / "base.raw", tmp_path / "top.qcow2"
    base.write_bytes(bytes(range(256)) * 8192)
    before = base.read_bytes()
    create_overlay(overlay, base, len(before))
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 0xab 4096 8192", "-c", "flush", overlay)
    qemu("qemu-img", "convert", "-O", "raw", overlay, tmp_path / "out.raw")
    expected = before[:4096] + b"\xab" * 8192 + before[12288:]
    assert (tmp_path / "out.raw").read_bytes() == expected
    assert base.read_bytes() == before


def test_wrong_sizes_and_existing_files_change_nothing(tmp_path: Path) -> None:
    base, overlay = tmp_path / "base.raw", tmp_path / "top.qcow2"
    base.write_bytes(b"x")
    for size in (0, -512, 513):
        with pytest.raises(InvalidInputError, match="disk size"):
            create_overlay(overlay, base, size)
        assert not overlay.exists()
    overlay.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        create_overlay(overlay, base, 4096)
    assert overlay.read_bytes() == b"mine"
    with pytest.raises(InvalidInputError, match="base"):
        create_overlay(tmp_path / "new", tmp_path / ("/".join(["d" * 200] * 6)), 4096)
