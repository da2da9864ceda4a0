from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.errors import AenvError
from aenv.storage.home import Home, read_or_create_secret

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(Home, "run", property(lambda self: tmp_path / "run" / self.tag))
    return Home(tmp_path / "home", tmp_path / "home/cache")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_create_makes_what_is_needed_and_may_be_repeated(home: Home) -> None:
    for _ in range(2):
        home.create()
    for folder in (home.templates, home.sandboxes, home.staging, home.cache, home.run, home.api_key.parent):
        assert folder.is_dir()
        assert mode(folder) & 0o066 == 0, folder  # nobody else lists or writes
    assert mode(home.api_key.parent) == 0o700
    assert home.node_secret.parent == home.api_key.parent


def test_tags_are_of_one_home_and_the_same_by_any_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    tag = Home(tmp_path / "a", tmp_path).tag
    assert Home(tmp_path / "link", tmp_path).tag == tag
    assert Home(tmp_path / "b", tmp_path).tag != tag


def test_sockets_have_room_under_run() -> None:
    assert len(str(Home(Path("/var/lib/aenv"), Path("/x")).run / "vm-0123456789ab/control.sock")) < 107


def test_a_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = read_or_create_secret(path)
    assert len(secret) == 32
    assert mode(path) == 0o600
    assert read_or_create_secret(path) == secret
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert read_or_create_secret(tmp_path / "other") != secret


def test_many_processes_agree_on_one_secret(tmp_path: Path) -> None:
    code = "import sys, pathlib, aenv.storage.home as h; print(h.read_or_create_secret(pathlib.Path(sys.argv[1])))"
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], stdout=subprocess.PIPE, cwd=ROOT, text=True)
        for _ in range(6)
    ]
    assert len({racer.communicate(timeout=60)[0] for racer in racers}) == 1
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("text", [b"", b"xyz", b"00", b"00" * 33, b"\xff" * 64, b"0" * 63])
def test_a_damaged_secret_is_refused_and_named_and_kept(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(text)
    with pytest.raises(AenvError, match="secret") as caught:
        read_or_create_secret(path)
    assert caught.value.hint
    assert path.read_bytes() == text


def test_the_run_directory_goes_when_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Home, "run", property(lambda self: tmp_path / "run"))
    home = Home(tmp_path / "home", tmp_path / "home/cache")
    home.create()
    socket = home.run / "vm-1"
    socket.touch()
    home.forget_run()
    assert socket.exists()
    socket.unlink()
    home.forget_run()
    assert not home.run.exists()
    home.forget_run()
