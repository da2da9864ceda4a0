"""POST /init, GET /envs and GET /metrics."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.envd.client import JSON, Agent

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


def envs(agent: Agent) -> dict[str, str]:
    answer: dict[str, str] = agent.request("GET", "/envs", headers={"X-Access-Token": "t"}).json
    answer.pop("E2B_SANDBOX")
    return answer


def test_answer(agent: Agent) -> None:
    answer = agent.init(envVars={"A": "1"}, accessToken="t", timestamp=NOW.isoformat(), defaultUser="root",
                        defaultWorkdir="/", volumeMounts=[], hyperloopIP="10.0.0.1", lifecycleID="x", caBundle="",
                        unknown={"a": 1})  # fmt: skip
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["x-envd-version"] == "0.6.13"


def test_sync_needs_no_token_of_the_host(agent: Agent) -> None:
    agent.init(accessToken="t")
    assert agent.request("POST", "/sync").status == 204


def test_version_option(envd_binary: Path) -> None:
    assert os.popen(f"{envd_binary} --version").read() == "0.6.13\n"


def test_env_vars_are_replaced(agent: Agent) -> None:
    agent.init(envVars={"A": "1", "B": "2"})
    assert envs(agent) == {"A": "1", "B": "2"}
    agent.init(envVars={"C": "3"})
    assert envs(agent) == {"C": "3"}
    agent.init(sandboxId="s", templateId="t")
    assert envs(agent) == {"C": "3", "E2B_SANDBOX_ID": "s", "E2B_TEMPLATE_ID": "t"}
    agent.init(envVars={})
    assert envs(agent) == {"E2B_SANDBOX_ID": "s", "E2B_TEMPLATE_ID": "t"}


@pytest.mark.parametrize("body", [None, b"", b"{}"])
def test_empty_init(agent: Agent, body: bytes | None) -> None:
    agent.init(envVars={"A": "1"})
    assert agent.request("POST", "/init", body, JSON).status == 204
    assert envs(agent) == {"A": "1"}


@pytest.mark.parametrize("older", [timedelta(microseconds=1), timedelta(days=100)])
def test_older_request_changes_nothing(agent: Agent, older: timedelta) -> None:
    agent.init(envVars={"A": "new"}, accessToken="t", timestamp=NOW.isoformat())
    answer = agent.init(envVars={"A": "old"}, accessToken="", timestamp=(NOW - older).isoformat())
    assert answer.status == 204
    assert envs(agent) == {"A": "new"}
    assert agent.request("GET", "/envs").status == 401


@pytest.mark.parametrize(
    "text",
    ["2026-05-04T03:02:01Z", "2026-05-04T03:02:01.000000001Z", "2026-05-04T05:02:01+02:00",
     "2026-05-03T22:32:01.5-04:30", "2026-05-04t03:02:01z", "2026-05-04 03:02:01Z",
     "2026-05-04T03:02:01.123456789012Z"],
)  # fmt: skip
def test_times(agent: Agent, text: str) -> None:
    agent.init(envVars={"A": "base"}, timestamp=NOW.isoformat())
    assert agent.init(envVars={"A": "same or later"}, timestamp=text).status == 204
    assert envs(agent) == {"A": "same or later"}


BAD = [
    ("envVars", []), ("envVars", {"A": 1}), ("envVars", {"": "x"}), ("envVars", {"A=B": "x"}), ("envVars", "A=1"),
    ("accessToken", 1), ("accessToken", ["x"]), ("defaultUser", 1), ("defaultWorkdir", {}),
    ("timestamp", 1), ("timestamp", ""), ("timestamp", "yesterday"), ("timestamp", "2026-13-01T00:00:00Z"),
    ("timestamp", "2026-05-04T03:02:01"), ("timestamp", "2026-05-04T03:02:01.Z"),
    ("timestamp", "2026-05-04T03:02:01Zx"),
    ("timestamp", "2026-05-04"), ("timestamp", "1900-01-01T00:00:00Z"), ("timestamp", "9999-01-01T00:00:00Z"),
    ("hostname", ""), ("hostname", "a b"), ("hostname", "-a"), ("hostname", "x" * 65), ("hostname", 1),
    ("hostname", "a\nb"),
    ("machineId", "short"), ("machineId", "G" * 32), ("machineId", "a" * 33), ("machineId", "../../etc/passwd"),
    ("entropy", "%"), ("entropy", "A" * 700), ("entropy", 1), ("sandboxId", 1), ("templateId", []),
    ("volumeMounts", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_field_changes_nothing_and_is_named(agent: Agent, field: str, value: Any) -> None:
    agent.init(envVars={"A": "1"}, accessToken="t")
    fields = {"envVars": {"A": "2"}, "accessToken": "u"} | {field: value}
    answer = agent.request("POST", "/init", json.dumps(fields).encode(), JSON)
    assert answer.status == 400
    assert answer.json["message"].startswith(f"{field}: ")
    assert envs(agent) == {"A": "1"}


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b'{"a": 1, "a": 2}', b"\xff", b"1" * 100, b" " * 5_000_000])
def test_bad_body(agent: Agent, body: bytes) -> None:
    answer = agent.request("POST", "/init", body, JSON)
    assert answer.status == (413 if len(body) > 4_194_304 else 400)
    assert isinstance(answer.json["message"], str)


def test_default_user(agent: Agent) -> None:
    agent.init(defaultUser="no-such-user")
    stream = agent.start({"process": {"cmd": "true"}})
    assert stream.error == ("unauthenticated", "invalid username: 'no-such-user'")


def test_without_system_nothing_outside_is_touched(agent: Agent) -> None:
    before = os.uname().nodename
    agent.init(hostname="changed-by-a-test", machineId="0" * 32, entropy="AAAA", timestamp="2001-01-01T00:00:00Z")
    assert os.uname().nodename == before
    assert not Path("/run/e2b").exists()
    assert datetime.now(UTC).year > 2001


def test_metrics(agent: Agent) -> None:
    metrics = agent.request("GET", "/metrics").json
    assert set(metrics) == {"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib",
                            "mem_used_mib", "disk_used", "disk_total"}  # fmt: skip
    assert metrics["cpu_count"] == os.cpu_count()
    assert abs(metrics["ts"] - datetime.now(UTC).timestamp()) < 100
    assert 0 < metrics["mem_used"] < metrics["mem_total"]
    assert metrics["mem_total_mib"] == metrics["mem_total"] // 2**20
    assert 0 < metrics["disk_used"] <= metrics["disk_total"]
    for _ in range(5):
        assert 0 <= agent.request("GET", "/metrics").json["cpu_used_pct"] <= 100
