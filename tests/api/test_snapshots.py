"""Snapshots, forks, roll-back and tree over the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.api.names import full_names, is_called, snapshot_id
from aenv.errors import ConflictError, GuestError
from aenv.sandbox.service import ForkFailure, SandboxState
from tests.api.conftest import MAX_TIMEOUT, Node
from tests.api.fake import FORK_LIMIT, FakeService

# --- names

SNAPSHOT = FakeService().add_snapshot()


def named(*names: str) -> Any:
    return replace(SNAPSHOT, names=names)


def test_identifiers_have_a_tag() -> None:
    assert snapshot_id(named()) == "s1:default"
    assert full_names(named()) == []
    assert snapshot_id(named("a", "b:v2")) == "a:default"
    assert full_names(named("ns/a", "b:v2")) == ["ns/a:default", "b:v2"]


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("s1", (), True),
        ("s1:default", (), True),
        ("s1:v1", (), False),
        ("s1", ("a",), True),
        ("s", (), False),
        ("a", ("a",), True),
        ("a:default", ("a",), True),
        ("a:v1", ("a",), False),
        ("a", ("a:v1",), True),
        ("a:v1", ("a:v1",), True),
        ("a:default", ("a:v1",), False),
        ("a", ("b", "a:v1"), True),
        ("a", ("ns/a",), True),
        ("a:default", ("ns/a",), True),
        ("ns/a", ("ns/a",), True),
        ("ns/a:default", ("ns/a",), True),
        ("other/a", ("ns/a",), False),
        ("ns/a", ("a",), False),
        ("ns", ("ns/a",), False),
        ("A", ("a",), False),
        ("", ("a",), False),
        (":", ("a",), False),
        ("a:", ("a",), False),
        ("a:default:default", ("a",), False),
    ],
)
def test_what_a_filter_finds(text: str, names: tuple[str, ...], expected: bool) -> None:
    assert is_called(named(*names), text) is expected


@given(st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?(:(v[1-9]|default))?", fullmatch=True))
def test_an_identifier_finds_its_snapshot(name: str) -> None:
    info = named(name.removesuffix(":default"))
    assert is_called(info, snapshot_id(info))
    assert is_called(info, name)
    assert is_called(info, info.id)


# --- snapshot


def test_snapshot(node: Node) -> None:
    info = node.service.add()
    for body in (None, {}, {"name": None, "memory": None, "unknown": 1}):
        assert node.call("POST", f"/sandboxes/{info.id}/snapshots", body).status == 201
    answer = node.call("POST", f"/sandboxes/{info.id}-local/snapshots", {"name": "ns/ready:v2", "memory": False})
    assert answer.status == 201
    assert answer.json == {
        "snapshotID": "ns/ready:v2",
        "names": ["ns/ready:v2"],
        "templateID": "s4",
        "sandboxID": info.id,
        "parentID": "basetemplateid",
        "createdAt": "2026-01-01T00:00:04Z",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "memory": False,
        "memoryBytes": 7 << 20,
        "diskBytes": 3 << 20,
    }
    assert node.service.calls == [("snapshot", None, True)] * 3 + [("snapshot", "ns/ready:v2", False)]


def test_snapshot_without_a_name_is_called_by_its_id(node: Node) -> None:
    info = node.service.add()
    answer = node.call("POST", f"/sandboxes/{info.id}/snapshots", {})
    assert (answer.json["snapshotID"], answer.json["names"]) == ("s1:default", [])


def test_a_name_moves_to_the_new_snapshot(node: Node) -> None:
    info = node.service.add()
    for tagged in ("ready", "ready:default"):
        answer = node.call("POST", f"/sandboxes/{info.id}/snapshots", {"name": tagged})
        assert (answer.json["snapshotID"], answer.json["names"]) == ("ready:default", ["ready:default"])
    listed = node.call("GET", "/snapshots").json
    assert [item["snapshotID"] for item in listed] == ["ready:default", "s1:default"]


BAD_NAMES = ["", " ", ":", "a:", ":a", "a:b:c", "a b", "../x", "a/../b", "/a", "-a", "ä", "a\0", "a\n", "x" * 129,
             "a:" + "x" * 65, "a:b/c", "a%2Fb"]  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_NAMES, 5, True, [], {}])
def test_wrong_names(node: Node, name: Any) -> None:
    info = node.service.add()
    message = node.refused(400, "POST", f"/sandboxes/{info.id}/snapshots", {"name": name})
    assert message.startswith("name: ")
    assert node.service.snapshot_infos == []


@pytest.mark.parametrize("memory", ["false", 0, 1.5, [], {}])
def test_wrong_memory(node: Node, memory: Any) -> None:
    info = node.service.add()
    message = node.refused(400, "POST", f"/sandboxes/{info.id}/snapshots", {"memory": memory})
    assert message.startswith("memory: ")
    assert node.service.snapshot_infos == []


def test_a_template_keeps_its_name(node: Node) -> None:
    info = node.service.add()
    assert "base" in node.refused(409, "POST", f"/sandboxes/{info.id}/snapshots", {"name": "base:default"})


ACTIONS: list[tuple[str, Any]] = [("snapshots", {}), ("fork", {}), ("rollback", {"snapshotID": "x"})]


@pytest.mark.parametrize(("action", "body"), ACTIONS)
def test_unknown_and_impossible_sandboxes(node: Node, action: str, body: Any) -> None:
    node.refused(404, "POST", f"/sandboxes/nonexistingsandbox/{action}", body)
    for bad in ("ABC", "a%2Fb", "%00", "..", "a%20b", "%C3%A9", "a" * 65):
        assert "sandboxID" in node.refused(400, "POST", f"/sandboxes/{bad}/{action}", body)
    answer = node.call("GET", f"/sandboxes/abc/{action}")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert node.call("POST", f"/sandboxes/abc/{action}", body, key=False).status == 401


# --- list and delete


def test_list(node: Node) -> None:
    node.service.add_snapshot(sandbox_id="i1", names=("ready",))
    node.service.add_snapshot(sandbox_id="i2", names=("ready:v1", "ns/best"))
    node.service.add_snapshot(sandbox_id="i2")

    def ids(query: str = "") -> list[str]:
        return [item["templateID"] for item in node.call("GET", f"/snapshots{query}").json]

    assert ids() == ids("?sandboxID=&name=&limit=&nextToken=") == ["s3", "s2", "s1"]
    assert ids("?sandboxID=i2") == ids("?sandboxID=i2-local") == ["s3", "s2"]
    assert ids("?sandboxID=gone") == []
    assert ids("?name=ready") == ["s2", "s1"]
    assert ids("?name=ready%3Av1") == ["s2"]
    assert ids("?name=ready:default") == ["s1"]
    assert ids("?name=ns%2Fbest") == ids("?name=best") == ["s2"]
    assert ids("?name=s3") == ids("?name=s3:default") == ["s3"]
    assert ids("?name=ready&sandboxID=i1") == ["s1"]
    assert ids("?name=nothing") == []


def test_pages_of_a_filtered_list(node: Node) -> None:
    wanted = [node.service.add_snapshot(sandbox_id=f"i{number % 2}").id for number in range(9)][1::2]
    seen: list[str] = []
    token = ""
    for _ in range(len(wanted)):
        answer = node.call("GET", f"/snapshots?sandboxID=i1&limit=1&nextToken={token}")
        seen += [item["templateID"] for item in answer.json]
        token = answer.headers["x-next-token"] or ""
    assert seen == wanted[::-1]
    assert not token


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=1&limit=1", "limit"),
        ("nextToken=zzz", "nextToken"),
        ("sandboxID=A", "sandboxID"),
        ("sandboxID=%00", "sandboxID"),
        ("sandboxID=a&sandboxID=a", "sandboxID"),
        ("name=%00", "name"),
        ("name=" + "x" * 257, "name"),
        ("name=%FF", "name"),
    ],
)
def test_wrong_queries(node: Node, query: str, name: str) -> None:
    assert name in node.refused(400, "GET", f"/snapshots?{query}")


@pytest.mark.parametrize("names", [(), ("ready",), ("ready:v2",), ("ns/ready",)])
def test_every_form_of_an_identifier_creates_and_deletes(node: Node, names: tuple[str, ...]) -> None:
    for take in (0, 1, 2):
        info = node.service.add_snapshot(names=names)
        forms = [info.id, snapshot_id(info), info.names[0] if names else f"{info.id}:default"]
        for form in forms:
            answer = node.call("POST", "/v2/sandboxes", {"templateID": form})
            assert answer.status == 201
            assert answer.json["templateID"] == info.id
        path = f"/templates/{quote(forms[take], safe='')}"
        assert node.call("DELETE", path).status == 204
        node.refused(404, "DELETE", path)
        node.refused(404, "POST", "/v2/sandboxes", {"templateID": forms[take]})
    assert node.service.snapshot_infos == []


# --- fork


def test_fork(node: Node) -> None:
    info = node.service.add()
    answer = node.call("POST", f"/sandboxes/{info.id}/fork", {"count": 3, "timeout": 60})
    assert answer.status == 201
    assert [set(entry) for entry in answer.json] == [{"sandbox"}] * 3
    children = [entry["sandbox"] for entry in answer.json]
    assert children[0] == {
        "templateID": "s1",
        "sandboxID": children[0]["sandboxID"],
        "clientID": "local",
        "envdVersion": "0.6.13",
        "alias": "base",
        "envdAccessToken": "token-0",
    }
    assert len({child["sandboxID"] for child in children} | {info.id}) == 4


def test_fork_with_nothing_said_makes_one_child_that_lives_fifteen_seconds(node: Node) -> None:
    info = node.service.add()
    for body in (None, {}, {"count": None, "timeout": None}):
        assert len(node.call("POST", f"/sandboxes/{info.id}/fork", body).json) == 1
    assert node.service.calls == [("fork", 1, 15)] * 3


def test_children_that_failed_are_entries(node: Node) -> None:
    info = node.service.add()
    node.service.room = 1
    answer = node.call("POST", f"/sandboxes/{info.id}/fork", {"count": 3})
    assert answer.status == 201
    assert [set(entry) for entry in answer.json] == [{"sandbox"}, {"error"}, {"error"}]
    assert answer.json[1]["error"] == {"code": 503, "message": "no memory left (end some sandboxes)"}


def test_a_failure_may_quote_any_text_of_a_guest(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fork(*_: object) -> list[ForkFailure]:
        return [ForkFailure(GuestError('console: "\udc80\x00" ends'))]

    monkeypatch.setattr(node.service, "fork", fork)
    (entry,) = node.call("POST", "/sandboxes/abc/fork").json
    assert entry["error"]["code"] == 500
    assert "ends" in entry["error"]["message"]


def test_the_limit_of_a_fork(node: Node) -> None:
    info = node.service.add()
    path = f"/sandboxes/{info.id}/fork"
    assert len(node.call("POST", path, {"count": FORK_LIMIT}).json) == FORK_LIMIT
    answer = node.call("POST", path, {"count": FORK_LIMIT + 1})
    assert (answer.status, answer.json["code"], answer.headers["Should-Retry"]) == (429, 429, "false")
    assert len(node.service.infos) == 1 + FORK_LIMIT


@pytest.mark.parametrize("count", [-1, 0, 101, 10**30, "2", 1.5, True, [], {}])
def test_wrong_counts(node: Node, count: Any) -> None:
    info = node.service.add()
    assert node.refused(400, "POST", f"/sandboxes/{info.id}/fork", {"count": count}).startswith("count")
    assert node.service.calls == []


@pytest.mark.parametrize("timeout", [-1, 0, MAX_TIMEOUT + 1, 10**30, "5", 1.5, True, []])
def test_wrong_timeouts(node: Node, timeout: Any) -> None:
    info = node.service.add()
    assert node.refused(400, "POST", f"/sandboxes/{info.id}/fork", {"timeout": timeout}).startswith("timeout")
    assert node.service.calls == []


def test_a_paused_sandbox_is_not_forked(node: Node) -> None:
    info = node.service.add(state=SandboxState.PAUSED)
    node.refused(409, "POST", f"/sandboxes/{info.id}/fork", {})


# --- roll-back


@pytest.mark.parametrize("state", [SandboxState.RUNNING, SandboxState.PAUSED])
def test_rollback(node: Node, state: SandboxState) -> None:
    info = node.service.add(envd_token="secret", state=state)
    snapshot = node.service.add_snapshot(sandbox_id=info.id, names=("ns/ready",))
    for text in (snapshot.id, f"{snapshot.id}:default", "ns/ready", "ns/ready:default"):
        answer = node.call("POST", f"/sandboxes/{info.id}/rollback", {"snapshotID": text})
        assert answer.status == 200
        assert (answer.json["sandboxID"], answer.json["envdAccessToken"]) == (info.id, "secret")
    assert node.service.calls == [("rollback", snapshot.id)] * 4


def test_rollback_to_what_is_not_its_snapshot(node: Node) -> None:
    info = node.service.add()
    node.service.add_snapshot(sandbox_id="another")
    path = f"/sandboxes/{info.id}/rollback"
    node.refused(404, "POST", path, {"snapshotID": "nothing"})
    node.refused(409, "POST", path, {"snapshotID": "s1"})
    node.refused(409, "POST", path, {"snapshotID": "base"})
    for body in (None, {}, {"snapshotID": None}, {"snapshotID": 5}, {"snapshotID": ""}, {"snapshotID": "a\0"}):
        message = node.refused(400, "POST", path, body)
        assert "snapshotID" in message or "body" in message
    assert node.service.calls == []


# --- tree


def test_tree(node: Node) -> None:
    info = node.service.add()
    paused = node.service.add(state=SandboxState.PAUSED, template_id="s1")
    node.service.add_snapshot(names=("ready:v1",))
    answer = node.call("GET", "/tree")
    assert answer.status == 200
    assert answer.json == [
        {
            "kind": "template",
            "id": "basetemplateid",
            "names": ["base"],
            "createdAt": "2026-01-01T00:00:00Z",
            "memoryBytes": 50 << 20,
            "diskBytes": 400 << 20,
        },
        {
            "kind": "snapshot",
            "id": "s1",
            "parentID": "basetemplateid",
            "names": ["ready:v1"],
            "createdAt": "2026-01-01T00:00:01Z",
            "memoryBytes": 7 << 20,
            "diskBytes": 3 << 20,
        },
        {
            "kind": "sandbox",
            "id": info.id,
            "parentID": "basetemplateid",
            "names": [],
            "state": "running",
            "createdAt": "2026-01-01T00:00:01Z",
            "memoryBytes": 0,
            "diskBytes": 4096,
            "residentBytes": 80 << 20,
            "privateBytes": 5 << 20,
        },
        {
            "kind": "sandbox",
            "id": paused.id,
            "parentID": "s1",
            "names": [],
            "state": "paused",
            "createdAt": "2026-01-01T00:00:02Z",
            "memoryBytes": 0,
            "diskBytes": 4096,
        },
    ]


@pytest.mark.parametrize("state", list(SandboxState))
def test_the_tree_shows_the_sandboxes_that_the_list_shows(node: Node, state: SandboxState) -> None:
    node.service.add(state=state)
    listed = [(item["sandboxID"], item["state"]) for item in node.call("GET", "/v2/sandboxes").json]
    shown = [(n["id"], n["state"]) for n in node.call("GET", "/tree").json if n["kind"] == "sandbox"]
    assert shown == listed


def test_lists_need_the_key_and_get(node: Node) -> None:
    for path in ("/snapshots", "/tree"):
        assert node.call("GET", path, key=False).status == 401
        assert node.call("POST", path).status == 405
        node.service.failure = ConflictError("no")
        node.refused(409, "GET", path)
        node.service.failure = None
