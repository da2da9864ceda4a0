"""Watchers: what they report, recursion, renames, floods, streams, and their ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.empty_fuse import EmptyFuse
from tests.envd.files_client import FORM, FilesClient, form, part

QUEUE_MAX = 8192  # WATCH_QUEUE_MAX
Change = tuple[str, str]


def changes(events: list[dict[str, Any]]) -> list[Change]:
    return [(event["type"].removeprefix("EVENT_TYPE_").lower(), event["name"]) for event in events]


class Watcher:
    """A polled watcher."""

    def __init__(self, files: FilesClient, path: Path, **options: Any) -> None:
        self.files = files
        self.id: str = files.call("CreateWatcher", path=str(path), **options)["watcherId"]
        self.removed = False

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.files.call("GetWatcherEvents", watcherId=self.id).get("events", [])
        return events

    def changes(self) -> list[Change]:
        return changes(self.events())

    def remove(self) -> None:
        if not self.removed:
            self.files.call("RemoveWatcher", watcherId=self.id)
        self.removed = True


def agent_pid(files: FilesClient) -> int:
    return int(Path(files.call("Stat", path="/proc/self")["entry"]["symlinkTarget"]).name)


class Stopped:
    """Stops the agent's process for the time of a with-block, so that it sees all changes at once and too late."""

    def __init__(self, files: FilesClient) -> None:
        self.pid = agent_pid(files)

    def __enter__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def watch(files: FilesClient, tmp_path: Path) -> Iterator[Any]:
    """Makes watchers, of tmp_path unless told otherwise, that are removed at the end."""
    made: list[Watcher] = []

    def make(path: Path = tmp_path, **options: Any) -> Watcher:
        made.append(Watcher(files, path, **options))
        return made[-1]

    yield make
    for watcher in made:
        watcher.remove()


def test_each_kind_of_change(watch: Any, tmp_path: Path) -> None:
    watcher = watch()
    path = tmp_path / "f"
    path.touch()
    assert watcher.changes() == [("create", "f")]
    path.write_bytes(b"x")
    assert watcher.changes() == [("write", "f")]
    path.chmod(0o600)
    assert watcher.changes() == [("chmod", "f")]
    path.rename(tmp_path / "g")
    assert watcher.changes() == [("rename", "f"), ("create", "g")]
    (tmp_path / "g").unlink()
    assert watcher.changes() == [("remove", "g")]
    (tmp_path / "d").mkdir()
    (tmp_path / "d").rmdir()
    assert watcher.changes() == [("create", "d"), ("remove", "d")]
    assert watcher.changes() == []


def test_what_happened_before_is_not_reported(watch: Any, tmp_path: Path) -> None:
    watch()  # shares its watch of the kernel with the next one
    (tmp_path / "before").write_bytes(b"x")
    watcher = watch()
    assert watcher.changes() == []
    (tmp_path / "after").touch()
    assert watcher.changes() == [("create", "after")]


def test_not_recursive(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    watcher = watch()
    (tmp_path / "d/f").write_bytes(b"x")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/f").write_bytes(b"x")
    assert watcher.changes() == [("create", "new")]


def test_uploads_look_like_writes_in_place(files: FilesClient, watch: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    watcher = watch(recursive=True)
    files.post(str(tmp_path / "sub/f"), b"content", {"X-Metadata-K": "v"})
    assert watcher.changes() == [("create", "sub/f"), ("write", "sub/f"), ("chmod", "sub/f")]
    files.post(str(tmp_path / "sub/f"), b"again")
    assert watcher.changes() == [("write", "sub/f"), ("chmod", "sub/f")]
    files.post(None, form(part(str(tmp_path / "a"), b"1"), part(str(tmp_path / "b"), b"2")), FORM)
    assert watcher.changes() == [(kind, name) for name in "ab" for kind in ("create", "write", "chmod")]
    assert files.post(str(tmp_path / "sub/f"), b"bad", {"Content-Encoding": "gzip"}).status == 400
    assert watcher.changes() == []


def test_upload_into_a_new_directory(files: FilesClient, watch: Any, tmp_path: Path) -> None:
    watcher = watch(recursive=True)
    files.post(str(tmp_path / "new/deep/f"), b"x")
    seen = watcher.changes()
    assert seen[0] == ("create", "new")
    assert {("create", "new/deep"), ("create", "new/deep/f"), ("write", "new/deep/f")} <= set(seen)
    assert not [name for _, name in seen if ".envd" in name]


def test_entries(watch: Any, tmp_path: Path) -> None:
    plain, watcher = watch(), watch(recursive=True, includeEntry=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"123")
    (tmp_path / "d/f").chmod(0o600)
    (tmp_path / "gone").touch()
    (tmp_path / "gone").unlink()
    events = watcher.events()
    assert {event["name"] for event in events} == {"d", "d/f", "gone"}
    for event in events:
        if event["name"] == "gone":
            assert "entry" not in event
        else:
            assert event["entry"]["path"] == str(tmp_path / event["name"])
    assert next(e for e in events if e["name"] == "d/f")["entry"]["size"] == "3"
    assert all("entry" not in event for event in plain.events())


def test_directories_made_faster_than_they_can_be_watched(watch: Any, tmp_path: Path) -> None:
    """Each level is made before the agent can have seen the one above."""
    watcher = watch(recursive=True)
    expected = set()
    for storm in range(20):
        deep = tmp_path.joinpath(f"storm{storm}", *"abcdefgh")
        with Stopped(watcher.files):
            deep.mkdir(parents=True)
            (deep / "leaf").write_bytes(b"x")
            (deep / "empty").touch()
        at = deep / "leaf"
        expected |= {("write", str(at.relative_to(tmp_path))), ("create", str((deep / "empty").relative_to(tmp_path)))}
        while at != tmp_path:
            expected.add(("create", str(at.relative_to(tmp_path))))
            at = at.parent
    seen = watcher.changes()
    assert expected <= set(seen)
    assert sum(kind == "create" for kind, _ in seen) == len(expected) - 20  # nothing was reported twice
    (deep / "later").touch()
    assert watcher.changes() == [("create", str((deep / "later").relative_to(tmp_path)))]


def test_directories_made_while_the_agent_watches(files: FilesClient, watch: Any, tmp_path: Path) -> None:
    """The same with the agent reading along: a directory may be found by the walk, by its event, or by both."""
    watcher = watch(recursive=True)
    seen: list[Change] = []

    def make(name: str) -> None:
        for i in range(100):
            (tmp_path / name / f"{i}/x/y").mkdir(parents=True)

    makers = [threading.Thread(target=make, args=(f"t{n}",)) for n in range(3)]
    for maker in makers:
        maker.start()
    while any(maker.is_alive() for maker in makers):
        seen += watcher.changes()
    seen += watcher.changes()
    expected = {("create", str(p.relative_to(tmp_path))) for p in tmp_path.rglob("*")}
    assert len(expected) == 3 + 300 * 3
    assert set(seen) == expected
    assert len(seen) == len(expected)


def test_renamed_directories_keep_being_watched(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "old/sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    watcher = watch(recursive=True)
    (tmp_path / "old").rename(tmp_path / "other/new")
    (tmp_path / "other/new/sub/f").touch()
    assert watcher.changes() == [("rename", "old"), ("create", "other/new"), ("create", "other/new/sub/f")]
    (tmp_path / "other/new/sub/g").touch()
    assert watcher.changes() == [("create", "other/new/sub/g")]


def test_directories_made_and_renamed_at_once(watch: Any, tmp_path: Path) -> None:
    watcher = watch(recursive=True)
    with Stopped(watcher.files):
        (tmp_path / "a").mkdir()
        (tmp_path / "a/f").touch()
        (tmp_path / "a").rename(tmp_path / "b")
    seen = watcher.changes()
    assert {("create", "a"), ("rename", "a"), ("create", "b"), ("create", "b/f")} == set(seen)
    (tmp_path / "b/g").touch()
    assert watcher.changes() == [("create", "b/g")]


def test_directories_that_leave_the_tree_are_forgotten(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "in/d/sub").mkdir(parents=True)
    watcher = watch(tmp_path / "in", recursive=True)
    (tmp_path / "in/d").rename(tmp_path / "out")
    assert watcher.changes() == [("rename", "d")]
    (tmp_path / "out/sub/f").touch()
    assert watcher.changes() == []
    (tmp_path / "out").rename(tmp_path / "in/back")
    assert ("create", "back") in watcher.changes()
    (tmp_path / "in/back/sub/g").touch()
    assert watcher.changes() == [("create", "back/sub/g")]


@pytest.mark.parametrize("target", ["../out", "inside"])
def test_a_new_directory_in_the_place_of_a_moved_one(watch: Any, tmp_path: Path, target: str) -> None:
    (tmp_path / "in/d/sub").mkdir(parents=True)
    watcher = watch(tmp_path / "in", recursive=True)
    with Stopped(watcher.files):
        (tmp_path / "in/d").rename(tmp_path / "in" / target)
        (tmp_path / "in/d/sub").mkdir(parents=True)
    assert {("rename", "d"), ("create", "d"), ("create", "d/sub")} <= set(watcher.changes())
    (tmp_path / "in/d/sub/f").touch()
    assert watcher.changes() == [("create", "d/sub/f")]


def test_symbolic_links(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    watcher = watch(tmp_path / "link", includeEntry=True, recursive=True)
    (tmp_path / "real/f").touch()
    (tmp_path / "real/up").symlink_to(tmp_path)
    events = watcher.events()
    assert changes(events) == [("create", "f"), ("create", "up")]
    assert events[0]["entry"]["path"] == str(tmp_path / "link/f")
    (tmp_path / "outside").touch()
    assert watcher.changes() == []


def test_overlapping_watchers(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    outer, inner, same = watch(recursive=True), watch(tmp_path / "d"), watch(tmp_path / "d")
    (tmp_path / "d/f").touch()
    assert outer.changes() == [("create", "d/f")]
    assert inner.changes() == same.changes() == [("create", "f")]
    same.remove()
    assert same.files.failure("GetWatcherEvents", watcherId=same.id) == "not_found"
    (tmp_path / "d/g").touch()
    assert inner.changes() == [("create", "g")]


def test_the_watched_directory_itself(watch: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    watcher = watch(tmp_path / "d")
    (tmp_path / "d").chmod(0o700)
    assert watcher.changes() == [("chmod", ".")]
    (tmp_path / "d").rmdir()
    assert watcher.changes()[-1] == ("remove", ".")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").touch()
    assert watcher.changes() == []


def test_refused_watches(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert files.failure("CreateWatcher", path=str(tmp_path / "missing")) == "not_found"
    assert files.failure("CreateWatcher", path=str(tmp_path / "file")) == "invalid_argument"
    assert files.failure("CreateWatcher", path=str(tmp_path / "loop")) == "invalid_argument"
    assert files.failure("CreateWatcher", path=str(tmp_path), recursive="yes") == "invalid_argument"
    assert files.failure("CreateWatcher", path="a\0b") == "invalid_argument"
    assert files.as_user("no-such-user").failure("CreateWatcher", path="/") == "unauthenticated"
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        assert files.failure(method, watcherId="w-unknown") == "not_found"
        assert files.failure(method) == "not_found"
        assert files.failure(method, watcherId=7) == "invalid_argument"


def test_long_queues_keep_the_newest(watch: Any, tmp_path: Path) -> None:
    watcher, busy = watch(), watch()
    total = 6000
    for round_ in range(2):
        for i in range(total):
            os.close(os.open(tmp_path / f"{round_}-{i}", os.O_CREAT))
        busy.changes()  # takes in what the kernel has, which would overflow later
    assert watcher.changes()[-1] == ("create", f"1-{total - 1}")
    (tmp_path / "after").touch()
    assert watcher.changes() == [("create", "after")]
    for i in range(QUEUE_MAX + 100):
        os.close(os.open(tmp_path / f"2-{i}", os.O_CREAT))
    seen = busy.changes()
    assert len(seen) <= QUEUE_MAX
    assert seen[-1] == ("create", f"2-{QUEUE_MAX + 99}")


def test_lost_events_of_the_kernel_do_not_lose_directories(watch: Any, tmp_path: Path) -> None:
    """More events than the kernel queues: what was made meanwhile is found by looking, and watched from then on."""
    kernel_queue = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    watcher = watch(recursive=True)
    (tmp_path / "noise").touch()
    names = [tmp_path / "noise", tmp_path / "clamour"]
    with Stopped(watcher.files):
        for i in range(kernel_queue // 2 + 100):
            names[i % 2].rename(names[1 - i % 2])
        (tmp_path / "lost/deep").mkdir(parents=True)
        (tmp_path / "lost/deep/f").touch()
    seen = watcher.changes()
    assert {("create", "lost"), ("create", "lost/deep"), ("create", "lost/deep/f")} <= set(seen)
    (tmp_path / "lost/deep/g").touch()
    assert watcher.changes() == [("create", "lost/deep/g")]


def test_number_of_watchers_is_bounded(files: FilesClient, tmp_path: Path) -> None:
    made = []
    while (answer := files.rpc("CreateWatcher", path=str(tmp_path))).status == 200:
        made.append(answer.json["watcherId"])
        assert len(made) <= 1024
    assert answer.json["code"] == "resource_exhausted"
    for watcher in made:
        files.call("RemoveWatcher", watcherId=watcher)
    files.call("RemoveWatcher", watcherId=files.call("CreateWatcher", path=str(tmp_path))["watcherId"])


@pytest.mark.root
def test_network_mounts(files: FilesClient, watch: Any, tmp_path: Path) -> None:
    """A FUSE mount counts as one."""
    (tmp_path / "tree/mounted").mkdir(parents=True)
    with EmptyFuse(tmp_path / "tree/mounted"):
        assert files.failure("CreateWatcher", path=str(tmp_path / "tree/mounted")) == "invalid_argument"
        outer = watch(tmp_path / "tree", recursive=True)
        allowed = watch(tmp_path / "tree/mounted", allowNetworkMounts=True)
        (tmp_path / "tree/mounted").chmod(0o700)
        assert ("chmod", ".") in allowed.changes()
        (tmp_path / "tree/f").touch()
        assert ("create", "f") in outer.changes()
        allowed.remove()


# Streams


def test_stream(files: FilesClient, tmp_path: Path) -> None:
    stream = files.stream("WatchDir", path=str(tmp_path), recursive=True, includeEntry=True)
    assert stream.response.getheader("Content-Type") == "application/connect+json"
    frames = stream.frames()
    assert next(frames) == (0, {"start": {}})
    files.call("MakeDir", path=str(tmp_path / "d"))
    for kind in ("EVENT_TYPE_CREATE", "EVENT_TYPE_CHMOD"):  # the latter for its owner
        flags, message = next(frames)
        assert (flags, message["filesystem"]["name"], message["filesystem"]["type"]) == (0, "d", kind)
        assert message["filesystem"]["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    files.post(str(tmp_path / "d/f"), b"x")
    kinds = [next(frames)[1]["filesystem"]["type"] for _ in range(3)]
    assert kinds == ["EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_CHMOD"]
    stream.close()


@pytest.mark.parametrize(
    ("name", "code"), [("missing", "not_found"), ("file", "invalid_argument"), ("nul\0", "invalid_argument")]
)
def test_failing_streams(files: FilesClient, tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "file").touch()
    stream = files.stream("WatchDir", path=f"{tmp_path}/{name}")
    assert stream.response.status == 200
    [(flags, message)] = list(stream.frames())
    assert (flags, message["error"]["code"]) == (2, code)


def test_a_reader_that_stops_reading_hinders_nobody(files: FilesClient, watch: Any, tmp_path: Path) -> None:
    stuck = files.stream("WatchDir", path=str(tmp_path))
    other = watch()
    for round_ in range(4):
        for i in range(3000):
            os.close(os.open(tmp_path / f"{'x' * 200}-{round_}-{i}", os.O_CREAT))
        assert other.changes()[-1][1].endswith(f"-{round_}-2999")
    # It goes on with the newest when it reads again.
    for _, message in stuck.frames():
        if message.get("filesystem", {}).get("name", "").endswith("-3-2999"):
            break
    stuck.close()


def test_dropped_streams_give_everything_back(files: FilesClient, tmp_path: Path) -> None:
    process = Path("/proc") / str(agent_pid(files))

    def watches() -> int:
        """Of the agent, as the kernel lists them."""
        [inotify] = [fd.name for fd in (process / "fd").iterdir() if os.readlink(fd).endswith("inotify")]
        return (process / "fdinfo" / inotify).read_text().count("inotify wd")

    before = watches()
    for i in range(50):
        (tmp_path / str(i)).mkdir()
        stream = files.stream("WatchDir", path=str(tmp_path / str(i)))
        next(stream.frames())
        stream.close()
    last = files.stream("WatchDir", path=str(tmp_path))
    next(last.frames())
    while watches() != before + 1:
        select.select([], [], [], 0.01)
    last.close()


# Against a model

KINDS = st.sampled_from(["mkdir", "write", "rename", "remove", "poll"])
NAMES = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "a/b/a"])
STEPS = st.lists(st.tuples(KINDS, NAMES, NAMES), min_size=1, max_size=25)


def apply(top: Path, kind: str, name: str, other: str) -> None:
    path = top / name
    if kind == "mkdir":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    elif kind == "rename":
        path.rename(top / other)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_every_directory_is_watched_after_any_history(
    files: FilesClient, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str]]
) -> None:
    """Whatever happened: a file that appears in any directory of the tree is reported under its right name, once."""
    top = tmp_path_factory.mktemp("history")
    watcher = Watcher(files, top, recursive=True)
    for kind, name, other in steps:
        if kind == "poll":
            watcher.changes()
            continue
        try:
            apply(top, kind, name, other)
        except OSError:
            continue
    watcher.changes()
    directories = [top, *(p for p in top.rglob("*") if p.is_dir())]
    for directory in directories:
        (directory / "probe").touch()
    expected = sorted(("create", str((d / "probe").relative_to(top))) for d in directories)
    assert sorted(watcher.changes()) == expected
    watcher.remove()
