"""The root file system of `base`: sources, image, and (with the mirror) the whole thing in a guest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from aenv.errors import InvalidInputError, UnavailableError
from aenv.template import rootfs
from aenv.template.rootfs import build_rootfs, host_distribution, make_image, source_lines

MAIN = "http://mirror.example/debian/|bookworm|main"


def test_sources_are_those_of_the_distribution_only() -> None:
    targets = [
        MAIN,
        MAIN,
        "http://mirror.example/debian/|bookworm-updates|main",
        "http://security.example/|bookworm-security|main",
        "http://mirror.example/debian/|bookworm|contrib",
        "http://mirror.example/debian/|bookworm-backports|main",
        "https://vendor.example/|nodistro|main",
        "https://docker.example/|bookworm|stable",
        "no fields",
        "file with blank|bookworm|main",
    ]
    assert source_lines(targets, "debian", "bookworm") == (
        "deb http://mirror.example/debian bookworm main",
        "deb http://security.example bookworm-security main",
        "deb http://mirror.example/debian bookworm-updates main",
    )


def test_no_main_archive_no_sources() -> None:
    assert source_lines(["http://security.example/|bookworm-security|main"], "debian", "bookworm") == ()
    assert source_lines([], "ubuntu", "noble") == ()


def test_ubuntu_has_universe() -> None:
    lines = source_lines(["http://u.example/|noble|main", "http://u.example/|noble|universe"], "ubuntu", "noble")
    assert lines == ("deb http://u.example noble main", "deb http://u.example noble universe")


@pytest.mark.parametrize("text", ["", "ID=fedora\nVERSION_CODENAME=x\n", 'ID=debian\nVERSION_CODENAME="a b"\n'])
def test_other_hosts_get_debian_stable(tmp_path: Path, text: str) -> None:
    (tmp_path / "os-release").write_text(text)
    assert host_distribution(tmp_path / "os-release") == rootfs.Distribution("debian", "stable", ())


@pytest.mark.parametrize("size", [0, -1, 511, 1 << 40])
def test_bad_size_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(InvalidInputError, match="disk_mib"):
        build_rootfs(tmp_path / "x", tmp_path / "work", print, disk_mib=size)
    assert list(tmp_path.iterdir()) == []


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(UnavailableError, match="apt-get install mmdebstrap"):
        build_rootfs(tmp_path / "x", tmp_path / "work", print)


def test_only_root_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="root"):
        build_rootfs(tmp_path / "x", tmp_path / "work", print)


@pytest.mark.root
def test_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(UnavailableError, match="1 MiB free"):
        build_rootfs(tmp_path / "x", tmp_path / "work", print)


@pytest.mark.root
@pytest.mark.parametrize("tool", ["mmdebstrap", "mke2fs"])
def test_a_tool_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, status in (("mmdebstrap", 7), ("mke2fs", 7)):
        (fake / name).write_text(
            f"#!/bin/sh\necho I: step >&2\necho the reason >&2\nexit {status if name == tool else 0}\n"
        )
        (fake / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setattr(rootfs, "_customise", lambda tree: tree.mkdir(exist_ok=True))
    monkeypatch.setattr(rootfs, "host_distribution", lambda: rootfs.Distribution("debian", "stable", ()))
    (tmp_path / "work/.build-dead/tree").mkdir(parents=True)  # of a build that was killed
    lines: list[str] = []
    with pytest.raises(UnavailableError, match=rf"{tool} failed.*the reason"):
        build_rootfs(tmp_path / "image", tmp_path / "work", lines.append)
    assert "step" in lines
    assert [p.name for p in (tmp_path / "work").iterdir() if p.name.startswith(".")] == []
    assert not (tmp_path / "image").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.root
def test_image_keeps_owners_modes_and_holes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "home/user").mkdir(parents=True)
    os.chown(tree / "home/user", 1000, 1000)
    (tree / "su").write_bytes(b"x")
    (tree / "su").chmod(0o4755)
    os.setxattr(tree / "su", "security.capability", bytes.fromhex("01000002002000000000000000000000" + "00000000"))
    image = tmp_path / "deep/image"
    make_image(tree, image, 512)

    def ask(request: str) -> str:
        return subprocess.run(["debugfs", "-R", request, str(image)], capture_output=True, text=True, check=True).stdout

    assert subprocess.run(["e2fsck", "-fn", str(image)], capture_output=True, check=False).returncode == 0
    assert "User:  1000   Group:  1000" in ask("stat /home/user")
    assert "Mode:  04755" in ask("stat /su")
    assert "security.capability" in ask("stat /su")
    assert image.stat().st_size == 512 << 20
    assert image.stat().st_blocks * 512 < 64 << 20
    # what the kernel would initialise in the background is initialised
    groups = subprocess.run(["dumpe2fs", str(image)], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"^Group \d+:", groups, re.MULTILINE)) == groups.count("ITABLE_ZEROED") == 4
    assert sorted(p.name for p in image.parent.iterdir()) == ["image"]


@pytest.mark.root
def test_content_that_does_not_fit_is_told(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "big").open("wb") as file:
        file.write(os.urandom(80 << 20))
    with pytest.raises(UnavailableError, match="mke2fs failed"):
        make_image(tree, tmp_path / "image", 64)
    assert not (tmp_path / "image").exists()
