"""Fetching a kernel, with stand-ins for apt on the PATH and real packages made by dpkg-deb."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from aenv.boot.kernel import choose, ensure_kernel, image_release, prepared_kernel
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from tests.boot import elf

DEBIAN = "linux-image-{}-cloud-amd64"


class FakeApt:
    """A directory with the programs `apt-cache` and `apt-get` that serve packages of another directory and log."""

    def __init__(self, root: Path) -> None:
        self.root, self.pool, self.log = root, root / "pool", root / "log"
        self.bin = root / "bin"
        self.pool.mkdir(parents=True)
        self.bin.mkdir()
        self.names = root / "names"
        self.names.write_text("apt\n")
        self._script("apt-cache", f'grep -E -- "$3" {self.names} | sed "s/$/ - text/"; true')
        self._script(
            "apt-get",
            f'echo "$@" >> {self.log}\n'
            "for last; do :; done\n"
            f'case "$*" in *update*) [ ! -e {root}/offline ] || {{ echo "E: no network" >&2; exit 100; }}; '
            f"[ ! -e {root}/new ] || cp {root}/new {self.names};; "
            f'*download*) cp {self.pool}/"$last".deb . || {{ echo "E: Failed to fetch" >&2; exit 100; }};; esac',
        )

    def _script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def package(self, name: str, files: dict[str, bytes]) -> None:
        tree = self.root / "tree" / name
        for path, data in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: 1.0\nArchitecture: amd64\nMaintainer: T <t@example.invalid>\nDescription: x\n"
        )
        subprocess.run(["dpkg-deb", "-b", str(tree), str(self.pool / f"{name}.deb")], check=True, capture_output=True)
        with self.names.open("a") as file:
            file.write(name + "\n")

    def kernel_package(self, release: str, *, inside: str | None = None, modules: str = "lib/modules") -> None:
        self.package(
            DEBIAN.format(release),
            {
                f"boot/vmlinuz-{release}": _image(inside or f"{release}-cloud-amd64"),
                f"{modules}/{release}-cloud-amd64/kernel/virtio_blk.ko": elf.module(),
            },
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def _image(release: str) -> bytes:
    return elf.bzimage(release, lzma.compress(elf.kernel()), size=len(elf.kernel()))


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    fake = FakeApt(tmp_path / "apt")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


def test_newest_of_the_best_series_is_prepared_once(apt: FakeApt, tmp_path: Path) -> None:
    for release in ("6.12.9+deb12", "6.12.10+deb12", "6.1.0-99"):
        apt.kernel_package(release)
    lines: list[str] = []
    kernel = ensure_kernel(tmp_path / "home", lines.append)
    assert kernel.release == "6.12.10+deb12-cloud-amd64"
    assert kernel.package == "linux-image-6.12.10+deb12-cloud-amd64"
    assert kernel.vmlinuz.read_bytes() == _image(kernel.release)
    assert kernel.vmlinux is not None
    assert kernel.vmlinux.read_bytes() == elf.kernel()
    assert kernel.boot_image == kernel.vmlinux
    assert (kernel.modules_dir / "kernel/virtio_blk.ko").exists()
    assert lines
    calls = apt.calls()
    assert not any("update" in call for call in calls)

    silent: list[str] = []
    assert ensure_kernel(tmp_path / "home", silent.append) == kernel
    assert silent == []
    assert apt.calls() == calls
    assert sorted(p.name for p in (tmp_path / "home/kernel").iterdir()) == [
        "6.12.10+deb12-cloud-amd64",
        "current.json",
        "lock",
    ]


def test_falls_back_to_the_older_series(apt: FakeApt, tmp_path: Path) -> None:
    apt.kernel_package("6.1.0-9", modules="usr/lib/modules")
    apt.kernel_package("5.10.0-9")
    assert ensure_kernel(tmp_path, print).release == "6.1.0-9-cloud-amd64"


def test_ubuntu_has_modules_in_a_package_of_their_own(apt: FakeApt, tmp_path: Path) -> None:
    for release in ("6.8.0-9-generic", "6.8.0-45-generic"):
        apt.package(f"linux-image-{release}", {f"boot/vmlinuz-{release}": _image(release)})
        apt.package(f"linux-modules-{release}", {f"lib/modules/{release}/kernel/virtio_blk.ko": elf.module()})
    kernel = ensure_kernel(tmp_path, print)
    assert kernel.release == "6.8.0-45-generic"
    assert (kernel.modules_dir / "kernel/virtio_blk.ko").exists()


def test_without_a_note_for_qemu_the_bzimage_boots(apt: FakeApt, tmp_path: Path) -> None:
    release = "6.12.1-cloud-amd64"
    plain = elf.kernel(pvh=False)
    apt.package(
        f"linux-image-{release}",
        {f"boot/vmlinuz-{release}": elf.bzimage(release, lzma.compress(plain), size=len(plain)),
         f"lib/modules/{release}/kernel/x.ko": elf.module()},
    )  # fmt: skip
    kernel = ensure_kernel(tmp_path, print)
    assert kernel.vmlinux is None
    assert kernel.boot_image == kernel.vmlinuz


def test_empty_lists_are_updated(apt: FakeApt, tmp_path: Path) -> None:
    apt.kernel_package("6.12.1")
    (apt.root / "new").write_text(apt.names.read_text())
    apt.names.write_text("")
    assert ensure_kernel(tmp_path, print).release == "6.12.1-cloud-amd64"
    assert sum("update" in call for call in apt.calls()) == 1


def test_stale_lists_are_updated_once(apt: FakeApt, tmp_path: Path) -> None:
    apt.names.write_text("apt\nlinux-image-6.12.1-cloud-amd64\n")
    with pytest.raises(UnavailableError, match=r"Failed to fetch.*mirror"):
        ensure_kernel(tmp_path, print)
    assert sum("update" in call for call in apt.calls()) == 1
    assert sorted(p.name for p in (tmp_path / "kernel").iterdir()) == ["lock"]


def test_no_network_is_told(apt: FakeApt, tmp_path: Path) -> None:
    apt.names.write_text("")
    (apt.root / "offline").touch()
    with pytest.raises(UnavailableError, match="no network") as caught:
        ensure_kernel(tmp_path, print)
    assert caught.value.hint is not None


def test_no_fitting_package(apt: FakeApt, tmp_path: Path) -> None:
    apt.names.write_text("apt\nlinux-image-5.10.0-1-cloud-amd64\nlinux-image-6.12.1-cloud-arm64\n")
    with pytest.raises(NotFoundError, match="no fitting kernel"):
        ensure_kernel(tmp_path, print)


def test_no_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"no apt-cache.*Debian or Ubuntu"):
        ensure_kernel(tmp_path, print)


def test_full_disk_is_told_before_the_download(apt: FakeApt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UnavailableError, match="0 MiB free"):
        ensure_kernel(tmp_path, print)
    assert apt.calls() == []


@pytest.mark.parametrize(
    "files",
    [
        {"boot/config": b""},
        {"boot/vmlinuz-6.12.1": _image("6.12.1")},
        {"boot/vmlinuz-6.12.1": _image("6.12.1"), "lib/modules/6.12.2/kernel/x.ko": b""},
        {"boot/vmlinuz-6.12.1": _image("../../etc"), "lib/modules/6.12.1/kernel/x.ko": b""},
        {"boot/vmlinuz-6.12.1": b"no kernel", "lib/modules/6.12.1/kernel/x.ko": b""},
        {"boot/vmlinuz-6.12.1": elf.bzimage("6.12.1", b"?" * 99, size=3), "lib/modules/6.12.1/kernel/x.ko": b""},
    ],
)
def test_odd_packages_are_refused_and_leave_nothing(apt: FakeApt, tmp_path: Path, files: dict[str, bytes]) -> None:
    apt.package("linux-image-6.12.1-cloud-amd64", files)
    with pytest.raises(InvalidInputError, match=r"linux-image-6\.12\.1-cloud-amd64"):
        ensure_kernel(tmp_path, print)
    assert sorted(p.name for p in (tmp_path / "kernel").iterdir()) == ["lock"]


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        '{"release": "x"}',
        json.dumps({"release": "../..", "package": "p"}),
        json.dumps({"release": 5, "package": "p"}),
        json.dumps({"release": "6.12.99-gone", "package": "p"}),
    ],
)
def test_damaged_record_is_repaired(apt: FakeApt, tmp_path: Path, record: str) -> None:
    apt.kernel_package("6.12.1")
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/current.json").write_text(record)
    assert prepared_kernel(tmp_path) is None
    kernel = ensure_kernel(tmp_path, print)
    assert prepared_kernel(tmp_path) == kernel


def test_damaged_kernel_is_repaired(apt: FakeApt, tmp_path: Path) -> None:
    apt.kernel_package("6.12.1")
    kernel = ensure_kernel(tmp_path, print)
    kernel.vmlinuz.unlink()
    assert ensure_kernel(tmp_path, print) == kernel
    assert kernel.vmlinuz.exists()


def test_choose() -> None:
    assert choose([]) is None
    assert choose(["linux-image-6.12.1-cloud-amd64-unsigned"]) is None
    assert choose(["linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-10-cloud-amd64"]) == (
        "linux-image-6.1.0-10-cloud-amd64"
    )
    assert choose(["linux-image-6.8.0-9-generic", "linux-image-6.8.0-9-kvm"]) == "linux-image-6.8.0-9-kvm"


@pytest.mark.parametrize("image", [b"", bytes(2000), elf.bzimage("", b""), elf.bzimage("no number", b"")])
def test_release_of_a_bad_image(image: bytes) -> None:
    with pytest.raises(InvalidInputError):
        image_release(image, "k")


def test_two_callers_fetch_once(apt: FakeApt, tmp_path: Path) -> None:
    apt.kernel_package("6.12.1")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_kernel(tmp_path, print), range(2))
    assert first == second
    assert sum("download" in call for call in apt.calls()) == 1


def test_leftovers_of_a_killed_fetch_are_removed(apt: FakeApt, tmp_path: Path) -> None:
    apt.kernel_package("6.12.1")
    (tmp_path / "kernel/.fetch-dead/tree").mkdir(parents=True)
    ensure_kernel(tmp_path, print)
    assert not (tmp_path / "kernel/.fetch-dead").exists()
