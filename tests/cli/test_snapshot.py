"""snapshot, fork, rollback and tree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.tree import family
from aenv.http.message import Response
from tests.cli.conftest import BOX, Fixture
from tests.cli.test_terminal import terminal

SNAPSHOT: dict[str, Any] = {
    "snapshotID": "ready:default", "names": ["ready:default", "old:v1"], "templateID": "s1", "sandboxID": "i1",
    "parentID": "t1", "createdAt": "2026-01-01T00:00:00Z", "cpuCount": 1, "memoryMB": 512, "diskSizeMB": 2048,
    "memory": True, "memoryBytes": 3 << 20, "diskBytes": 4096,
}  # fmt: skip
OTHER = SNAPSHOT | {"snapshotID": "s2:default", "names": [], "templateID": "s2", "memory": False, "memoryBytes": 0}
WIDE = (160, 40)


def shown(daemon: Fixture, *words: str, status: int = 0) -> str:
    """What a person sees."""
    with terminal(daemon, *words, size=WIDE) as t:
        assert t.wait() == status, t.shown
        return re.sub(r"\x1b\[[0-9;]*m", "", t.shown.decode()).replace("\r\n", "\n")


# snapshot


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ((), {"memory": True}),
        (("--name", "ns/ready:v2"), {"memory": True, "name": "ns/ready:v2"}),
        (("--disk-only",), {"memory": False}),
    ],
)
def test_create_sends_what_was_asked(daemon: Fixture, options: tuple[str, ...], body: Any) -> None:
    daemon.fake.answers["POST /sandboxes/i1/snapshots"] = Response.json(201, SNAPSHOT)
    done = daemon.aenv("snapshot", "create", "i1", *options)
    assert json.loads(done.stdout) == SNAPSHOT
    assert daemon.fake.calls == [("POST", "/sandboxes/i1/snapshots", body)]
    assert shown(daemon, "snapshot", "create", "i1") == "ready:default\n"


def test_ls(daemon: Fixture) -> None:
    daemon.fake.answers["GET /snapshots"] = Response.json(200, [OTHER, SNAPSHOT])
    assert json.loads(daemon.aenv("snapshot", "ls").stdout) == [OTHER, SNAPSHOT]
    daemon.aenv("snapshot", "ls", "--sandbox", "i1", "--name", "ns/a b:v&1")
    assert [call[1] for call in daemon.fake.calls] == [
        "/snapshots", "/snapshots?sandboxID=i1&name=ns%2Fa+b%3Av%261"
    ]  # fmt: skip
    lines = shown(daemon, "snapshot", "ls").splitlines()
    assert lines[0].split() == ["ID", "NAMES", "OF", "BASED", "ON", "CREATED", "MEMORY", "DISK"]
    assert lines[1].split() == ["s2", "i1", "t1", "2026-01-01T00:00:00", "-", "4.0", "KiB"]
    assert lines[2].split() == [
        "s1", "ready:default", "old:v1", "i1", "t1", "2026-01-01T00:00:00", "3.0", "MiB", "4.0", "KiB"
    ]  # fmt: skip
    daemon.fake.answers["GET /snapshots"] = Response.json(200, [])
    assert shown(daemon, "snapshot", "ls") == "no snapshots\n"


def test_ls_has_all_pages_of_what_was_asked(daemon: Fixture) -> None:
    answers = daemon.fake.answers
    first = Response.json(200, [OTHER], [("X-Next-Token", "a+b")])

    class Pages(dict[str, Response]):
        def get(self, key: str, default: Any = None) -> Any:
            if key != "GET /snapshots":
                return answers.get(key, default)
            return Response.json(200, [SNAPSHOT]) if "nextToken" in daemon.fake.calls[-1][1] else first

    daemon.fake.answers = Pages()
    done = daemon.aenv("snapshot", "ls", "--name", "x")
    assert [s["templateID"] for s in json.loads(done.stdout)] == ["s2", "s1"]
    assert [call[1] for call in daemon.fake.calls] == [
        "/snapshots?name=x", "/snapshots?name=x&limit=100&nextToken=a%2Bb"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["s1", "s1:default", "ready", "ready:default", "old:v1"])
def test_rm_deletes_by_id(daemon: Fixture, text: str) -> None:
    daemon.fake.answers["GET /snapshots"] = Response.json(200, [OTHER, SNAPSHOT])
    daemon.fake.answers["DELETE /templates/s1"] = Response(204)
    done = daemon.aenv("snapshot", "rm", text, text)
    assert done.returncode == 0, done.stderr
    deleted = [call for call in daemon.fake.calls if call[0] == "DELETE"]
    assert deleted == [("DELETE", "/templates/s1", None)] * 2


@pytest.mark.parametrize("text", ["base", "old", "old:default", "ready:v1", "s1:v1", "s", "", ":", "ns/ready"])
def test_rm_deletes_nothing_that_is_no_snapshot(daemon: Fixture, text: str) -> None:
    daemon.fake.answers["GET /snapshots"] = Response.json(200, [OTHER, SNAPSHOT])
    assert "snapshot ls" in daemon.refused("snapshot", "rm", text, hint=True)
    assert [call[0] for call in daemon.fake.calls] == ["GET"]


def test_rm_prefers_a_name_to_an_id_as_the_daemon_does(daemon: Fixture) -> None:
    daemon.fake.answers["GET /snapshots"] = Response.json(200, [OTHER, SNAPSHOT | {"names": ["s2:default"]}])
    daemon.fake.answers["DELETE /templates/s1"] = Response(204)
    assert daemon.aenv("snapshot", "rm", "s2").returncode == 0


# fork


def child(number: int) -> dict[str, Any]:
    return {"sandbox": BOX | {"sandboxID": f"c{number}"}}


def test_fork(daemon: Fixture) -> None:
    children = [child(1), child(2)]
    daemon.fake.answers["POST /sandboxes/i1/fork"] = Response.json(201, children)
    for words in (("-n", "2", "--timeout", "60"), ("-n", "2", "--timeout", "60", "--json")):
        assert json.loads(daemon.aenv("fork", "i1", *words).stdout) == children
    assert daemon.fake.calls == [("POST", "/sandboxes/i1/fork", {"count": 2, "timeout": 60})] * 2
    first, *ids = shown(daemon, "fork", "i1").splitlines()
    assert "2 of 2 children started in" in first
    assert ids == ["c1", "c2"]
    assert daemon.fake.calls[-1][2] == {"count": 1, "timeout": 3600}


def test_children_that_did_not_start_are_told_of(daemon: Fixture) -> None:
    failed = {"error": {"code": 503, "message": "no memory left"}}
    children = [child(1), failed, failed]
    daemon.fake.answers["POST /sandboxes/i1/fork"] = Response.json(201, children)
    done = daemon.aenv("fork", "i1", "-n", "3")
    assert done.returncode == 1
    assert json.loads(done.stdout) == children
    assert done.stderr == b"aenv: 2 of 3 did not start: no memory left\n"
    assert shown(daemon, "fork", "i1", "-n", "3", status=1).splitlines()[1:] == [
        "c1", "aenv: 2 of 3 did not start: no memory left"
    ]  # fmt: skip


@pytest.mark.parametrize("count", ["0", "101", "-1", "x", "1.5"])
def test_an_impossible_number_of_children_is_not_asked_for(daemon: Fixture, count: str) -> None:
    done = daemon.aenv("fork", "i1", "-n", count)
    assert done.returncode == 2
    assert b"'-n'" in done.stderr
    assert daemon.fake.calls == []


# rollback


def test_rollback(daemon: Fixture) -> None:
    daemon.fake.answers["POST /sandboxes/i1/rollback"] = Response.json(200, BOX)
    done = daemon.aenv("rollback", "i1", "ns/ready:v1")
    assert done.returncode == 0, done.stderr
    assert daemon.fake.calls == [("POST", "/sandboxes/i1/rollback", {"snapshotID": "ns/ready:v1"})]
    daemon.fake.answers["POST /sandboxes/i1/rollback"] = Response.error(409, "'x' is not a snapshot of sandbox i1")
    assert daemon.refused("rollback", "i1", "x") == "aenv: 'x' is not a snapshot of sandbox i1\n"


# tree


def node(kind: str, name: str, parent: str | None, **more: Any) -> dict[str, Any]:
    base = {
        "kind": kind,
        "id": name,
        "names": [],
        "createdAt": "2026-01-01T00:00:00Z",
        "memoryBytes": 0,
        "diskBytes": 0,
    }
    return base | ({} if parent is None else {"parentID": parent}) | more


FAMILY = [
    node("template", "t1", None, names=["base"], memoryBytes=100 << 20, diskBytes=400 << 20),
    node("snapshot", "s1", "t1", memoryBytes=2 << 20),
    node("sandbox", "i1", "t1", state="running", residentBytes=80 << 20, privateBytes=1 << 20),
    node("sandbox", "c1", "s1", state="running", residentBytes=40 << 20, privateBytes=1 << 20),
    node("sandbox", "c2", "s1", state="paused", memoryBytes=1 << 20, diskBytes=512),
]


def test_tree_shows_who_descends_from_whom_and_costs(daemon: Fixture) -> None:
    daemon.fake.answers["GET /tree"] = Response.json(200, FAMILY)
    assert json.loads(daemon.aenv("tree").stdout) == json.loads(daemon.aenv("tree", "--json").stdout) == FAMILY
    rows = [line.split("  ") for line in shown(daemon, "tree").splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["ID", "WHAT", "NAMES", "CREATED", "MEMORY", "DISK", "PSS", "OWN"],
        ["t1", "template", "base", "2026-01-01T00:00:00", "100 MiB", "400 MiB", "-", "-"],
        ["├─ s1", "snapshot", "2026-01-01T00:00:00", "2.0 MiB", "0 B", "-", "-"],
        ["│", "├─ c1", "running", "2026-01-01T00:00:00", "0 B", "0 B", "40.0 MiB", "1.0 MiB"],
        ["│", "└─ c2", "paused", "2026-01-01T00:00:00", "1.0 MiB", "512 B", "-", "-"],
        ["└─ i1", "running", "2026-01-01T00:00:00", "0 B", "0 B", "80.0 MiB", "1.0 MiB"],
        ["total", "103 MiB", "400 MiB", "120 MiB", "2.0 MiB"],
    ]
    daemon.fake.answers["GET /tree"] = Response.json(200, [])
    assert "template build" in shown(daemon, "tree")


def test_a_long_chain_is_drawn() -> None:
    nodes = [node("snapshot", str(number), str(number - 1)) for number in range(5000)]
    drawn = list(family(nodes))
    assert [each["id"] for _, each in drawn] == [str(number) for number in range(5000)]
    assert drawn[-1][0] == "   " * 4998 + "└─ "


@given(
    st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), max_size=8, unique_by=lambda pair: pair[0])
)
def test_every_node_is_drawn_once_whatever_its_parent(pairs: list[tuple[int, int | None]]) -> None:
    nodes = [node("snapshot", str(number), None if parent is None else str(parent)) for number, parent in pairs]
    drawn = [each["id"] for _, each in family(nodes)]
    assert sorted(drawn) == sorted(each["id"] for each in nodes)
    place = {name: number for number, name in enumerate(drawn)}
    for number, (name, parent) in enumerate(pairs):
        if parent in [earlier for earlier, _ in pairs[:number]]:
            assert place[str(parent)] < place[str(name)]
