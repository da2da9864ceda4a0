from __future__ import annotations

import json
from datetime import timedelta

import pytest

from aenv.observe.logs import LogLevel
from aenv.observe.metrics import MetricPoint
from aenv.sandbox.service import SandboxState
from tests.api.conftest import Node
from tests.api.fake import EPOCH

EPOCH_SECONDS = int(EPOCH.timestamp())


def sample(node: Node, sandbox_id: str, *seconds: int) -> None:
    for second in seconds:
        point = MetricPoint(EPOCH + timedelta(seconds=second), 2, 1.25, 1, 2, 3, 4, 5)
        node.service.metric_store.add(sandbox_id, point)


def test_metric_has_every_field(node: Node) -> None:
    info = node.service.add(state=SandboxState.PAUSED)
    sample(node, info.id, 0)
    assert node.call("GET", f"/sandboxes/{info.id}/metrics").json == [
        {
            "timestamp": "2026-01-01T00:00:00Z",
            "timestampUnix": EPOCH_SECONDS,
            "cpuCount": 2,
            "cpuUsedPct": 1.25,
            "memUsed": 1,
            "memTotal": 2,
            "memCache": 3,
            "diskUsed": 4,
            "diskTotal": 5,
        }
    ]


def test_metrics_window(node: Node) -> None:
    info = node.service.add()
    sample(node, info.id, 0, 1, 2, 3)

    def seconds(query: str) -> list[int]:
        found = node.call("GET", f"/sandboxes/{info.id}/metrics?{query}").json
        return [point["timestampUnix"] - EPOCH_SECONDS for point in found]

    assert seconds(f"start={EPOCH_SECONDS + 1}&end={EPOCH_SECONDS + 2}") == [1, 2]
    assert seconds(f"start={EPOCH_SECONDS + 3}") == [3]
    assert seconds(f"end={EPOCH_SECONDS}") == [0]
    assert seconds("end=0") == []
    assert seconds("start=253402300799") == []


@pytest.mark.parametrize("query", ["start=-1", "end=x", "start=253402300800", "start=1.5", "start=5&end=4"])
def test_wrong_metrics_window(node: Node, query: str) -> None:
    info = node.service.add()
    message = node.refused(400, "GET", f"/sandboxes/{info.id}/metrics?{query}")
    assert message.startswith(query.partition("=")[0])


def test_metrics_of_many(node: Node) -> None:
    first, second = node.service.add(), node.service.add()
    sample(node, first.id, 1, 2)
    answer = node.call("GET", f"/sandboxes/metrics?sandbox_ids={first.id},{second.id},gone")
    assert answer.status == 200
    assert list(answer.json["sandboxes"]) == [first.id]
    assert answer.json["sandboxes"][first.id]["timestampUnix"] == EPOCH_SECONDS + 2


@pytest.mark.parametrize("query", ["", "?sandbox_ids=", "?sandbox_ids=,,", "?sandbox_ids=A"])
def test_wrong_list_of_sandboxes(node: Node, query: str) -> None:
    node.refused(400, "GET", f"/sandboxes/metrics{query}")


def test_too_many_sandboxes(node: Node) -> None:
    ids = ",".join(f"i{number}" for number in range(101))
    assert "sandbox_ids" in node.refused(400, "GET", f"/sandboxes/metrics?sandbox_ids={ids}")


def write(node: Node, sandbox_id: str, count: int) -> None:
    ring = node.service.log_store.ring(sandbox_id)
    for number in range(count):
        level = LogLevel.WARN if number % 2 else LogLevel.INFO
        moment = EPOCH + timedelta(days=400, seconds=number)
        ring.append(f"line {number}", level=level, fields={"source": "stdout"}, timestamp=moment)


def messages(node: Node, path: str) -> list[str]:
    return [entry["message"] for entry in node.call("GET", path).json["logs"]]


def test_logs_of_the_second_generation(node: Node) -> None:
    info = node.service.add()
    node.service.log_store.forget(info.id)
    write(node, info.id, 4)
    path = f"/v2/sandboxes/{info.id}/logs"
    assert node.call("GET", f"{path}?limit=1").json == {
        "logs": [
            {
                "timestamp": "2027-02-05T00:00:00Z",
                "message": "line 0",
                "level": "info",
                "fields": {"source": "stdout"},
            }
        ]
    }
    start = int((EPOCH + timedelta(days=400)).timestamp() * 1000)
    assert messages(node, f"{path}?cursor={start + 1000}&limit=2") == ["line 1", "line 2"]
    assert messages(node, f"{path}?cursor={start + 1000}&direction=backward") == ["line 1", "line 0"]
    assert messages(node, f"{path}?level=warn") == ["line 1", "line 3"]
    assert messages(node, f"{path}?search=e%203") == ["line 3"]
    assert messages(node, f"{path}?limit=0") == []


def test_logs_of_the_first_generation(node: Node) -> None:
    info = node.service.add()
    write(node, info.id, 2)
    answer = node.call("GET", f"/sandboxes/{info.id}/logs?start=1&limit=5000").json
    assert [json.loads(line["line"]) for line in answer["logs"]] == [
        {"message": "sandbox created", "level": "info", "logger": "event", "event": "created"},
        {"message": "line 0", "level": "info", "logger": "stdout"},
        {"message": "line 1", "level": "warn", "logger": "stdout"},
    ]
    assert [entry["message"] for entry in answer["logEntries"]] == ["sandbox created", "line 0", "line 1"]
    assert answer["logEntries"][0]["fields"] == {"source": "event", "event": "created"}


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("cursor=-1", "cursor"),
        ("cursor=x", "cursor"),
        ("cursor=999999999999999999", "cursor"),
        ("limit=1001", "limit"),
        ("direction=up", "direction"),
        ("level=fatal", "level"),
        ("search=" + "x" * 257, "search"),
    ],
)
def test_wrong_log_queries(node: Node, query: str, name: str) -> None:
    info = node.service.add()
    assert node.refused(400, "GET", f"/v2/sandboxes/{info.id}/logs?{query}").startswith(name)
