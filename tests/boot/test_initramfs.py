"""What is in an initramfs, and that it is built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv.boot import cpio
from aenv.boot.initramfs import assemble, build_initramfs
from aenv.boot.kernel import Kernel
from aenv.boot.modules import Module
from aenv.errors import InvalidInputError, NotFoundError
from tests.boot import elf


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    folder = tmp_path / "modules/kernel"
    folder.mkdir(parents=True)
    for name in ("virtio_mmio", "virtio_blk"):
        (folder / f"{name}.ko").write_bytes(elf.module(f"name={name}"))
    (folder / "virtio_net.ko").write_bytes(elf.module("depends=net_failover"))
    (folder / "net_failover.ko").write_bytes(elf.module())
    (tmp_path / "modules/modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    return Kernel(tmp_path / "vmlinuz", tmp_path / "modules", "6.12.0", "linux-image-6.12.0")


@pytest.fixture
def programs(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("init", "envd"):
        (tmp_path / name).write_bytes(b"\x7fELF" + name.encode())
    return tmp_path / "init", tmp_path / "envd"


def test_content(kernel: Kernel, programs: tuple[Path, Path], tmp_path: Path) -> None:
    path = build_initramfs(kernel, *programs, tmp_path / "cache")
    entries = {e.name: e for e in cpio.read_archive(path.read_bytes())}
    assert entries["init"].mode == 0o100755
    assert entries["envd"].data == b"\x7fELFenvd"
    assert (entries["dev/console"].major, entries["dev/console"].minor) == (5, 1)
    listed = entries["modules.list"].data.decode().splitlines()
    assert [Path(p).name for p in listed] == [
        "00-virtio_mmio.ko", "01-virtio_blk.ko", "02-net_failover.ko", "03-virtio_net.ko",
    ]  # fmt: skip
    assert all(p.removeprefix("/") in entries for p in listed)


def test_built_once_and_again_when_a_part_changes(kernel: Kernel, programs: tuple[Path, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build_initramfs(kernel, *programs, cache)
    stamp = first.stat().st_mtime_ns
    assert build_initramfs(kernel, *programs, cache) == first
    assert first.stat().st_mtime_ns == stamp
    programs[1].write_bytes(b"\x7fELFother")
    second = build_initramfs(kernel, *programs, cache)
    assert second != first
    assert sorted(cache.iterdir()) == sorted([first, second])


def test_equal_parts_give_equal_bytes() -> None:
    modules = [Module("a", b"1"), Module("b", b"22")]
    assert assemble(b"i", b"e", modules) == assemble(b"i", b"e", list(modules))


def test_missing_parts_are_named(kernel: Kernel, programs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"guest program envd is not built.*make setup"):
        build_initramfs(kernel, programs[0], tmp_path / "gone", tmp_path)
    with pytest.raises(NotFoundError, match="no module nonsense"):
        build_initramfs(kernel, *programs, tmp_path, modules=["nonsense"])
    programs[0].write_text("#!/bin/sh\n")
    with pytest.raises(InvalidInputError, match=r"^init: "):
        build_initramfs(kernel, *programs, tmp_path)
