"""The life cycle over the wire: statuses, bodies and headers of both generations."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest

from aenv.errors import AenvError, ConflictError, GuestError, InvalidInputError, LimitError, UnavailableError, VmmError
from aenv.sandbox.service import NetworkOptions, OnTimeout, PauseMode, SandboxState
from tests.api.conftest import MAX_TIMEOUT, Answer, Node
from tests.api.fake import EPOCH


def test_create_of_the_second_generation(node: Node) -> None:
    answer = node.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert answer.status == 201
    (info,) = node.service.infos.values()
    assert answer.json == {
        "templateID": "basetemplateid",
        "sandboxID": info.id,
        "clientID": "local",
        "envdVersion": "0.6.13",
        "alias": "base",
        "envdAccessToken": "envd-token",
    }
    assert node.service.created[0].timeout == 300


def test_create_of_the_first_generation(node: Node) -> None:
    answer = node.call("POST", "/sandboxes", {"templateID": "base"})
    assert answer.status == 201
    assert "envdAccessToken" not in answer.json
    assert node.service.created[0].timeout == 15
    secure = node.call("POST", "/sandboxes", {"templateID": "base", "secure": True, "timeout": 60})
    assert secure.json["envdAccessToken"] == "envd-token"


def test_private_traffic_has_a_token(node: Node) -> None:
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    assert node.call("POST", "/v2/sandboxes", body).json["trafficAccessToken"] == "traffic-token"


def test_unknown_template(node: Node) -> None:
    assert "nowhere" in node.refused(404, "POST", "/v2/sandboxes", {"templateID": "nowhere"})
    assert "templateID" in node.refused(400, "POST", "/sandboxes", {"templateID": "nowhere"})


def test_chunked_body(node: Node) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    pieces = iter([b'{"templateID"', b':"base"', b"}"])
    connection.request("POST", "/v2/sandboxes", pieces, node.headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 201
    response.read()
    connection.close()


def test_body_may_be_large_but_not_endless(node: Node) -> None:
    big = {"templateID": "base", "metadata": {"k": "x" * 500_000}}
    assert node.call("POST", "/v2/sandboxes", big).status == 201
    assert "body" in node.refused(
        413, "POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"k": "x" * (1 << 20)}}
    )
    assert len(node.service.created) == 1


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
@pytest.mark.parametrize("timeout", [-1, 0, MAX_TIMEOUT + 1, 10**30, "5", 1.5, True, []])
def test_wrong_timeouts_of_a_create(node: Node, path: str, timeout: Any) -> None:
    assert "timeout" in node.refused(400, "POST", path, {"templateID": "base", "timeout": timeout})
    assert node.service.created == []


@pytest.mark.parametrize("action", ["timeout", "connect", "resume"])
@pytest.mark.parametrize("timeout", [-1, MAX_TIMEOUT + 1, 10**30, "5", 1.5, True, []])
def test_wrong_timeouts_of_a_sandbox(node: Node, action: str, timeout: Any) -> None:
    info = node.service.add(state=SandboxState.PAUSED)
    message = node.refused(400, "POST", f"/sandboxes/{info.id}/{action}", {"timeout": timeout})
    assert message.startswith("timeout")
    assert node.service.calls == []
    assert node.service.infos == {info.id: info}


def test_details(node: Node) -> None:
    info = node.service.add(
        metadata={"k": "v"},
        on_timeout=OnTimeout.PAUSE,
        auto_resume=True,
        envd_token="secret",
        domain="e2b.test",
        network=NetworkOptions(allow_out=("1.1.1.1",), allow_internet_access=False, rules={"a.com": {"h": "v"}}),
    )
    for path in (f"/sandboxes/{info.id}", f"/sandboxes/{info.id}-local"):
        answer = node.call("GET", path)
        assert answer.status == 200
        assert answer.json == {
            "templateID": "basetemplateid",
            "sandboxID": info.id,
            "clientID": "local",
            "startedAt": "2026-01-01T00:00:01Z",
            "endAt": "2026-01-01T00:05:01Z",
            "envdVersion": "0.6.13",
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": "running",
            "metadata": {"k": "v"},
            "network": {
                "allowOut": ["1.1.1.1"],
                "rules": {"a.com": [{"transform": {"headers": {"h": "v"}}}]},
                "allowPublicTraffic": True,
            },
            "lifecycle": {"autoResume": True, "onTimeout": "pause"},
            "alias": "base",
            "envdAccessToken": "secret",
            "allowInternetAccess": False,
            "domain": "e2b.test",
        }


PUBLIC = {
    SandboxState.STARTING: "running",
    SandboxState.RUNNING: "running",
    SandboxState.PAUSING: "paused",
    SandboxState.PAUSED: "paused",
    SandboxState.RESUMING: "paused",
    SandboxState.SNAPSHOTTING: "running",
    SandboxState.FORKING: "running",
    SandboxState.KILLING: None,
    SandboxState.GONE: None,
    SandboxState.FAILED: None,
}


@pytest.mark.parametrize("state", list(SandboxState))
def test_what_clients_see_of_a_state(node: Node, state: SandboxState) -> None:
    info = node.service.add(state=state, pause_mode=PauseMode.FILESYSTEM)
    listed = node.call("GET", "/v2/sandboxes")
    if PUBLIC[state] is None:
        node.refused(404, "GET", f"/sandboxes/{info.id}")
        assert listed.json == []
    else:
        detail = node.call("GET", f"/sandboxes/{info.id}").json
        assert detail["state"] == PUBLIC[state] == listed.json[0]["state"]
        assert detail.get("pauseMode") == ("filesystem" if state is SandboxState.PAUSED else None)
    running = PUBLIC[state] == "running"
    assert listed.headers["X-Total-Running"] == str(int(running))
    assert len(node.call("GET", "/sandboxes").json) == int(running)


def test_kill(node: Node) -> None:
    for state in (SandboxState.RUNNING, SandboxState.PAUSED):
        info = node.service.add(state=state)
        answer = node.call("DELETE", f"/sandboxes/{info.id}")
        assert (answer.status, answer.body) == (204, b"")
        node.refused(404, "DELETE", f"/sandboxes/{info.id}")


def test_pause(node: Node) -> None:
    first, second = node.service.add(), node.service.add()
    assert node.call("POST", f"/sandboxes/{first.id}/pause").status == 204
    node.refused(409, "POST", f"/sandboxes/{first.id}/pause", {})
    body = {"memory": False, "requireHealthyGuest": True}
    assert node.call("POST", f"/sandboxes/{second.id}/pause", body).status == 204
    assert node.service.calls == [("pause", True, False), ("pause", False, True)]


def test_connect(node: Node) -> None:
    running, paused = node.service.add(), node.service.add(state=SandboxState.PAUSED)

    def connect(path: str, body: Any = None) -> Answer:
        return node.call("POST", path, body)

    assert connect(f"/sandboxes/{running.id}/connect", {"timeout": 60}).status == 200
    answer = connect(f"/v2/sandboxes/{paused.id}/connect", {"timeout": 60, "memory": False})
    assert answer.status == 201
    assert answer.json["sandboxID"] == paused.id
    assert connect(f"/v2/sandboxes/{running.id}/connect", {}).status == 200
    assert connect(f"/v2/sandboxes/{running.id}/connect").status == 200
    assert "timeout" in node.refused(400, "POST", f"/sandboxes/{running.id}/connect", {})
    node.refused(400, "POST", f"/sandboxes/{running.id}/connect")
    assert node.service.calls == [
        ("connect", 60, True), ("connect", 60, False), ("connect", 300, True), ("connect", 300, True)
    ]  # fmt: skip


def test_resume(node: Node) -> None:
    info = node.service.add(state=SandboxState.PAUSED)
    path = f"/sandboxes/{info.id}/resume"
    assert node.call("POST", path).status == 201
    node.refused(409, "POST", path, {"timeout": 5})
    node.service.add(state=SandboxState.PAUSED)
    for number, (body, expected) in enumerate(
        [({"autoPause": True}, OnTimeout.PAUSE), ({"autoPause": False, "timeout": 9}, OnTimeout.KILL)]
    ):
        other = node.service.add(state=SandboxState.PAUSED)
        assert node.call("POST", f"/sandboxes/{other.id}/resume", body).status == 201
        assert node.service.calls[number + 1][2] is expected
    assert [call[1] for call in node.service.calls] == [15, 15, 9]


def test_timeout_and_refresh(node: Node) -> None:
    info = node.service.add()
    for timeout in (0, 60, MAX_TIMEOUT):
        assert node.call("POST", f"/sandboxes/{info.id}/timeout", {"timeout": timeout}).status == 204
    assert "timeout" in node.refused(400, "POST", f"/sandboxes/{info.id}/timeout", {})
    for body in (None, {}, {"duration": 1}, {"duration": 100}):
        assert node.call("POST", f"/sandboxes/{info.id}/refreshes", body).status == 204
    assert [call[1] for call in node.service.calls] == [0, 60, MAX_TIMEOUT, 15, 15, 15, 100]
    for duration in (-1, 3601, "x"):
        assert "duration" in node.refused(400, "POST", f"/sandboxes/{info.id}/refreshes", {"duration": duration})


def test_network_update_clears_what_it_leaves_out(node: Node) -> None:
    info = node.service.add(network=NetworkOptions(allow_out=("1.1.1.1",), rules={"a.com": {}}))
    path = f"/sandboxes/{info.id}/network"
    assert node.call("PUT", path, {"denyOut": ["10.0.0.0/8"]}).status == 204
    assert node.service.infos[info.id].network == NetworkOptions(deny_out=("10.0.0.0/8",))
    assert node.call("PUT", path, {}).status == 204
    assert node.service.infos[info.id].network == NetworkOptions()
    assert "denyOut" in node.refused(400, "PUT", path, {"denyOut": ["a.com"]})
    node.refused(404, "PUT", "/sandboxes/unknown/network", {})


ACTIONS = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/connect"),
    ("POST", "/resume"),
    ("POST", "/pause"),
    ("POST", "/timeout"),
    ("POST", "/refreshes"),
    ("PUT", "/network"),
    ("GET", "/metrics"),
    ("GET", "/logs"),
]


@pytest.mark.parametrize(("method", "action"), ACTIONS)
def test_unknown_and_impossible_ids(node: Node, method: str, action: str) -> None:
    body = {"timeout": 5} if method == "POST" else {} if method == "PUT" else None
    node.refused(404, method, f"/sandboxes/nonexistingsandbox{action}", body)
    for bad in ("ABC", "a%2Fb", "%00", "..", "a%20b", "%C3%A9", "a" * 65):
        assert "sandboxID" in node.refused(400, method, f"/sandboxes/{bad}{action}", body)


FAILURES: list[tuple[Exception, int, str | None]] = [
    (InvalidInputError("network.rules", "cannot be enforced here"), 400, None),
    (ConflictError("it is being killed"), 409, None),
    (LimitError("200 are running"), 429, "false"),
    (UnavailableError("no memory", hint="add some"), 503, "false"),
    (GuestError("the agent did not answer"), 500, None),
    (VmmError("exited"), 500, None),
    (AenvError("something else"), 500, None),
]


@pytest.mark.parametrize(("failure", "status", "retry"), FAILURES)
def test_errors_of_the_service(node: Node, failure: AenvError, status: int, retry: str | None) -> None:
    node.service.failure = failure
    for method, path, body in (("POST", "/v2/sandboxes", {"templateID": "base"}), ("GET", "/sandboxes/abc", None)):
        assert node.refused(status, method, path, body) == str(failure)
        assert node.call(method, path, body).headers["Should-Retry"] == retry


def test_a_bug_is_logged_and_not_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.service.failure = RuntimeError("the secret is 42")
    message = node.refused(500, "GET", "/sandboxes")
    assert "secret" not in message
    assert "the secret is 42" in caplog.text


def test_message_with_any_text_of_a_guest_is_json(node: Node) -> None:
    node.service.failure = GuestError('console: "\udc80\x00\u2028" ends')
    assert "ends" in node.refused(500, "GET", "/sandboxes")


# --- lists


def test_pages(node: Node) -> None:
    ids = [node.service.add().id for _ in range(3)]
    answer = node.call("GET", "/v2/sandboxes?limit=2&order=asc")
    assert [item["sandboxID"] for item in answer.json] == ids[:2]
    token = answer.headers["x-next-token"]
    rest = node.call("GET", f"/v2/sandboxes?limit=2&order=asc&nextToken={token}")
    assert [item["sandboxID"] for item in rest.json] == ids[2:]
    assert rest.headers["x-next-token"] is None
    assert "order" in node.refused(400, "GET", f"/v2/sandboxes?order=desc&nextToken={token}")


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=1&limit=2", "limit"),
        ("order=up", "order"),
        ("state=killed", "state"),
        ("startedAfter=today", "startedAfter"),
        ("nextToken=zzz", "next token"),
        ("metadata=%25zz", "metadata"),
        ("metadata=x", "metadata"),
        ("template=%00", "template"),
        ("template=%FF", "template"),
    ],
)
def test_wrong_queries(node: Node, query: str, name: str) -> None:
    assert name in node.refused(400, "GET", f"/v2/sandboxes?{query}")


def test_filters_of_both_lists(node: Node) -> None:
    node.service.add(metadata={"k": "v", "x": "y"})
    node.service.add(metadata={"k": "w"})
    node.service.add(metadata={"k": "v"}, state=SandboxState.PAUSED)

    def ids(path: str) -> list[str]:
        return [item["sandboxID"][-1] for item in node.call("GET", path).json]

    assert ids("/sandboxes") == ["2", "1"]
    assert ids("/sandboxes?metadata=k%3Dv") == ["1"]
    assert ids("/v2/sandboxes?metadata=k%3Dv") == ["3", "1"]
    assert ids("/v2/sandboxes?metadata=k%3Dv%26x%3Dy") == ["1"]
    assert ids("/v2/sandboxes?state=paused") == ["3"]
    assert ids("/v2/sandboxes?state=paused&state=running") == ["3", "2", "1"]
    assert ids("/v2/sandboxes?startedAfter=2026-01-01T00:00:02Z") == ["3", "2"]
    assert ids("/v2/sandboxes?template=base&limit=1") == ["3"]
    assert node.call("GET", "/v2/sandboxes?state=paused").headers["X-Total-Running"] == "2"


def test_template_filter_finds_sandboxes_of_a_deleted_template(node: Node) -> None:
    node.service.add()
    node.service.template_infos.clear()
    assert len(node.call("GET", "/v2/sandboxes?template=base").json) == 1
    assert len(node.call("GET", "/v2/sandboxes?template=basetemplateid").json) == 1


def test_sandboxes_with_the_same_start_are_all_listed(node: Node) -> None:
    ids = {node.service.add(started_at=EPOCH + timedelta(microseconds=1)).id for _ in range(5)}
    seen: list[str] = []
    token = ""
    for _ in range(5):
        answer = node.call("GET", f"/v2/sandboxes?limit=1&nextToken={token}")
        seen += [item["sandboxID"] for item in answer.json]
        token = answer.headers["x-next-token"] or ""
    assert set(seen) == ids
    assert len(seen) == 5
    assert not token


# --- repeated requests


def test_repeated_create(node: Node) -> None:
    body = {"templateID": "base", "metadata": {"a": "1", "b": "2"}}
    same = b'{ "metadata": {"b":"2", "a":"1"}, "templateID": "base", "timeout": null }'
    headers = {"Idempotency-Key": "key-1"}
    first = node.call("POST", "/v2/sandboxes", body, headers)
    second = node.call("POST", "/v2/sandboxes", same, headers)
    assert (first.status, second.status) == (201, 201)
    assert first.json == second.json
    other = node.call("POST", "/v2/sandboxes", body | {"timeout": 5}, headers)
    assert other.status == 422
    assert other.json["code"] == 422
    assert other.json["error_code"] == "idempotency_request_mismatch"
    assert len(node.service.created) == 1
    node.call("POST", "/v2/sandboxes", body)
    node.call("POST", "/v2/sandboxes", body)
    assert len(node.service.created) == 3


def test_create_repeated_while_it_runs(node: Node) -> None:
    node.service.gate = asyncio.Event()
    answers: list[Answer] = []

    def run() -> None:
        answers.append(node.call("POST", "/v2/sandboxes", {"templateID": "base"}, {"Idempotency-Key": "k"}))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    node.refused(404, "GET", "/sandboxes/unknown")  # the server is not held up
    node.loop.call_soon_threadsafe(node.service.gate.set)
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [201, 201, 201]
    assert len({answer.json["sandboxID"] for answer in answers}) == 1


def test_failed_create_may_be_repeated(node: Node) -> None:
    headers = {"Idempotency-Key": "k"}
    node.service.failure = UnavailableError("full")
    node.refused(503, "POST", "/v2/sandboxes", {"templateID": "base"}, headers=headers)
    node.service.failure = None
    assert node.call("POST", "/v2/sandboxes", {"templateID": "base"}, headers).status == 201


@pytest.mark.parametrize("key", ["", "UPPER", "a_b", "x" * 256])
def test_wrong_idempotency_key(node: Node, key: str) -> None:
    headers = {"Idempotency-Key": key}
    message = node.refused(400, "POST", "/v2/sandboxes", {"templateID": "base"}, headers=headers)
    assert "Idempotency-Key" in message
    assert node.service.created == []
