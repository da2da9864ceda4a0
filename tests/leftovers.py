"""What tests may leave outside their own process: VMMs, namespaces, links, mounts, run directories, loop devices.

Other test runs and daemons may be at work on the same machine. So a thing counts only when it can be ours: a process
that we started or that works in our directories, a mount or loop device of a file below our temporary directory, and a
name (of a namespace, link or run directory) that holds a mark which one of our tests has claimed, or that is none of
the names this project gives.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from aenv.storage.home import Home

PATIENCE = 10.0  # seconds that the kernel may take to finish what a test has ended
# Names that this project and its tests give: only the marks inside tell whose they are.
_PROJECT_NAME = re.compile(r"aenv-|test-|ae[0-9a-f]{4}")


class Claims:
    """The marks and directories of this test run."""

    def __init__(self) -> None:
        self._marks: set[str] = set()
        self._directories: list[str] = []

    def directory(self, path: Path) -> None:
        """Whatever works in, or is backed by, something below `path` is ours."""
        self._directories.append(f"{path.resolve()}/")

    def mark(self, mark: str) -> str:
        """A random part of names that we give. Returns it."""
        self._marks.add(mark)
        return mark

    def home(self, root: Path) -> None:
        """A home directory: builds use the first half of its tag and a second half of their own."""
        home = Home(root, root)
        self.mark(home.tag[:4])
        self.directory(home.run)

    def owns_path(self, path: str) -> bool:
        return any(f"{path}/".startswith(directory) for directory in self._directories)

    def owns_name(self, name: str) -> bool:
        return not _PROJECT_NAME.match(name) or any(mark in name for mark in self._marks)


CLAIMS = Claims()


@dataclass(frozen=True)
class Leftovers:
    """Things of ours that exist outside any process of the test."""

    vmms: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    mounts: frozenset[str]
    run_directories: frozenset[str]
    loop_devices: frozenset[str]

    @classmethod
    def look(cls, claims: Claims = CLAIMS) -> Leftovers:
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        return cls(
            vmms=frozenset(_vmm_processes(claims)),
            namespaces=frozenset(n for n in _names("/run/netns") if claims.owns_name(n)),
            links=frozenset(n for n in _names("/sys/class/net") if claims.owns_name(n)),
            mounts=frozenset(
                m
                for m in mounts
                if claims.owns_path(m) or (m.startswith("/run/netns/") and claims.owns_name(Path(m).name))
            ),
            run_directories=frozenset(str(p) for p in Path("/run/aenv").glob("*/*-*") if claims.owns_path(str(p))),
            loop_devices=frozenset(
                p.parents[1].name
                for p in Path("/sys/block").glob("loop*/loop/backing_file")
                if claims.owns_path(_read(p).removesuffix(" (deleted)"))
            ),
        )

    def beyond(self, before: Leftovers) -> dict[str, frozenset[str]]:
        more = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        return {name: found for name, found in more.items() if found}


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails the test when there is more afterwards than before."""
    before = Leftovers.look()
    yield
    deadline = time.monotonic() + PATIENCE
    while found := Leftovers.look().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: { {k: sorted(v) for k, v in found.items()} }")
        time.sleep(0.05)  # processes and namespaces end in the kernel's own time; nothing tells us


def _names(directory: str) -> frozenset[str]:
    path = Path(directory)
    return frozenset(os.listdir(path)) if path.is_dir() else frozenset()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # detached just now


def _vmm_processes(claims: Claims) -> Iterator[str]:
    parents: dict[int, int] = {}
    found: list[tuple[int, str, str]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text(errors="replace")
            words = (entry / "cmdline").read_bytes().split(b"\0")
            exe, cwd = os.readlink(entry / "exe"), os.readlink(entry / "cwd")
        except OSError:
            continue  # a kernel thread, or it has just ended
        pid = int(entry.name)
        parents[pid] = int(status[status.rindex(")") + 2 :].split()[1])
        if "qemu-system" in exe or any(word.endswith(b"/aenv-blockd") or word == b"ublk" for word in words[:4]):
            found.append((pid, exe, cwd))
    for pid, exe, cwd in found:
        if claims.owns_path(cwd) or _descends(pid, parents):
            yield f"{pid} {exe}"


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False
