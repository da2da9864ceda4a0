"""The initramfs of a guest: init, envd and the modules that this kernel needs for the devices of a micro-VM."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aenv.boot import cpio
from aenv.boot.kernel import Kernel
from aenv.boot.modules import Module, ModuleTree
from aenv.errors import InvalidInputError, NotFoundError

# What the devices and the root disk of a guest need; which of them are built in differs from kernel to kernel.
MODULES = ("virtio_mmio", "virtio_blk", "virtio_net", "ext4")
MODULE_FOLDER = "modules"


def build_initramfs(kernel: Kernel, init: Path, envd: Path, cache: Path, *, modules: Sequence[str] = MODULES) -> Path:
    """Make the initramfs, or find it: the file in `cache` is named by the SHA-256 of its content.

    It is not compressed: 3 MB are read in a millisecond, and an emulated guest would have to decompress them.
    Raises NotFoundError when a program or module is missing, InvalidInputError when one is not what it should be.
    """
    archive = assemble(_program(init, "init"), _program(envd, "envd"), ModuleTree(kernel.modules_dir).resolve(modules))
    target = cache / f"initramfs-{hashlib.sha256(archive).hexdigest()[:32]}.cpio"
    if not target.exists():
        _store(archive, target)
    return target


def assemble(init: bytes, envd: bytes, modules: Sequence[Module]) -> bytes:
    """The archive: equal input gives equal bytes."""
    paths = [f"{MODULE_FOLDER}/{number:02d}-{module.name}.ko" for number, module in enumerate(modules)]
    return cpio.write_archive(
        [
            cpio.directory("dev"),
            cpio.character_device("dev/console", 5, 1),  # the kernel opens it for PID 1 before devtmpfs is mounted
            cpio.directory("proc"),
            cpio.directory("sys"),
            cpio.directory("newroot"),
            cpio.regular("init", init, 0o755),
            cpio.regular("envd", envd, 0o755),
            cpio.directory(MODULE_FOLDER),
            *(cpio.regular(path, module.data) for path, module in zip(paths, modules, strict=True)),
            cpio.regular("modules.list", "".join(f"/{path}\n" for path in paths).encode()),
        ]
    )


def _program(path: Path, what: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"the guest program {what} is not built: {path}", hint="make setup") from error
    if data[:4] != b"\x7fELF":
        raise InvalidInputError(what, f"{path} is not an ELF program")
    return data


def _store(archive: bytes, target: Path) -> None:
    """Write beside the target and rename, so that nobody ever sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".initramfs-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(archive)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
