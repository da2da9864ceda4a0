"""Templates for tests: a repository wants a manifest and files, not a machine."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from aenv.snapshot.manifest import BootFile, Disk, Manifest, SnapshotKind
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import VmmKind


def manifest(identity: str, **changes: Any) -> Manifest:
    boot = BootFile("/boot/kernel", "0" * 64)
    fields: dict[str, Any] = {
        "id": identity,
        "build_id": "b-" + identity,
        "kind": SnapshotKind.TEMPLATE,
        "created": 1000.0,
        "vmm_kind": VmmKind.QEMU_TCG,
        "vmm_version": "7.2",
        "cpu_model": "max",
        "vcpus": 1,
        "memory_mib": 128,
        "kernel": boot,
        "initrd": boot,
        "cmdline": "quiet",
        "memory": ["memory"],
        "disk": Disk("disk", "raw", 1 << 20),
    }
    return Manifest(**(fields | changes))


def staged(folder: Path, identity: str | None = None, **changes: Any) -> Path:
    """A directory as a builder leaves it, ready for `Repository.commit`."""
    identity = identity or "t" + secrets.token_hex(6)
    directory = folder / f"staged-{identity}-{secrets.token_hex(2)}"
    directory.mkdir(parents=True)
    for name in ("memory", "disk", "state"):
        (directory / name).write_bytes(b"x")
    manifest(identity, **changes).save(directory)
    return directory


def committed(repository: Repository, folder: Path, *names: str, **changes: Any) -> Template:
    return repository.commit(staged(folder, **changes), names)
