"""What a daemon says of its sandboxes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from aenv.errors import (
    NotFoundError,
    VmmError,
)
from aenv.observe.logs import LogQuery
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import NetworkOptions
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeVm
from tests.sandbox.world import (
    BASE,
    World,
    run,
    until,
)

# What is observed


def test_the_log_tells_the_life_of_a_sandbox(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        await manager.connect(info.id, 300)
        await manager.set_timeout(info.id, 100)
        await manager.set_network(info.id, NetworkOptions())
        world.host.fail["capture"] = VmmError("no")
        with pytest.raises(VmmError):
            await manager.pause(info.id)
        world.host.fail.clear()
        entries = await manager.logs(info.id, LogQuery())
        assert [e.fields["event"] for e in entries] == ["created", "paused", "resumed", "updated", "updated"]
        await manager.kill(info.id)
        with pytest.raises(NotFoundError):
            await manager.logs(info.id, LogQuery())
        assert manager._life.telemetry.logs._rings == {}

    run(world, scenario)


def test_metrics_are_sampled_while_it_runs(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.metrics = dict(doubles.METRICS, mem_used=77)
        await manager._life.telemetry._sample_one(manager._sandboxes[info.id])
        point = (await manager.metrics(info.id, None, None))[-1]
        assert (point.mem_used, point.mem_total, point.cpu_used_pct) == (77, 100, 1.5)
        await manager.pause(info.id)
        before = await manager.metrics(info.id, None, None)
        await manager._life.telemetry._sample_one(manager._sandboxes[info.id])
        assert await manager.metrics(info.id, None, None) == before

    run(world, scenario)


def test_the_console_of_the_guest_is_in_the_log(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        assert sandbox.running is not None
        vm = cast(FakeVm, sandbox.running.vm)
        for fresh in (b"first\r\n\nsec", b"ond\n", b"\xff bytes\n", b"x" * 5000, b"\nlast\n"):
            vm.console += fresh
            await manager._life.telemetry._sample_one(sandbox)
        entries = await manager.logs(info.id, LogQuery())
        lines = [e.message for e in entries if e.fields["source"] == "console"]
        assert lines == ["first", "second", "\ufffd bytes", "x" * 5000, "last"]

    run(world, scenario)


HOSTILE_METRICS: list[dict[str, Any]] = [
    {"mem_used": 2**63},
    {"mem_used": 2**200},
    {"mem_used": -1},
    {"cpu_used_pct": "much"},
    {"cpu_count": None},
    {"extra": [[[]]]},
    {},
]


@pytest.mark.parametrize("hostile", HOSTILE_METRICS)
def test_what_one_guest_says_does_not_stop_the_metrics_of_others(world: World, hostile: dict[str, Any]) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        world.host.metrics = doubles.METRICS | hostile
        await manager._life.telemetry._sample_one(sandbox)
        world.host.metrics = dict(doubles.METRICS)
        await manager._life.telemetry._sample_one(sandbox)
        point = await manager.latest_metric(info.id)
        assert point is not None
        assert point.mem_used == 50

    run(world, scenario)


def test_metrics_of_a_guest_that_went_away_are_dropped(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        await until(
            lambda: manager._life.telemetry.metrics.latest(info.id) is not None or world.host.count["answer"] > 0
        )
        world.host.hold["answer"] = asyncio.Event()
        sampling = asyncio.create_task(manager._life.telemetry._sample_one(sandbox))
        world.host.reached.clear()
        await world.host.until("answer")
        await manager.kill(info.id)
        world.host.hold["answer"].set()
        await sampling
        assert manager._life.telemetry.metrics.latest(info.id) is None

    run(world, scenario)
