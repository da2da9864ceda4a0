"""filesystem.Filesystem: Stat, MakeDir, Move, ListDir, Remove."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.files_client import FilesClient


def entry_of(files: FilesClient, path: Path | str) -> dict[str, Any]:
    entry: dict[str, Any] = files.call("Stat", path=str(path))["entry"]
    return entry


def test_stat_of_a_file(files: FilesClient, tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(b"12345")
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    os.setxattr(path, "user.e2b.key", b"value")
    os.setxattr(path, "user.other", b"not metadata")
    assert entry_of(files, path) == {
        "name": "f.txt",
        "type": "FILE_TYPE_FILE",
        "path": str(path),
        "size": "5",
        "mode": 0o640,
        "permissions": "-rw-r-----",
        "owner": path.owner(),
        "group": path.group(),
        "modifiedTime": "2023-11-14T22:13:20.123456789Z",
        "metadata": {"key": "value"},
    }


@pytest.mark.parametrize("seconds", [-62135596801, -1, 0, 2**33, 253402300800])
def test_times_far_away(files: FilesClient, tmp_path: Path, seconds: int) -> None:
    (tmp_path / "f").touch()
    os.utime(tmp_path / "f", (seconds, seconds))
    when = datetime.fromisoformat(entry_of(files, tmp_path / "f")["modifiedTime"])
    assert when.tzinfo is not None


@pytest.mark.parametrize(
    ("mode", "permissions"),
    [(0o755, "drwxr-xr-x"), (0o1777, "dtrwxrwxrwx"), (0o2750, "dgrwxr-x---"), (0o000, "d---------")],
)
def test_permissions_of_directories(files: FilesClient, tmp_path: Path, mode: int, permissions: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    entry = entry_of(files, tmp_path / "d")
    (tmp_path / "d").chmod(0o700)
    assert (entry["type"], entry["mode"], entry["permissions"]) == ("FILE_TYPE_DIRECTORY", mode & 0o777, permissions)


def test_types_of_special_files(files: FilesClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert entry_of(files, tmp_path / "socket")["permissions"][0] == "S"
    pipe = entry_of(files, tmp_path / "pipe")
    assert (pipe["permissions"], pipe["type"]) == ("prw-------", "FILE_TYPE_UNSPECIFIED")
    assert entry_of(files, "/dev/null")["permissions"] == "Dcrw-rw-rw-"


def test_symbolic_links(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_bytes(b"x")
    (tmp_path / "d/file").chmod(0o600)
    (tmp_path / "to-file").symlink_to("d/file")
    (tmp_path / "to-link").symlink_to(tmp_path / "to-file")
    (tmp_path / "to-directory").symlink_to("d")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("to-file", "to-link"):
        entry = entry_of(files, tmp_path / name)
        assert (entry["type"], entry["mode"], entry["permissions"]) == ("FILE_TYPE_FILE", 0o600, "Lrwxrwxrwx")
        assert (entry["symlinkTarget"], entry["isSymlink"]) == (str(tmp_path / "d/file"), True)
        assert entry["path"] == str(tmp_path / name)
    assert entry_of(files, tmp_path / "to-directory")["type"] == "FILE_TYPE_DIRECTORY"
    for name in ("dangling", "loop"):
        entry = entry_of(files, tmp_path / name)
        assert (entry["type"], entry["symlinkTarget"]) == ("FILE_TYPE_SYMLINK", str(tmp_path / name))


@pytest.mark.root
def test_ids_without_a_name(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.chown(tmp_path / "f", 54321, 54322)
    entry = entry_of(files, tmp_path / "f")
    assert (entry["owner"], entry["group"]) == ("54321", "54322")


def test_missing_and_impossible_paths(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert files.failure("Stat", path=str(tmp_path / "missing")) == "not_found"
    assert files.failure("Stat", path="/" + "x" * 256) == "invalid_argument"
    assert files.failure("Stat", path="/x" * 3000) == "invalid_argument"
    assert files.failure("Stat", path="~other") == "invalid_argument"
    assert files.failure("Stat", path=5) == "invalid_argument"
    assert files.failure("Stat", path="/etc\0/passwd") == "invalid_argument"
    assert files.as_user("no-such-user").failure("Stat", path="/") == "unauthenticated"


def test_paths_relative_to_the_home(files: FilesClient) -> None:
    home = pwd.getpwnam(files.user).pw_dir
    for path in ("~", "~/", "", ".", "x/..", "~/x/.."):
        assert entry_of(files, path)["path"] == home, path
    assert files.failure("Stat", path="surely/not/there") == "not_found"
    up = os.path.normpath(f"{home}/..")
    assert entry_of(files, "..")["path"] == up
    assert entry_of(files, "/" + "../" * 40 + "tmp")["name"] == "tmp"
    assert entry_of(files, "../" * 40 + "tmp")["path"] == "/tmp"
    assert entry_of(files, "/tmp///")["path"] == "/tmp"
    assert entry_of(files, "/")["name"] == "/"


def test_unknown_fields_are_ignored(files: FilesClient) -> None:
    assert files.call("Stat", path="/", unknown={"a": 1})["entry"]["name"] == "/"


def test_make_dir(files: FilesClient, tmp_path: Path) -> None:
    path = tmp_path / "a/b/ž"
    entry = files.call("MakeDir", path=str(path))["entry"]
    assert (entry["path"], entry["type"], entry["mode"]) == (str(path), "FILE_TYPE_DIRECTORY", 0o755)
    assert files.failure("MakeDir", path=str(path)) == "already_exists"
    assert files.failure("MakeDir", path=str(path) + "/") == "already_exists"
    (path / "file").touch()
    assert files.failure("MakeDir", path=str(path / "file")) == "invalid_argument"
    assert files.failure("MakeDir", path=str(path / "file/below")) == "invalid_argument"
    assert files.call("MakeDir", path=str(tmp_path / "x" / ".." / "y"))["entry"]["name"] == "y"


def test_make_dir_through_a_link(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert files.failure("MakeDir", path=str(tmp_path / "link")) == "already_exists"
    files.call("MakeDir", path=str(tmp_path / "link/new"))
    assert (tmp_path / "real/new").is_dir()
    assert files.failure("MakeDir", path=str(tmp_path / "dangling")) == "invalid_argument"


@pytest.mark.root
def test_owner_of_made_directories(files: FilesClient, tmp_path: Path) -> None:
    files.as_user("nobody").call("MakeDir", path=str(tmp_path / "a/b"))
    assert tmp_path.owner() == "root"
    assert (tmp_path / "a").owner() == (tmp_path / "a/b").owner() == "nobody"


def test_move(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"x")
    os.setxattr(tmp_path / "d/f", "user.e2b.k", b"v")
    entry = files.call("Move", source=str(tmp_path / "d/f"), destination=str(tmp_path / "new/deep/g"))["entry"]
    assert (entry["path"], entry["metadata"]) == (str(tmp_path / "new/deep/g"), {"k": "v"})
    assert files.call("Move", source=str(tmp_path / "new"), destination=str(tmp_path / "n2"))["entry"]["name"] == "n2"
    assert (tmp_path / "n2/deep/g").read_bytes() == b"x"


def test_move_replaces_files_and_not_directories(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "full/x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("full")
    files.call("Move", source=str(tmp_path / "a"), destination=str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"a"
    assert files.failure("Move", source=str(tmp_path / "b"), destination=str(tmp_path / "full")) == "already_exists"
    (tmp_path / "d").mkdir()
    assert files.failure("Move", source=str(tmp_path / "d"), destination=str(tmp_path / "full")) == "already_exists"
    assert (
        files.failure("Move", source=str(tmp_path / "full"), destination=str(tmp_path / "full/x/y"))
        == "invalid_argument"
    )
    assert files.call("Move", source=str(tmp_path / "link"), destination=str(tmp_path / "l2"))["entry"]["isSymlink"]


def test_move_of_a_missing_file_makes_no_directories(files: FilesClient, tmp_path: Path) -> None:
    code = files.failure("Move", source=str(tmp_path / "missing"), destination=str(tmp_path / "new/f"))
    assert (code, os.listdir(tmp_path)) == ("not_found", [])


@pytest.mark.root
def test_move_to_another_file_system(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    assert (
        files.failure("Move", source=str(tmp_path / "f"), destination="/dev/shm/aenv-test-move")
        == "failed_precondition"
    )
    assert (tmp_path / "f").exists()


def listing(files: FilesClient, path: Path, **options: Any) -> list[str]:
    return [entry["path"] for entry in files.call("ListDir", path=str(path), **options).get("entries", [])]


def model(top: Path, depth: int) -> list[str]:
    found = []
    for name in sorted(os.listdir(top), key=os.fsencode):
        found.append(str(top / name))
        if depth > 1 and (top / name).is_dir() and not (top / name).is_symlink():
            found += model(top / name, depth - 1)
    return found


def test_list_dir(files: FilesClient, tmp_path: Path) -> None:
    for name in ("b/x/deep", "b/y", "a", "c.d/e", "Z"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b/file").touch()
    (tmp_path / "b/link").symlink_to(tmp_path)
    for depth in (0, 1, 2, 3, 4, 2**32 - 1):
        assert listing(files, tmp_path, depth=depth) == model(tmp_path, depth or 1), depth
    assert listing(files, tmp_path) == model(tmp_path, 1)
    assert listing(files, tmp_path / "a") == []


def test_list_through_a_link_keeps_the_prefix(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/f").touch()
    (tmp_path / "link").symlink_to("real")
    assert listing(files, tmp_path / "link") == [str(tmp_path / "link/f")]
    assert files.call("ListDir", path=f"{tmp_path}/link/")["entries"][0]["path"] == str(tmp_path / "link/f")


def test_list_errors(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    answer = files.rpc("ListDir", path=str(tmp_path / "f"))
    assert (answer.status, answer.json["message"]) == (400, f"path is not a directory: {tmp_path / 'f'}")
    assert files.failure("ListDir", path=str(tmp_path / "missing")) == "not_found"
    for depth in (-1, 2**32, "many", 1.5):
        assert files.failure("ListDir", path=str(tmp_path), depth=depth) == "invalid_argument"


def test_ten_thousand_entries(files: FilesClient, tmp_path: Path) -> None:
    names = sorted(f"file-{i}" for i in range(10_000))
    for name in names:
        (tmp_path / name).touch()
    assert listing(files, tmp_path) == [str(tmp_path / name) for name in names]
    files.call("Remove", path=str(tmp_path))
    assert not tmp_path.exists()


def test_names_that_are_not_utf8(files: FilesClient, tmp_path: Path) -> None:
    for name in (b"\xff", b"ok-\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x90\x8e"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    names = {entry["name"] for entry in files.call("ListDir", path=str(tmp_path))["entries"]}
    assert names == {"\ufffd", "ok-\ufffd\ufffd\ufffd", "\ufffd\ufffd", "🐎"}


def test_remove(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/a/link").symlink_to(tmp_path / "outside")
    (tmp_path / "tree/f").touch()
    os.mkfifo(tmp_path / "tree/pipe")
    (tmp_path / "link").symlink_to("outside")
    assert files.call("Remove", path=str(tmp_path / "tree")) == {}
    files.call("Remove", path=str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["kept"]
    files.call("Remove", path=str(tmp_path / "missing/deeper"))
    files.call("Remove", path=str(tmp_path / "outside/kept/below-a-file"))
    assert os.listdir(tmp_path / "outside") == ["kept"]


def test_remove_of_nothing_in_particular(files: FilesClient) -> None:
    for message in ({}, {"path": ""}, {"path": None}, {"path": "/"}, {"path": "///"}):
        assert files.failure("Remove", **message) == "invalid_argument"


def test_remove_of_a_tree_deeper_than_paths_and_descriptors(files: FilesClient, tmp_path: Path) -> None:
    top = tmp_path / "deep"
    top.mkdir()
    fd = os.open(top, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open("f", os.O_CREAT, dir_fd=fd))
        below = os.open("d", os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert len(files.call("ListDir", path=str(top), depth=5000)["entries"]) > 2000  # as far as PATH_MAX reaches
    files.call("Remove", path=str(top))
    assert not top.exists()


def test_remove_of_what_cannot_be_removed(files: FilesClient) -> None:
    assert files.failure("Remove", path="/proc/self/status") in {"permission_denied", "internal"}
    assert stat.S_ISREG(os.stat("/proc/self/status").st_mode)


NAMES = st.sampled_from(["a", "b", "c"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_operations_match_a_model(
    files: FilesClient, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random calls leave the same tree as a model of nested dictionaries."""
    top = tmp_path_factory.mktemp("model")
    tree: dict[str, Any] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        names = data.draw(st.lists(NAMES, min_size=1, max_size=3))
        if data.draw(st.booleans()):
            files.rpc("MakeDir", path=str(top.joinpath(*names)))
            at = tree
            for name in names:
                at = at.setdefault(name, {})
        else:
            files.rpc("Remove", path=str(top.joinpath(*names)))
            parent: dict[str, Any] | None = tree
            for name in names[:-1]:
                parent = None if parent is None else parent.get(name)
            if parent is not None:
                parent.pop(names[-1], None)
    assert read_tree(top) == tree


def read_tree(top: Path) -> dict[str, Any]:
    return {name: read_tree(top / name) for name in os.listdir(top)}
