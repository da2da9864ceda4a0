"""Machines of paused sandboxes that wait for a resume that comes soon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from aenv.errors import GuestError, VmmError
from aenv.sandbox import parking
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import SandboxState
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeVm
from tests.sandbox.world import BASE, World, quiet, read, run, settled, until, vm_of, write


async def paused(manager: Manager, **values: str) -> str:
    info = await manager.create(BASE)
    write(manager, info.id, **values)
    await manager.pause(info.id)
    return info.id


def parked_vm(manager: Manager, sandbox_id: str) -> FakeVm | None:
    running = manager._sandboxes[sandbox_id].parked
    return None if running is None else cast(FakeVm, running.vm)


async def resumed(manager: Manager, sandbox_id: str, **values: str) -> None:
    assert (await manager.connect(sandbox_id, 300))[1]
    assert read(manager, sandbox_id) == (values, values)


def test_a_resume_goes_on_in_the_same_process(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        vm = vm_of(manager, info.id)
        for turn in range(12):
            write(manager, info.id, a=str(turn))
            await manager.pause(info.id)
            if turn % 2:
                await settled(manager)
                quiet(world, manager)
            assert (await manager.get(info.id)).state is SandboxState.PAUSED
            await resumed(manager, info.id, a=str(turn))
            assert vm_of(manager, info.id) is vm
        await settled(manager)
        assert len(world.files(info.id)) < 30, "chains stay short"
        assert world.host.count["started"] == 1

    run(world, scenario)


def test_connections_of_before_are_dropped(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        before = manager._sandboxes[info.id].running
        assert before is not None
        await manager.pause(info.id)
        assert before.closed.done()
        await resumed(manager, info.id)
        after = manager._sandboxes[info.id].running
        assert after is not None
        assert not after.closed.done()
        assert after.incarnation != before.incarnation

    run(world, scenario)


def test_the_longest_parked_makes_room(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"vmm.parked": 2})

    async def scenario(manager: Manager) -> None:
        ids = [await paused(manager, a=str(number)) for number in range(4)]
        await settled(manager)
        assert [parked_vm(manager, i) is not None for i in ids] == [False, False, True, True]
        assert len(world.host.alive) == 2
        quiet(world, manager)
        for number, sandbox_id in enumerate(ids):
            await resumed(manager, sandbox_id, a=str(number))

    run(world, scenario)


def test_its_time_ends(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"vmm.parked_time": 1})

    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        assert world.host.alive
        await until(lambda: not world.host.alive)
        await settled(manager)
        quiet(world, manager)
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


def test_a_death_that_nobody_has_noticed_costs_nothing(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        await settled(manager)
        vm = parked_vm(manager, sandbox_id)
        assert vm is not None
        world.host.reached.clear()
        world.host.hold["resume"] = asyncio.Event()
        resuming = asyncio.create_task(manager.connect(sandbox_id, 300))
        await world.host.until("resume")
        vm.die()
        world.host.hold.pop("resume").set()
        assert (await resuming)[1]
        assert read(manager, sandbox_id) == ({"a": "1"}, {"a": "1"})
        assert vm_of(manager, sandbox_id) is not vm

    run(world, scenario)


@pytest.mark.parametrize("at_once", [True, False])
def test_its_death_costs_nothing(world: World, at_once: bool) -> None:
    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        vm = parked_vm(manager, sandbox_id)
        assert vm is not None
        vm.die()
        if not at_once:
            await settled(manager)
            assert world.host.alive == {}, "its slot is free again"
            quiet(world, manager)
        await resumed(manager, sandbox_id, a="1")
        assert vm_of(manager, sandbox_id) is not vm

    run(world, scenario)


@pytest.mark.parametrize(("error", "stays"), [(VmmError("half mapped"), False), (OSError(28, "no space"), True)])
def test_it_stays_if_it_is_whole(world: World, error: Exception, stays: bool) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.fail["rehome"] = error
        sandbox_id = await paused(manager, a="1")
        await settled(manager)
        assert (parked_vm(manager, sandbox_id) is not None) == stays
        world.host.fail.clear()
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


def test_one_that_has_written_much_is_not_parked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "CAPTURED_LIMIT", 4096)

    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        await settled(manager)
        assert world.host.alive == {}
        quiet(world, manager)
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


@pytest.mark.parametrize("moment", ["resume", "answer"])
def test_a_resume_that_fails_is_made_up_for_from_the_files(tmp_path: Path, moment: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def misbehaves(slot: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if slot.vm.runs:
            slot.vm.write("a", "wrong")
            slot.vm.write_disk("a", "wrong")
        await doubles.silent(slot, reader, writer)

    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        if moment == "answer":
            world.host.guest = misbehaves
        else:
            world.host.fail["resume"] = VmmError("no")
        with pytest.raises((VmmError, GuestError)):
            await manager.connect(sandbox_id, 300)
        world.host.guest = doubles.healthy
        world.host.fail.clear()
        await settled(manager)
        quiet(world, manager)
        assert manager._sandboxes[sandbox_id].record.unsettled is None, "its pause is durable all the same"
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


def test_a_resume_does_not_wait_for_the_disk(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.hold["seal"] = asyncio.Event()
        sandbox_id = await paused(manager, a="1")
        await world.host.until("seal")
        await resumed(manager, sandbox_id, a="1")
        write(manager, sandbox_id, a="2")
        await manager.pause(sandbox_id)  # nor does the next pause
        world.host.hold.pop("seal").set()
        await settled(manager)
        quiet(world, manager)
        assert manager._sandboxes[sandbox_id].record.unsettled is None
        await resumed(manager, sandbox_id, a="2")

    run(world, scenario)


def test_what_needs_the_files_waits_for_them(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.hold["seal"] = asyncio.Event()
        sandbox_id = await paused(manager, a="1")
        await world.host.until("seal")
        world.host.reached.clear()
        other = await paused(manager, b="1")
        await world.host.until("seal")
        snapshot = asyncio.create_task(manager.snapshot(sandbox_id))
        killing = asyncio.create_task(manager.kill(other))
        await asyncio.sleep(0.01)
        assert not snapshot.done()
        assert not killing.done()
        world.host.hold.pop("seal").set()
        await killing
        assert (await snapshot).sandbox_id == sandbox_id
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


def test_a_boot_from_the_disk_does_without_it(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        await manager.connect(sandbox_id, 300, memory=False)
        assert read(manager, sandbox_id) == ({}, {"a": "1"})

    run(world, scenario)


def test_it_ends_with_the_block_server(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        sandbox_id = await paused(manager, a="1")
        await settled(manager)
        manager.blocks_restarted(True)
        assert parked_vm(manager, sandbox_id) is not None
        manager.blocks_restarted(False)
        await settled(manager)
        assert world.host.alive == {}
        await resumed(manager, sandbox_id, a="1")

    run(world, scenario)


def test_a_daemon_that_stops_leaves_none(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            sandbox_id = await paused(manager, a="1")
        assert world.host.alive == {}
        async with world.daemon() as manager:
            await resumed(manager, sandbox_id, a="1")

    asyncio.run(main())
