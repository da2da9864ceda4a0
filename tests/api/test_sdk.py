"""The unmodified Python SDK against the control plane."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import (
    AuthenticationException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    ServiceBusyException,
)

from aenv.errors import GuestError, LimitError, UnavailableError
from aenv.observe.metrics import MetricPoint
from aenv.sandbox import service as model
from tests.api.conftest import KEY, Node
from tests.api.fake import EPOCH


@pytest.fixture
def options(node: Node, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("E2B_DEBUG", "E2B_DOMAIN", "E2B_SANDBOX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("E2B_API_URL", node.url)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    return {"request_timeout": 20}


def test_create_sends_everything_and_reads_the_answer(node: Node, options: dict[str, Any]) -> None:
    node.service.domain = "sandboxes.test"
    sandbox = Sandbox.create(
        "base",
        timeout=77,
        metadata={"run": "a&b=c", "ü": "日本 +%"},
        envs={"A": "1", "EMPTY": ""},
        network={"allow_out": ["8.8.8.8", "*.example.com"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": False},
        lifecycle={"on_timeout": "pause", "auto_resume": True},
        **options,
    )
    asked = node.service.created[0]
    assert asked.timeout == 77
    assert asked.secure
    assert asked.metadata == {"run": "a&b=c", "ü": "日本 +%"}
    assert asked.env == {"A": "1", "EMPTY": ""}
    assert asked.on_timeout is model.OnTimeout.PAUSE
    assert asked.auto_resume
    assert asked.network.allow_out == ("8.8.8.8", "*.example.com")
    assert not asked.network.internet
    assert sandbox.sandbox_id in node.service.infos
    assert sandbox.traffic_access_token == "traffic-token"
    assert sandbox.get_host(80) == f"80-{sandbox.sandbox_id}.sandboxes.test"

    info = sandbox.get_info(**options)
    assert info.template_id == "basetemplateid"
    assert info.name == "base"
    assert info.state is SandboxState.RUNNING
    assert info.metadata == {"run": "a&b=c", "ü": "日本 +%"}
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}
    assert info.network is not None
    assert info.network["allow_out"] == ["8.8.8.8", "*.example.com"]
    assert info.network["allow_public_traffic"] is False


def test_create_with_nothing_said_lives_five_minutes(node: Node, options: dict[str, Any]) -> None:
    Sandbox.create(**options)
    assert node.service.created[0].timeout == 300
    assert node.service.created[0].template == "base"
    assert node.service.created[0].network.internet


def test_pause_connect_kill(node: Node, options: dict[str, Any]) -> None:
    sandbox = Sandbox.create("base", **options)
    assert Sandbox.pause(sandbox.sandbox_id, **options) is not False
    assert sandbox.get_info(**options).state is SandboxState.PAUSED
    again = Sandbox.connect(sandbox.sandbox_id, timeout=33, **options)
    assert again.sandbox_id == sandbox.sandbox_id
    assert node.service.calls[-1] == ("connect", 33, True)
    assert sandbox.get_info(**options).state is SandboxState.RUNNING
    assert Sandbox.kill(sandbox.sandbox_id, **options) is True
    assert Sandbox.kill(sandbox.sandbox_id, **options) is False


def test_pause_of_a_paused_sandbox_is_false(node: Node, options: dict[str, Any]) -> None:
    info = node.service.add(state=model.SandboxState.PAUSED)
    assert Sandbox.pause(info.id, **options) is False


def test_set_timeout(node: Node, options: dict[str, Any]) -> None:
    info = node.service.add()
    Sandbox.set_timeout(info.id, 0, **options)
    Sandbox.set_timeout(info.id, 120, **options)
    assert node.service.calls == [("timeout", 0), ("timeout", 120)]
    with pytest.raises(SandboxException, match="timeout"):
        Sandbox.set_timeout(info.id, 10**9, **options)


def test_unknown_sandbox(node: Node, options: dict[str, Any]) -> None:
    assert Sandbox.kill("nonexistingsandbox", **options) is False
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info("nonexistingsandbox", **options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.set_timeout("nonexistingsandbox", 5, **options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nonexistingsandbox", **options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_metrics("nonexistingsandbox", **options)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (LimitError("200 sandboxes are running"), RateLimitException),
        (UnavailableError("no memory left"), ServiceBusyException),
        (GuestError("the agent did not answer"), SandboxException),
        (RuntimeError("a bug"), SandboxException),
    ],
)
def test_failed_create_is_raised_once_and_not_retried(
    node: Node, options: dict[str, Any], failure: Exception, expected: type[Exception]
) -> None:
    node.service.failure = failure
    with pytest.raises(expected) as caught:
        Sandbox.create("base", **options)
    assert len(node.service.created) == 1
    assert "bug" not in str(caught.value)


def test_wrong_key(node: Node, options: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.list(api_key="e2b_" + "0" * 40, **options).next_items()


def test_list_pages_in_both_orders(node: Node, options: dict[str, Any]) -> None:
    ids = [node.service.add(metadata={"n": str(number % 2)}).id for number in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1]), (None, ids[::-1])):
        pages = Sandbox.list(limit=2, order=order, **options)  # type: ignore[arg-type]
        seen = []
        while pages.has_next:
            items = pages.next_items()
            assert 1 <= len(items) <= 2
            seen += [item.sandbox_id for item in items]
        assert seen == expected


def test_list_filters(node: Node, options: dict[str, Any]) -> None:
    odd = {"k&=": "v +%&=", "ключ": "значение"}
    first = node.service.add(metadata=odd)
    second = node.service.add(state=model.SandboxState.PAUSED, template_id="other", alias=None)

    def ids(**query: Any) -> list[str]:
        return [item.sandbox_id for item in Sandbox.list(query=SandboxQuery(**query), **options).next_items()]

    assert ids() == [second.id, first.id]
    assert ids(metadata=odd) == [first.id]
    assert ids(metadata=odd | {"more": "x"}) == []
    assert ids(state=[SandboxState.PAUSED]) == [second.id]
    assert ids(state=[SandboxState.RUNNING, SandboxState.PAUSED]) == [second.id, first.id]
    assert ids(template="base") == [first.id]
    assert ids(template="other") == [second.id]
    assert ids(template="unknown-template") == []
    assert ids(started_after=first.started_at) == [second.id, first.id]
    assert ids(started_after=first.started_at + timedelta(microseconds=1)) == [second.id]


def test_idempotency_key_gives_the_same_sandbox(node: Node, options: dict[str, Any]) -> None:
    first = Sandbox.create("base", idempotency_key="one-key", **options)
    second = Sandbox.create("base", idempotency_key="one-key", **options)
    assert first.sandbox_id == second.sandbox_id
    with pytest.raises(SandboxException, match="422"):
        Sandbox.create("base", timeout=5, idempotency_key="one-key", **options)
    assert len(node.service.created) == 1


def test_metrics(node: Node, options: dict[str, Any]) -> None:
    info = node.service.add()
    for second in range(5):
        moment = EPOCH + timedelta(seconds=second, milliseconds=500)
        node.service.metric_store.add(info.id, MetricPoint(moment, 2, 12.5, 1, 2, 3, 4, 5))
    window = Sandbox.get_metrics(
        info.id, start=EPOCH + timedelta(seconds=1), end=EPOCH + timedelta(seconds=3, milliseconds=900), **options
    )
    assert [point.timestamp.second for point in window] == [1, 2, 3]
    assert window[0].cpu_used_pct == 12.5
    assert (window[0].mem_used, window[0].mem_total, window[0].mem_cache) == (1, 2, 3)
    assert (window[0].disk_used, window[0].disk_total) == (4, 5)
    assert len(Sandbox.get_metrics(info.id, **options)) == 5


def test_update_network(node: Node, options: dict[str, Any]) -> None:
    info = node.service.add(network=model.NetworkOptions(allow_out=("1.1.1.1",)))
    Sandbox.update_network(info.id, {"deny_out": ["10.0.0.0/8"], "allow_internet_access": False}, **options)
    changed = node.service.infos[info.id].network
    assert changed.allow_out == ()
    assert changed.deny_out == ("10.0.0.0/8",)
    assert not changed.internet


def test_snapshots(node: Node, options: dict[str, Any]) -> None:
    sandbox = Sandbox.create("base", **options)
    plain = sandbox.create_snapshot(**options)
    assert (plain.snapshot_id, plain.names) == ("s1:default", [])
    named = Sandbox.create_snapshot(sandbox.sandbox_id, name="ns/ready:v1", mode="filesystem", **options)
    assert (named.snapshot_id, named.names) == ("ns/ready:v1", ["ns/ready:v1"])
    assert node.service.calls == [("snapshot", None, True), ("snapshot", "ns/ready:v1", False)]

    for snapshot, template in ((plain, "s1"), (named, "s2")):
        child = Sandbox.create(snapshot.snapshot_id, **options)
        assert child.get_info(**options).template_id == template
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **options) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **options) is False
    with pytest.raises(SandboxNotFoundException):
        Sandbox.create_snapshot("nonexistingsandbox", **options)
    with pytest.raises(SandboxException, match="name"):
        sandbox.create_snapshot(name="a b", **options)


def test_snapshots_are_listed_in_pages(node: Node, options: dict[str, Any]) -> None:
    for number in range(5):
        node.service.add_snapshot(sandbox_id=f"i{number % 2}", names=(f"n{number}",))

    def ids(**query: Any) -> list[str]:
        pages = Sandbox.list_snapshots(**query, **options)
        found = []
        while pages.has_next:
            found += [item.snapshot_id for item in pages.next_items()]
        return found

    assert ids() == ids(limit=2) == [f"n{number}:default" for number in (4, 3, 2, 1, 0)]
    assert ids(sandbox_id="i1", limit=1) == ["n3:default", "n1:default"]
    assert ids(name="n2") == ids(name="n2:default") == ids(name="s3") == ["n2:default"]
    assert ids(name="n2-does-not-exist") == []


def test_fork(node: Node, options: dict[str, Any]) -> None:
    sandbox = Sandbox.create("base", **options)
    (only,) = sandbox.fork(**options)
    assert isinstance(only, Sandbox)
    node.service.room = 1
    child, failed = Sandbox.fork(sandbox.sandbox_id, count=2, timeout=60, **options)
    assert isinstance(child, Sandbox)
    assert child.sandbox_id in node.service.infos
    assert isinstance(failed, ServiceBusyException)
    assert node.service.calls == [("fork", 1, 15), ("fork", 2, 60)]
    with pytest.raises(RateLimitException):
        sandbox.fork(count=20, **options)
    sandbox.kill(**options)
    with pytest.raises(SandboxNotFoundException):
        sandbox.fork(**options)


@pytest.mark.parametrize("template", ["base", "basetemplateid"])
def test_template_exists(node: Node, options: dict[str, Any], template: str) -> None:
    from e2b import Template

    assert Template.exists(template, **options) is True
    assert Template.exists("unknown/name:tag", **options) is False


def test_async_sdk(node: Node, options: dict[str, Any]) -> None:
    import asyncio

    async def run() -> None:
        sandbox = await AsyncSandbox.create("base", **options)
        assert (await sandbox.get_info(**options)).state is SandboxState.RUNNING
        assert [item.sandbox_id for item in await AsyncSandbox.list(**options).next_items()] == [sandbox.sandbox_id]
        assert await AsyncSandbox.kill(sandbox.sandbox_id, **options)

    asyncio.run(run())
    assert node.service.infos == {}
