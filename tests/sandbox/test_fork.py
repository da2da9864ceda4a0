"""Forks: one capture, many children."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from aenv.errors import (
    AenvError,
    ConflictError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import ForkFailure, NetworkOptions, OnTimeout, SandboxInfo, SandboxState
from tests.sandbox.world import BASE, World, gone, options, read, run, settled, slot_of, vm_of, write

ONE = ({"a": "1"}, {"a": "1"})


def started(children: Sequence[SandboxInfo | ForkFailure]) -> list[SandboxInfo]:
    return [child for child in children if isinstance(child, SandboxInfo)]


def failures(children: Sequence[SandboxInfo | ForkFailure]) -> list[AenvError]:
    return [child.error for child in children if isinstance(child, ForkFailure)]


def test_children_begin_where_the_source_is_and_go_their_own_ways(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        asked = options(
            env={"A": "1"}, metadata={"user": "7"}, on_timeout=OnTimeout.PAUSE, auto_resume=True,
            network=NetworkOptions(deny_out=("8.8.4.4",), allow_public_traffic=False),
        )  # fmt: skip
        source = await manager.create(asked)
        write(manager, source.id, a="1")
        children = started(await manager.fork(source.id, 4, 60))
        assert len({child.id for child in children} | {source.id}) == 5
        assert world.host.count["capture"] == 1
        for child in children:
            assert read(manager, child.id) == ONE
            assert (child.metadata, child.on_timeout, child.auto_resume) == ({"user": "7"}, OnTimeout.PAUSE, True)
            assert child.network == source.network
            assert "8.8.4.4" in slot_of(manager, child.id).policy.deny
            assert 55 <= (child.end_at - child.started_at).total_seconds() <= 61
            assert child.traffic_token == world.tokens.traffic(child.id) != source.traffic_token
            (init,) = slot_of(manager, child.id).inits
            assert init["envVars"] == {"A": "1"}
        inits = [slot_of(manager, i.id).inits[0] for i in (source, *children)]
        for name in ("entropy", "lifecycleID", "accessToken"):
            assert len({init[name] for init in inits}) == 5
        assert len({init.get("machineId", init.get("machineID")) for init in inits}) == 5
        for number, child in enumerate(children):
            write(manager, child.id, a=f"child {number}")
        assert read(manager, source.id) == ONE
        await manager.kill(source.id)
        for number, child in enumerate(children):
            await manager.pause(child.id)
            await manager.connect(child.id, 300)
            assert read(manager, child.id) == ({"a": f"child {number}"},) * 2
        assert await manager.snapshots() == []

    run(world, scenario)


def test_children_can_do_what_any_sandbox_can(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        (child,) = started(await manager.fork(source.id, 1, 300))
        write(manager, child.id, b="2")
        both = ({"a": "1", "b": "2"},) * 2
        (grandchild,) = started(await manager.fork(child.id, 1, 300))
        assert read(manager, grandchild.id) == both
        snapshot = await manager.snapshot(grandchild.id)
        assert snapshot.parent_id == world.template.id  # sandboxes are no parents of snapshots
        write(manager, grandchild.id, a="x")
        await manager.rollback(grandchild.id, snapshot.id)
        assert read(manager, grandchild.id) == both
        assert manager._sandboxes[grandchild.id].record.lineage == [snapshot.id, child.id, source.id, world.template.id]

    run(world, scenario)


def test_some_children_fail_and_the_others_do_not_notice(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        for error in (VmmError("broken"), OSError(28, "No space left on device")):
            world.host.error = error
            fork = asyncio.ensure_future(manager.fork(source.id, 4, 300))
            world.host.reached.pop("prepare", None)
            await world.host.until("prepare")
            world.host.fail_at = 3
            children = await fork
            (failed,) = failures(children)
            assert isinstance(failed, VmmError)
            assert "broken" in failed.message or "No space" in failed.message
            assert all(read(manager, child.id) == ONE for child in started(children))
            assert len(started(children)) == 3

    run(world, scenario)


@pytest.mark.parametrize("step", ["prepare", "open image", "map", "load", "resume", "slot", "create layer"])
def test_when_all_children_fail_the_source_goes_on(world: World, step: str) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        forking = asyncio.ensure_future(manager.fork(source.id, 3, 300))
        if step == "resume":  # that of the source comes first
            world.host.reached.pop("prepare", None)
            await world.host.until("prepare")
        world.host.fail[step] = VmmError("no")
        children = await forking
        world.host.fail.clear()
        assert len(failures(children)) == 3
        assert [s.id for s in await manager.sandboxes()] == [source.id]
        assert vm_of(manager, source.id).runs
        assert read(manager, source.id) == ONE
        assert len(started(await manager.fork(source.id, 1, 300))) == 1

    run(world, scenario)


@pytest.mark.parametrize("step", ["capture", "collect", "restack", "save"])
def test_a_fork_whose_capture_fails_makes_no_child(world: World, step: str) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        world.host.fail[step] = VmmError("no")
        with pytest.raises(VmmError):
            await manager.fork(source.id, 3, 300)
        world.host.fail.clear()
        assert [s.id for s in await manager.sandboxes()] == [source.id]
        (child,) = started(await manager.fork(source.id, 1, 300))
        assert read(manager, child.id) == ONE

    run(world, scenario)


def test_the_source_is_free_while_its_children_start(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        world.host.hold["prepare"] = asyncio.Event()
        world.host.reached.clear()
        forking = asyncio.ensure_future(manager.fork(source.id, 2, 300))
        await world.host.until("prepare")
        assert not manager._sandboxes[source.id].lock.locked()
        assert (await manager.get(source.id)).state is SandboxState.RUNNING
        write(manager, source.id, a="2")
        await manager.snapshot(source.id)
        await manager.set_network(source.id, NetworkOptions())
        await manager.pause(source.id)
        world.host.hold.pop("prepare").set()
        children = started(await forking)
        assert [read(manager, child.id) for child in children] == [ONE, ONE]
        await manager.connect(source.id, 300)
        assert read(manager, source.id) == ({"a": "2"},) * 2

    run(world, scenario)


@pytest.mark.parametrize("moment", ["capture", "restack", "rehome", "prepare", "load", "answer"])
def test_a_source_that_is_killed_in_the_middle(world: World, moment: str) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        world.host.reached.clear()
        world.host.hold[moment] = asyncio.Event()
        forking = asyncio.ensure_future(manager.fork(source.id, 3, 300))
        await world.host.until(moment)
        killing = asyncio.ensure_future(manager.kill(source.id))
        await asyncio.sleep(0)
        captured = moment in ("prepare", "load", "answer")
        if captured:
            await killing
        world.host.hold.pop(moment).set()
        (children,) = await asyncio.gather(forking, return_exceptions=True)
        await killing
        assert await gone(manager, source.id)
        if captured:
            assert not isinstance(children, BaseException)
            assert [read(manager, child.id) for child in started(children)] == [ONE] * 3
        else:
            assert isinstance(children, NotFoundError)
            assert await manager.sandboxes() == []
        assert set(manager._life.telemetry.logs._rings) == set(manager._sandboxes)

    run(world, scenario)


def test_a_child_can_be_killed_while_it_starts(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.reached.clear()
        world.host.hold["load"] = asyncio.Event()
        forking = asyncio.ensure_future(manager.fork(source.id, 3, 300))
        await world.host.until("load")
        doomed = next(i for i in manager._sandboxes if i != source.id)
        killing = asyncio.ensure_future(manager.kill(doomed))
        await asyncio.sleep(0)
        world.host.hold.pop("load").set()
        children = await forking
        await killing
        (failed,) = failures(children)
        assert isinstance(failed, NotFoundError)
        assert len(started(children)) == 2

    run(world, scenario)


def test_how_many(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"sandbox.fork_limit": 5, "sandbox.max": 7})

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        for count, error in ((0, InvalidInputError), (-1, InvalidInputError), (6, LimitError)):
            with pytest.raises(error):
                await manager.fork(source.id, count, 300)
        with pytest.raises(InvalidInputError):
            await manager.fork(source.id, 1, 0)
        assert len(started(await manager.fork(source.id, 5, 300))) == 5
        with pytest.raises(LimitError):
            await manager.fork(source.id, 2, 300)
        assert world.host.count["capture"] == 1

    run(world, scenario)
    world.clear()


def test_two_forks_at_once_share_the_room(tmp_path: Path) -> None:
    """Each had room for all of its children when it began."""
    world = World(tmp_path / "home", **{"sandbox.max": 6})

    async def scenario(manager: Manager) -> None:
        first, second = await manager.create(BASE), await manager.create(BASE)
        both = await asyncio.gather(*(manager.fork(source.id, 3, 300) for source in (first, second)))
        children = [child for fork in both for child in fork]
        assert len(started(children)) == 4
        assert {type(error) for error in failures(children)} == {LimitError}
        assert len(await manager.sandboxes()) == 6

    run(world, scenario)
    world.clear()


def test_who_cannot_be_forked(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        await manager.pause(source.id)
        with pytest.raises(ConflictError):
            await manager.fork(source.id, 1, 300)
        with pytest.raises(NotFoundError):
            await manager.fork("nobody", 1, 300)

    run(world, scenario)


def test_a_pause_that_was_first_is_the_end_of_a_fork(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.hold["capture"] = asyncio.Event()
        pausing = asyncio.ensure_future(manager.pause(source.id))
        await world.host.until("capture")
        manager._sandboxes[source.id].record.state = SandboxState.RUNNING  # as it was a moment ago
        forking = asyncio.ensure_future(manager.fork(source.id, 1, 300))
        await asyncio.sleep(0)
        manager._sandboxes[source.id].record.state = SandboxState.PAUSING
        world.host.hold.pop("capture").set()
        await pausing
        with pytest.raises(ConflictError):
            await forking
        assert [s.state for s in await manager.sandboxes()] == [SandboxState.PAUSED]

    run(world, scenario)


def test_the_layer_that_a_fork_froze_is_sealed_afterwards(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.fork(source.id, 2, 300)
        await settled(manager)
        assert world.host.blocks.frozen == {}
        (folder,) = (world.home.sandboxes / source.id,)
        upper = manager._sandboxes[source.id].record.upper
        assert [path.stem for path in folder.glob("*.index")] == [Path(str(upper)).stem]

    run(world, scenario)


def test_what_a_fork_did_not_wait_for_is_durable_with_the_next_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()

    async def sync(state: Path, layer: Path) -> None:
        synced.update((state.name, layer.name))

    async def scenario(manager: Manager) -> None:
        monkeypatch.setattr("aenv.sandbox.machines.sync_capture", sync)
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        (child,) = started(await manager.fork(source.id, 1, 300))
        for info in (source, child):
            synced.clear()
            await manager.pause(info.id)
            await settled(manager)
            record = manager._sandboxes[info.id].record
            assert len(record.memory) == 3
            assert synced == {*record.memory, record.state_file}

    run(world, scenario)


def test_a_daemon_that_stops_starts_no_more_children(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            source = await manager.create(BASE)
            world.host.hold["capture"] = asyncio.Event()
            forking = asyncio.ensure_future(manager.fork(source.id, 2, 300))
            await world.host.until("capture")
            closing = asyncio.ensure_future(manager.close())
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError):
                await manager.fork(source.id, 1, 300)
            world.host.hold.pop("capture").set()
            children = await forking
            assert {type(error) for error in failures(children)} == {UnavailableError}
            await closing
            assert {s.state for s in manager._sandboxes.values()} == {SandboxState.PAUSED}
        assert world.host.alive == {}

    asyncio.run(main())
