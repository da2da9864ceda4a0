"""Whatever a client with the key sends: never 500, always the error form of E2B."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.api.models import (
    ConnectBody,
    ForkBody,
    NetworkUpdateBody,
    NewSandbox,
    PauseBody,
    RefreshBody,
    ResumeBody,
    RollbackBody,
    SnapshotRequest,
    TimeoutBody,
)
from tests.api.conftest import Node

ON_ONE_SERVER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OPERATIONS: list[tuple[str, str, type]] = [
    ("POST", "/sandboxes", NewSandbox),
    ("POST", "/v2/sandboxes", NewSandbox),
    ("POST", "/sandboxes/{id}/connect", ConnectBody),
    ("POST", "/v2/sandboxes/{id}/connect", ConnectBody),
    ("POST", "/sandboxes/{id}/resume", ResumeBody),
    ("POST", "/sandboxes/{id}/pause", PauseBody),
    ("POST", "/sandboxes/{id}/timeout", TimeoutBody),
    ("POST", "/sandboxes/{id}/refreshes", RefreshBody),
    ("PUT", "/sandboxes/{id}/network", NetworkUpdateBody),
    ("POST", "/sandboxes/{id}/snapshots", SnapshotRequest),
    ("POST", "/sandboxes/{id}/fork", ForkBody),
    ("POST", "/sandboxes/{id}/rollback", RollbackBody),
]
NESTED_NAMES = ["allowOut", "denyOut", "rules", "egressProxy", "address", "tokens", "enabled", "transform", "headers"]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["base", "0.0.0.0/0", "*.a.com", "1.1.1.1:80", 10**40, -1, 0, 86400, "\0", "${PORT}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NESTED_NAMES) | st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def check(node: Node, method: str, path: str, body: bytes | None = None) -> None:
    answer = node.call(method, path, body)
    assert answer.status < 500, (method, path, body, answer.body)
    if answer.status >= 400:
        assert answer.headers["Content-Type"] == "application/json"
        assert set(answer.json) <= {"code", "message", "error_code"}
        assert answer.json["code"] == answer.status
        assert answer.json["message"]


@pytest.mark.parametrize(("method", "template", "model"), OPERATIONS)
def test_bodies_with_the_right_names_and_any_values(node: Node, method: str, template: str, model: Any) -> None:
    path = template.replace("{id}", node.service.add().id)
    names = st.sampled_from(model.__struct_encode_fields__) | st.text(max_size=5)

    @ON_ONE_SERVER
    @given(st.dictionaries(names, VALUES, max_size=6))
    def run(body: dict[str, Any]) -> None:
        check(node, method, path, json.dumps(body).encode())
        if model is NewSandbox:
            check(node, method, path, json.dumps(body | {"templateID": "base"}).encode())

    run()


@pytest.mark.parametrize(("method", "template", "model"), OPERATIONS)
def test_bodies_of_any_bytes(node: Node, method: str, template: str, model: Any) -> None:
    path = template.replace("{id}", node.service.add().id)

    @ON_ONE_SERVER
    @given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
    def run(body: bytes) -> None:
        check(node, method, path, body)

    run()


@ON_ONE_SERVER
@given(
    st.sampled_from(["/sandboxes", "/v2/sandboxes", "/sandboxes/metrics", "/v2/templates", "/sandboxes/{id}/metrics",
                     "/sandboxes/{id}/logs", "/v2/sandboxes/{id}/logs", "/snapshots", "/tree"]),
    st.lists(
        st.tuples(
            st.sampled_from(["metadata", "state", "order", "startedAfter", "template", "nextToken", "limit", "start",
                             "end", "cursor", "direction", "level", "search", "sandbox_ids", "sandboxID", "name"]),
            st.text(max_size=30) | st.integers().map(str) | st.binary(max_size=8),
        ),
        max_size=4,
    ),
)  # fmt: skip
def test_queries(node: Node, template: str, pairs: list[tuple[str, str | bytes]]) -> None:
    path = template.replace("{id}", node.service.add().id)
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in pairs)
    check(node, "GET", f"{path}?{query}")


@ON_ONE_SERVER
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    st.lists(
        st.sampled_from(
            [
                "sandboxes",
                "v2",
                "templates",
                "aliases",
                "health",
                "metrics",
                "logs",
                "snapshots",
                "fork",
                "rollback",
                "tree",
                "",
                ".",
                "..",
            ]
        )
        | st.text(max_size=8),
        max_size=5,
    ),
)
def test_paths(node: Node, method: str, segments: list[str]) -> None:
    check(node, method, "/" + "/".join(quote(segment, safe="") for segment in segments))


def test_not_served_is_json_too(node: Node) -> None:
    answer = node.call("PATCH", "/sandboxes/abc")
    assert (answer.status, answer.json["code"]) == (405, 405)
    assert answer.headers["Allow"] == "DELETE, GET"
    for path in ("/", "/nowhere", "/sandboxes/", "/v1/sandboxes", "/sandboxes/abc/nothing"):
        assert node.refused(404, "GET", path) == "no such path"
