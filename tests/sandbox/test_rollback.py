"""Rollback: the same sandbox, as it was."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from aenv.errors import AenvError, ConflictError, GuestError, NotFoundError, UnavailableError, VmmError
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import NetworkOptions, PauseMode, SandboxState
from tests.sandbox import doubles
from tests.sandbox.world import (
    BASE,
    World,
    gone,
    options,
    quiet,
    read,
    run,
    running_of,
    settled,
    slot_of,
    until,
    vm_of,
    write,
)

ONE = ({"a": "1"}, {"a": "1"})


@pytest.mark.parametrize("paused", [False, True])
def test_back_to_a_snapshot_in_place(world: World, paused: bool) -> None:
    async def scenario(manager: Manager) -> None:
        asked = options(network=NetworkOptions(deny_out=("8.8.4.4",)), metadata={"user": "7"}, timeout=200)
        source = await manager.create(asked)
        write(manager, source.id, a="1")
        await manager.snapshot(source.id, name="s")
        machine_id = manager._sandboxes[source.id].record.machine_id
        write(manager, source.id, a="2", b="2")
        before = running_of(manager, source.id)
        if paused:
            await manager.pause(source.id)
        back = await manager.rollback(source.id, "s")
        assert back.state is SandboxState.RUNNING
        assert (back.id, back.envd_token, back.metadata) == (source.id, source.envd_token, {"user": "7"})
        assert 190 <= (back.end_at - back.started_at).total_seconds() <= 210
        assert read(manager, source.id) == ONE
        assert before.closed.done()
        assert running_of(manager, source.id).incarnation != before.incarnation
        assert before.vm.exited.done()
        assert "8.8.4.4" in slot_of(manager, source.id).policy.deny
        assert manager._sandboxes[source.id].record.machine_id == machine_id
        for _ in range(2):  # and again, from where it is
            write(manager, source.id, a="3")
            await manager.rollback(source.id, "s")
            assert read(manager, source.id) == ONE

    run(world, scenario)


def test_any_of_its_snapshots_and_what_it_was_made_from(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        contents = {}
        for number in range(3):
            write(manager, source.id, a=str(number))
            contents[f"s{number}"] = read(manager, source.id)
            await manager.snapshot(source.id, name=f"s{number}")
        for name in ("s0", "s2", "s1", "s2"):  # a snapshot of a future that was given up is its own, too
            await manager.rollback(source.id, name)
            assert read(manager, source.id) == contents[name]
        await manager.rollback(source.id, "base")
        assert read(manager, source.id) == ({}, {})
        child = await manager.create(options(template="s1"))
        write(manager, child.id, a="child")
        for name in ("s1", "s0", "s1"):
            await manager.rollback(child.id, name)
            assert read(manager, child.id) == contents[name]

    run(world, scenario)


def test_lineage_follows(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        one, two, three = [(await manager.snapshot(source.id)).id for _ in range(3)]
        record = manager._sandboxes[source.id].record
        assert record.lineage == [three, two, one, world.template.id]
        await manager.rollback(source.id, two)
        assert record.lineage == [two, one, world.template.id]
        await manager.rollback(source.id, three)
        assert record.lineage == [three, two, one, world.template.id]
        await manager.rollback(source.id, one)
        await manager.rollback(source.id, three)  # over one that is between
        assert record.lineage == [three, two, one, world.template.id]
        await manager.rollback(source.id, one)
        four = await manager.snapshot(source.id)
        assert four.parent_id == one
        await manager.delete_template(two)
        await manager.rollback(source.id, three)
        assert record.lineage == [three, two, world.template.id]

    run(world, scenario)


def test_to_a_snapshot_without_memory_it_boots(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.snapshot(source.id, name="s", memory=False)
        write(manager, source.id, a="2")
        await manager.rollback(source.id, "s")
        assert read(manager, source.id) == ({}, {"a": "1"})

    run(world, scenario)


def test_what_is_refused_changes_nothing(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source, other = await manager.create(BASE), await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.snapshot(other.id, name="foreign")
        before = running_of(manager, source.id)
        for snapshot, error in (("foreign", ConflictError), ("nothing", NotFoundError)):
            with pytest.raises(error):
                await manager.rollback(source.id, snapshot)
        with pytest.raises(NotFoundError):
            await manager.rollback("nobody", "foreign")
        assert running_of(manager, source.id) is before
        assert not before.closed.done()
        assert read(manager, source.id) == ONE

    run(world, scenario)


def test_a_snapshot_that_is_deleted_just_now_is_not_found(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.snapshot(source.id, name="s")
        snapshot = world.repository.find("s")
        world.host.hold["capture"] = asyncio.Event()
        blocking = asyncio.ensure_future(manager.snapshot(source.id))
        await world.host.until("capture")
        rolling = asyncio.ensure_future(manager.rollback(source.id, "s"))
        await asyncio.sleep(0)
        shutil.rmtree(snapshot.directory)
        world.host.hold.pop("capture").set()
        await blocking
        with pytest.raises(NotFoundError):
            await rolling
        assert vm_of(manager, source.id).runs
        assert read(manager, source.id) == ONE

    run(world, scenario)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("step", ["prepare", "open image", "map", "load", "resume", "answer"])
def test_when_it_cannot_be_resumed_it_is_paused_at_the_snapshot(world: World, step: str, paused: bool) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.snapshot(source.id, name="s")
        write(manager, source.id, a="2")
        if paused:
            await manager.pause(source.id)
            await settled(manager)
        if step == "answer":
            world.host.guest = doubles.silent
            rolling = asyncio.ensure_future(manager.rollback(source.id, "s"))
            await until(lambda: bool(world.host.servers))
            newest = max(world.host.alive)
            world.host.alive[newest][0].die("out of memory")
            with pytest.raises(GuestError):
                await rolling
            world.host.guest = doubles.healthy
        else:
            world.host.fail[step] = VmmError("no")
            with pytest.raises(VmmError):
                await manager.rollback(source.id, "s")
            world.host.fail.clear()
        await settled(manager)
        info = await manager.get(source.id)
        assert (info.state, info.pause_mode) == (SandboxState.PAUSED, PauseMode.FULL)
        assert world.host.alive == {}  # the machine of before has ended, too
        quiet(world, manager)
        await manager.connect(source.id, 300)
        assert read(manager, source.id) == ONE

    run(world, scenario)


@pytest.mark.parametrize("moment", ["prepare", "load", "answer", "kill"])
def test_a_kill_during_a_rollback_ends_it(world: World, moment: str) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        await manager.snapshot(source.id, name="s")
        world.host.reached.clear()
        world.host.hold[moment] = asyncio.Event()
        rolling = asyncio.ensure_future(manager.rollback(source.id, "s"))
        await world.host.until(moment)
        killing = asyncio.ensure_future(manager.kill(source.id))
        await asyncio.sleep(0)
        world.host.hold.pop(moment).set()
        with pytest.raises(AenvError):
            await rolling
        await killing
        assert await gone(manager, source.id)
        assert world.host.alive == {}
        assert [s.names for s in await manager.snapshots()] == [("s",)]

    run(world, scenario)


def test_a_daemon_that_stops_rolls_nothing_back(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            source, other = await manager.create(BASE), await manager.create(BASE)
            await manager.snapshot(source.id, name="s")
            world.host.hold["capture"] = asyncio.Event()
            world.host.reached.clear()
            blocking = asyncio.ensure_future(manager.snapshot(other.id))
            await world.host.until("capture")
            closing = asyncio.ensure_future(manager.close())
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError):
                await manager.rollback(source.id, "s")
            world.host.hold.pop("capture").set()
            await blocking
            await closing
            assert {s.state for s in manager._sandboxes.values()} == {SandboxState.PAUSED}
        assert world.host.alive == {}

    asyncio.run(main())


def test_the_guest_of_before_has_no_say_any_more(world: World) -> None:
    """Its death is nobody's loss, and the time that was left goes on."""

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        await manager.snapshot(source.id, name="s")
        await manager.set_timeout(source.id, 100)
        end = (await manager.get(source.id)).end_at
        old = vm_of(manager, source.id)
        world.host.hold["kill"] = asyncio.Event()
        rolling = asyncio.ensure_future(manager.rollback(source.id, "s"))
        await world.host.until("kill")
        old.die()
        world.host.hold.pop("kill").set()
        back = await rolling
        assert abs((back.end_at - end).total_seconds()) < 5
        await settled(manager)
        assert vm_of(manager, source.id).runs

    run(world, scenario)
