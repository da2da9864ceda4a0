"""Dependencies of kernel modules, read from the modules."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.boot import modules
from aenv.boot.modules import ModuleTree
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from tests.boot import elf


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """net → failover-net → failover → (built in) core; blk alone."""
    folder = tmp_path / "6.12.0/kernel/drivers"
    folder.mkdir(parents=True)
    (folder / "net.ko.xz").write_bytes(lzma.compress(elf.module("license=GPL", "depends=failover-net")))
    (folder / "failover-net.ko.gz").write_bytes(gzip.compress(elf.module("depends=failover,core", "name=f")))
    (folder / "failover.ko").write_bytes(elf.module("depends="))
    (folder / "blk.ko").write_bytes(elf.module("license=GPL"))
    (tmp_path / "6.12.0/modules.builtin").write_text("kernel/lib/core.ko\nkernel/fs/ext4/ext4.ko\n")
    return tmp_path / "6.12.0"


def test_dependencies_come_first_and_once(tree: Path) -> None:
    found = ModuleTree(tree).resolve(["blk", "net", "failover"])
    assert [m.name for m in found] == ["blk", "failover", "failover_net", "net"]
    assert all(m.data.startswith(b"\x7fELF") for m in found)


def test_built_in_needs_no_file(tree: Path) -> None:
    assert ModuleTree(tree).resolve(["ext4"]) == []


def test_dash_and_underscore_are_the_same(tree: Path) -> None:
    assert [m.name for m in ModuleTree(tree).resolve(["failover_net"])] == ["failover", "failover_net"]


def test_missing_module_is_named_with_who_needs_it(tree: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no module nonsense$"):
        ModuleTree(tree).resolve(["nonsense"])
    (tree / "kernel/needs.ko").write_bytes(elf.module("depends=gone"))
    with pytest.raises(NotFoundError, match=r"no module gone \(needed by needs\)"):
        ModuleTree(tree).resolve(["needs"])


def test_circle_is_refused(tree: Path) -> None:
    (tree / "kernel/a.ko").write_bytes(elf.module("depends=b"))
    (tree / "kernel/b.ko").write_bytes(elf.module("depends=a"))
    with pytest.raises(InvalidInputError, match="depends on itself"):
        ModuleTree(tree).resolve(["a"])


def test_folder_without_modules(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ModuleTree(tmp_path)


@pytest.mark.parametrize("name", ["m.ko.xz", "m.ko.gz", "m.ko.zst", "m.ko"])
def test_broken_files_are_named(tree: Path, name: str) -> None:
    (tree / "kernel" / name).write_bytes(b"rubbish")
    with pytest.raises(InvalidInputError, match="module m"):
        ModuleTree(tree).resolve(["m"])


def test_zstd(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = elf.module("depends=failover")
    packed = subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
    (tree / "kernel/z.ko.zst").write_bytes(packed)
    assert [m.name for m in ModuleTree(tree).resolve(["z"])] == ["failover", "z"]
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(UnavailableError, match="apt-get install zstd"):
        ModuleTree(tree).resolve(["z"])


@given(st.data())
def test_damaged_elf_never_crashes_the_reader(data: st.DataObject) -> None:
    file = bytearray(elf.module("license=GPL", "depends=a,b"))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(file[: data.draw(st.integers(0, len(file)))])
    with contextlib.suppress(InvalidInputError):
        modules.depends(cut, "m")


@pytest.mark.parametrize("offset", [2**63, 2**64 - 1])
def test_offsets_beyond_the_address_space(offset: int) -> None:
    file = bytearray(elf.module("depends=a"))
    file[40:48] = offset.to_bytes(8, "little")  # where the section table is
    with pytest.raises(InvalidInputError):
        modules.depends(bytes(file), "m")
