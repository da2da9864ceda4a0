"""The end of the daemon."""

from __future__ import annotations

import asyncio

import pytest

from aenv.errors import (
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.sandbox.manager import PAUSES_AT_STOP, Manager
from aenv.sandbox.service import OnTimeout, SandboxState
from tests.sandbox.world import (
    BASE,
    World,
    options,
    settled,
    until,
)

# The end of the daemon


def test_close_pauses_all_and_the_next_daemon_has_them(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            infos = [await manager.create(BASE) for _ in range(5)]
            await manager.pause(infos[0].id)
        assert world.host.alive == {}
        assert world.machines._prepared._closed
        async with world.daemon() as manager:
            found = {s.id: s.state for s in await manager.sandboxes()}
            assert found == {i.id: SandboxState.PAUSED for i in infos}
            for info in infos:
                assert (await manager.connect(info.id, 300))[1]

    asyncio.run(main())


def test_close_waits_for_what_is_under_way_and_refuses_new_work(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            paused = await manager.create(options(auto_resume=True))
            await manager.pause(paused.id)
            await settled(manager)
            world.host.reached.clear()
            world.host.hold["prepare"] = asyncio.Event()
            creating = asyncio.create_task(manager.create(BASE))
            await world.host.until("prepare")
            closing = asyncio.create_task(manager.close())
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError):
                await manager.create(BASE)
            with pytest.raises(UnavailableError):
                await manager.connect(paused.id, 300)
            with pytest.raises(NotFoundError):
                await manager.reach(paused.id)
            world.host.hold["prepare"].set()
            info = await creating
            await closing
            assert world.host.alive == {}
            assert manager._sandboxes[info.id].state is SandboxState.PAUSED

    asyncio.run(main())


def test_a_timer_that_fires_while_the_daemon_stops_costs_no_sandbox(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            infos = [await manager.create(options(on_timeout=OnTimeout.PAUSE)) for _ in range(3)]
            world.host.hold["capture"] = asyncio.Event()
            closing = asyncio.create_task(manager.close())
            await world.host.until("capture")
            for info in infos:
                manager._life._expire(manager._sandboxes[info.id])
            await asyncio.sleep(0)
            world.host.hold["capture"].set()
            await closing
            assert {s.state for s in manager._sandboxes.values()} == {SandboxState.PAUSED}
            assert len(manager._sandboxes) == 3

    asyncio.run(main())


def test_an_automatic_pause_that_is_first_when_the_daemon_stops_costs_no_sandbox(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            for _ in range(PAUSES_AT_STOP):  # they keep the stop busy, so that the timer of the last one is first
                await manager.create(BASE)
            slow = await manager.create(options(on_timeout=OnTimeout.PAUSE, pause_memory=False))
            await settled(manager)
            world.host.hold = {"capture": asyncio.Event(), "answer": asyncio.Event()}
            closing = asyncio.create_task(manager.close())
            await world.host.until("capture")
            world.host.reached.clear()
            manager._life._expire(manager._sandboxes[slow.id])
            await world.host.until("answer")  # it asks for the guest's health, and is still running
            world.host.hold["capture"].set()
            await until(lambda: waiting(manager, slow.id) == 1)
            world.host.hold["answer"].set()
            await closing
            assert manager._sandboxes[slow.id].state is SandboxState.PAUSED

    asyncio.run(main())


def waiting(manager: Manager, sandbox_id: str) -> int:
    """How many operations wait for a sandbox's lock."""
    return len(manager._sandboxes[sandbox_id].lock._waiters or ())


@pytest.mark.parametrize("error", [VmmError("no"), OSError(28, "No space left on device")])
def test_a_pause_that_fails_at_the_stop_ends_that_sandbox_only(world: World, error: Exception) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            await manager.create(BASE)
            world.host.fail["capture"] = error
        assert world.host.alive == {}
        assert world.machines._prepared._closed
        world.host.fail.clear()
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.folders() == set()

    asyncio.run(main())
