"""Templates for tests: a repository wants a manifest and files, not a machine."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from aenv.snapshot.manifest import BootFile, Disk, Manifest, SnapshotKind
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import VmmKind
from aenv.vmm.qemu import TCG_CPU

DISK_SIZE = 1 << 20


def manifest(identity: str, **changes: Any) -> Manifest:
    boot = BootFile("/boot/kernel", "0" * 64)
    fields: dict[str, Any] = {
        "id": identity,
        "build_id": "b-" + identity,
        "kind": SnapshotKind.TEMPLATE,
        "created": 1000.0,
        "vmm_kind": VmmKind.QEMU_TCG,
        "vmm_version": "7.2",
        "cpu_model": TCG_CPU,
        "devices": "microvm-2",
        "vcpus": 1,
        "memory_mib": 128,
        "kernel": boot,
        "initrd": boot,
        "cmdline": "quiet",
        "memory": [f"m-{identity}.lsmt"],
        "disk": Disk([f"d-{identity}.lsmt"], DISK_SIZE),
    }
    return Manifest(**(fields | changes))


def staged(folder: Path, identity: str | None = None, **changes: Any) -> Path:
    """A directory as a builder leaves it, ready for `Repository.commit`. Its files hold an empty JSON object."""
    identity = identity or "t" + secrets.token_hex(6)
    directory = folder / f"staged-{identity}-{secrets.token_hex(2)}"
    directory.mkdir(parents=True)
    made = manifest(identity, **changes)
    for name in (*made.memory, *made.disk.layers, *([] if made.state is None else [made.state])):
        (directory / name).write_bytes(b"{}")
    made.save(directory)
    return directory


def committed(repository: Repository, folder: Path, *names: str, **changes: Any) -> Template:
    return repository.commit(staged(folder, **changes), names)


def snapshot_of(parent: Template, sandbox: str = "i1", **changes: Any) -> dict[str, Any]:
    """What makes a manifest that of a snapshot."""
    return {"kind": SnapshotKind.SNAPSHOT, "parent": parent.id, "sandbox": sandbox} | changes
