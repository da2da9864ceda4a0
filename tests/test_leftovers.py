"""What the search for leftovers finds, and what it leaves to others."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.network import namespace
from aenv.storage.home import Home
from tests.leftovers import Claims, Leftovers


@pytest.fixture
def claims() -> Claims:
    return Claims()


def test_a_home_owns_its_run_directory_and_the_names_with_its_tag(claims: Claims, tmp_path: Path) -> None:
    tag = namespace_tag(claims, tmp_path / "home")
    assert claims.owns_path(f"/run/aenv/{tag}/vm-1")
    assert not claims.owns_path(f"/run/aenv/{tag}x/vm-1")
    for name in (f"aenv-{tag}-3", f"ae{tag}-3", f"aenv-{tag[:4]}ffff-0"):
        assert claims.owns_name(name), name
    for name in ("aenv-other-3", "ae0123-3", "test-up-other"):
        assert not claims.owns_name(name), name
    assert claims.owns_name("eth7"), "nobody else gives such a name during tests"


def namespace_tag(claims: Claims, home: Path) -> str:
    claims.home(home)
    return Home(home, home).tag


@pytest.fixture
def run_directory() -> Iterator[Path]:
    folder = Path("/run/aenv") / f"test-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.root
def test_a_namespace_counts_when_its_mark_is_ours(claims: Claims) -> None:
    mark = secrets.token_hex(4)
    before = Leftovers.look(claims)
    namespace.create(f"aenv-{mark}-0")
    try:
        assert Leftovers.look(claims).beyond(before) == {}
        claims.mark(mark)
        found = Leftovers.look(claims).beyond(before)
        assert found["namespaces"] == {f"aenv-{mark}-0"}
        assert found["mounts"] == {f"/run/netns/aenv-{mark}-0"}
    finally:
        namespace.delete(f"aenv-{mark}-0")
    assert Leftovers.look(claims).beyond(before) == {}


@pytest.mark.root
def test_a_run_directory_and_a_process_in_it_are_found(claims: Claims, run_directory: Path) -> None:
    before = Leftovers.look(claims)
    machine = run_directory / "vm-1"
    machine.mkdir()
    program = shutil.which("qemu-system-x86_64")
    assert program is not None
    # An orphan: its parent has ended, as after the crash of a daemon.
    command = f"{program} -M none -S -display none -monitor none >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", command], cwd=machine, check=True, capture_output=True, text=True).stdout)
    try:
        assert Leftovers.look(claims).beyond(before) == {}
        claims.directory(run_directory)
        found = Leftovers.look(claims).beyond(before)
        assert found["run_directories"] == {str(machine)}
        assert [name.split()[0] for name in found["vmms"]] == [str(pid)]
    finally:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
