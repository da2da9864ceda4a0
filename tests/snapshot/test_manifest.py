"""The manifest: what it says survives a round trip, and what is wrong is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from aenv.snapshot.manifest import MANIFEST_NAME, BootFile, Context, Disk, Manifest, SnapshotKind
from aenv.vmm.base import Machine, VmmKind
from aenv.vmm.qemu import TCG_CPU, QemuVmm


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "vmlinuz").write_bytes(b"kernel")
    (tmp_path / "initrd").write_bytes(b"initrd")
    return Manifest(
        id="base",
        build_id="b1",
        kind=SnapshotKind.TEMPLATE,
        created=1.5,
        vmm_kind=VmmKind.QEMU_TCG,
        vmm_version="7.2.22",
        cpu_model=TCG_CPU,
        devices="microvm-2",
        vcpus=2,
        memory_mib=512,
        kernel=BootFile.of(tmp_path / "vmlinuz"),
        initrd=BootFile.of(tmp_path / "initrd"),
        cmdline="console=ttyS0",
        memory=["m1.lsmt", "m2.lsmt"],
        disk=Disk(["d1.lsmt"], 1 << 30),
        context=Context(env={"A": "ü"}, user="user", workdir="/home/user", start_cmd="run"),
    )


def test_round_trip(manifest: Manifest, tmp_path: Path):
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert manifest.machine == Machine(2, 512, tmp_path / "vmlinuz", tmp_path / "initrd", "console=ttyS0")
    assert sorted(os.listdir(tmp_path)) == ["initrd", MANIFEST_NAME, "vmlinuz"]


def test_a_snapshot_of_a_file_system_has_neither_memory_nor_state(manifest: Manifest, tmp_path: Path):
    changes: dict[str, Any] = {"kind": SnapshotKind.SNAPSHOT, "parent": "base", "sandbox": "i1"}
    for more in ({}, {"memory": [], "state": None}):
        snapshot = msgspec.structs.replace(manifest, **changes, **more)
        snapshot.save(tmp_path)
        assert Manifest.load(tmp_path) == snapshot
        assert snapshot.version == 2


def test_saving_replaces_in_one_step(manifest: Manifest, tmp_path: Path, monkeypatch):
    manifest.save(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()

    def fail(fd: int) -> None:
        raise OSError("disk failure")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk failure"):
        manifest.save(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["initrd", MANIFEST_NAME, "vmlinuz"]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", 1, "manifest.version"),
        ("version", 3, "manifest.version"),
        ("id", "../x", "manifest.id"),
        ("id", "", "manifest.id"),
        ("build_id", "a/b", "manifest.build_id"),
        ("kind", "other", "manifest.kind"),
        ("kind", "paused", "manifest.kind"),
        ("kind", "snapshot", "manifest.parent"),
        ("parent", "base", "manifest.parent"),
        ("parent", "../x", "manifest.parent"),
        ("sandbox", "i1", "manifest.sandbox"),
        ("sandbox", "a/b", "manifest.sandbox"),
        ("created", "now", "manifest.created"),
        ("created", -1, "manifest.created"),
        ("vmm_kind", "xen", "manifest.vmm_kind"),
        ("vcpus", 0, "manifest.vcpus"),
        ("vcpus", "2", "manifest.vcpus"),
        ("vcpus", True, "manifest.vcpus"),
        ("memory_mib", -5, "manifest.memory_mib"),
        ("memory_mib", 10**12, "manifest.memory_mib"),
        ("memory", [], "manifest.state"),
        ("memory", "m1.lsmt", "manifest.memory"),
        ("memory", ["m1.lsmt", "m1.lsmt"], "manifest.memory"),
        ("memory", [f"m{n}" for n in range(256)], "manifest.memory"),
        ("memory", ["m1.lsmt", 5], "manifest.memory[1]"),
        ("memory", ["../../etc/passwd"], "manifest.memory[0]"),
        ("memory", [".."], "manifest.memory[0]"),
        ("state", "/etc/passwd", "manifest.state"),
        ("state", None, "manifest.state"),
        ("kernel.path", "relative", "manifest.kernel.path"),
        ("kernel.sha256", "ABC", "manifest.kernel.sha256"),
        ("initrd.path", "/a\0b", "manifest.initrd.path"),
        ("disk.layers", [], "manifest.disk.layers"),
        ("disk.layers", ["a/b"], "manifest.disk.layers[0]"),
        ("disk.layers", ["d1.lsmt", "."], "manifest.disk.layers[1]"),
        ("disk.layers", ["d", "d"], "manifest.disk.layers"),
        ("disk.layers", [f"d{n}" for n in range(256)], "manifest.disk.layers"),
        ("disk.format", "raw", "manifest.disk"),
        ("disk.size", 100, "manifest.disk.size"),
        ("disk.size", 0, "manifest.disk.size"),
        ("disk", None, "manifest.disk"),
        ("context.env", {"A": 1}, "manifest.context.env[...]"),
        ("surprise", 1, "manifest"),
    ],
)
def test_wrong_field_is_named(manifest: Manifest, tmp_path: Path, path: str, value: Any, field: str):
    manifest.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST_NAME).read_text())
    *parents, name = path.split(".")
    inner = content
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(InvalidInputError) as caught:
        Manifest.load(tmp_path)
    assert caught.value.field == field


def test_missing_fields_are_named(manifest: Manifest, tmp_path: Path):
    manifest.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST_NAME).read_text())
    for name in ("id", "kind", "vmm_kind", "vmm_version", "memory", "disk", "kernel"):
        (tmp_path / MANIFEST_NAME).write_text(json.dumps({k: v for k, v in content.items() if k != name}))
        with pytest.raises(InvalidInputError, match=f"missing required field `{name}`"):
            Manifest.load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"id": "\xff"}', b" " * (2 << 20)])
def test_text_that_is_no_manifest(tmp_path: Path, text: bytes):
    (tmp_path / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(InvalidInputError, match=r"^manifest"):
        Manifest.load(tmp_path)


def test_directory_without_manifest_is_no_snapshot(tmp_path: Path):
    with pytest.raises(NotFoundError):
        Manifest.load(tmp_path)


def test_other_vmm_is_refused_by_what_differs(manifest: Manifest):
    manifest.require_vmm(QemuVmm(VmmKind.QEMU_TCG, version="7.2.22", binary=Path("/q")))
    for kind, version, text in (
        (VmmKind.QEMU_KVM, "7.2.22", "VMM is qemu-tcg, this node has qemu-kvm"),
        (VmmKind.QEMU_TCG, "8.2.0", "VMM version is 7.2.22, this node has 8.2.0"),
    ):
        with pytest.raises(UnavailableError, match=text):
            manifest.require_vmm(QemuVmm(kind, version=version, binary=Path("/q")))


def test_changed_or_missing_boot_file_is_refused(manifest: Manifest, tmp_path: Path):
    manifest.require_boot_files()
    (tmp_path / "initrd").write_bytes(b"other")
    with pytest.raises(UnavailableError, match=r"initrd .* has changed"):
        manifest.require_boot_files()
    (tmp_path / "vmlinuz").unlink()
    with pytest.raises(UnavailableError, match=r"kernel .* is gone"):
        manifest.require_boot_files()
