from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aenv.errors import NotFoundError, UnavailableError
from aenv.network import namespace

pytestmark = pytest.mark.root


def _current() -> str:
    return os.readlink(namespace.CURRENT)


@pytest.fixture
def name(tag: str):
    made = namespace.namespace_name(tag, 3)
    namespace.create(made)
    yield made
    namespace.delete(made)


def test_is_seen_by_iproute2(name: str, tag: str) -> None:
    listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert name in listed.split()
    links = subprocess.run(["ip", "-n", name, "-br", "link"], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in links.splitlines() if "ifb" not in line] == ["lo"]
    assert namespace.list_indices(tag) == [3]


def test_list_ignores_foreign_names(name: str, tag: str) -> None:
    others = [f"aenv-{tag}-x", f"aenv-{tag}-", f"aenv-{tag}-01", f"aenv-{tag}-5-6", f"aenv-{tag}0-1", f"x-aenv-{tag}-1"]
    for other in others:
        namespace.create(other)
    try:
        assert namespace.list_indices(tag) == [3]
    finally:
        for other in others:
            namespace.delete(other)


def test_name_is_unique(name: str) -> None:
    with pytest.raises(UnavailableError, match="exists"):
        namespace.create(name)
    os.close(namespace.open_handle(name))  # the first one is whole


def test_open_in_makes_the_socket_there_and_returns(name: str) -> None:
    before, handle = _current(), namespace.open_handle(name)
    try:
        inside = namespace.open_in(handle, _current)
        assert inside != before
        assert _current() == before
        with namespace.open_in(handle, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as made:
            with pytest.raises(OSError):  # its lo is down: no route at all
                made.connect(("127.0.0.1", 1))
    finally:
        os.close(handle)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_open_in_returns_when_the_action_fails(name: str, error: type[BaseException]) -> None:
    before, handle = _current(), namespace.open_handle(name)

    def action() -> None:
        raise error

    try:
        with pytest.raises(error):
            namespace.open_in(handle, action)
        assert _current() == before
    finally:
        os.close(handle)


def test_threads_do_not_disturb_each_other(name: str) -> None:
    before, handle, seen = _current(), namespace.open_handle(name), set()

    def outside() -> None:
        for _ in range(200):
            seen.add(_current())

    thread = threading.Thread(target=outside)
    thread.start()
    for _ in range(200):
        namespace.open_in(handle, lambda: None)
    thread.join()
    os.close(handle)
    assert seen == {before}


def test_bad_handle_changes_nothing() -> None:
    before = _current()
    with open("/dev/null") as file, pytest.raises(UnavailableError, match="setns"):
        namespace.open_in(file.fileno(), lambda: None)
    assert _current() == before


def test_abort_when_the_way_back_is_barred() -> None:
    script = """
import ctypes, os
from aenv.network import namespace
class Barred:
    def __getattr__(self, name):
        return getattr(real, name) if name == "unshare" else (lambda *a: -1)
real, namespace._libc = namespace._libc, Barred()
try:
    with namespace.fresh():
        pass
except BaseException:
    os._exit(3)
os._exit(4)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGABRT
    assert "aborting" in done.stderr


def test_delete_works_twice_and_on_a_half_made_name(tag: str) -> None:
    half = namespace.namespace_name(tag, 1)
    namespace.NETNS_DIRECTORY.mkdir(exist_ok=True)
    (namespace.NETNS_DIRECTORY / half).touch()
    with pytest.raises(NotFoundError):
        namespace.open_handle(half)
    namespace.delete(half)
    namespace.delete(half)
    with pytest.raises(NotFoundError):
        namespace.open_handle(half)


@pytest.mark.parametrize("failing", ["unshare", "mount"])
def test_failed_create_leaves_nothing(tag: str, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = namespace._libc, _current()
    namespace.create(namespace.namespace_name(tag, 8))  # /run/netns is shared from here on
    namespace.delete(namespace.namespace_name(tag, 8))

    class Failing:
        def __getattr__(self, name: str) -> object:
            if name == failing == "mount":
                return lambda *a: -1 if a[0] else real.mount(*a)
            return (lambda *a: -1) if name == failing else getattr(real, name)

    monkeypatch.setattr(namespace, "_libc", Failing())
    with pytest.raises(UnavailableError, match=failing):
        namespace.create(namespace.namespace_name(tag, 1))
    assert namespace.list_indices(tag) == []
    assert _current() == before
