"""Snapshots: what a sandbox was at one moment, for others to start from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv.errors import ConflictError, InvalidInputError, LimitError, NotFoundError, UnavailableError, VmmError
from aenv.observe.logs import LogQuery
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import PauseMode, SandboxState
from aenv.sandbox.snapshots import LINEAGE
from aenv.snapshot.manifest import SnapshotKind
from tests.sandbox.world import BASE, World, gone, options, read, run, settled, until, vm_of, write

ONE = ({"a": "1"}, {"a": "1"})
DISK_FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("paused", [False, True])
def test_a_sandbox_from_a_snapshot_has_what_its_source_had_then(world: World, paused: bool) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        if paused:
            await manager.pause(source.id)
        snapshot = await manager.snapshot(source.id, name="first")
        assert (snapshot.names, snapshot.sandbox_id, snapshot.parent_id) == (("first",), source.id, world.template.id)
        assert snapshot.memory
        if paused:
            assert (await manager.get(source.id)).state is SandboxState.PAUSED
            await manager.connect(source.id, 300)
        assert vm_of(manager, source.id).runs
        write(manager, source.id, a="2", b="2")
        child = await manager.create(options(template="first"))
        assert read(manager, child.id) == ONE
        assert read(manager, source.id) == ({"a": "2", "b": "2"},) * 2
        assert child.template_id == snapshot.id
        write(manager, child.id, a="3")
        assert read(manager, source.id) == ({"a": "2", "b": "2"},) * 2
        assert await manager.snapshots() == [snapshot]

    run(world, scenario)


@pytest.mark.parametrize("paused", [False, True])
def test_a_snapshot_without_memory_boots(world: World, paused: bool) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        if paused:
            await manager.pause(source.id)
        snapshot = await manager.snapshot(source.id, memory=False)
        assert not snapshot.memory
        assert snapshot.memory_bytes == 0
        assert world.host.count["sync"] == (not paused)  # while the guest could still write
        assert world.host.count["vm.pause"] == paused  # that of the pause: a guest that runs is not stopped
        child = await manager.create(options(template=snapshot.id))
        assert world.host.count["boot"] == 1
        assert read(manager, child.id) == ({}, {"a": "1"})
        write(manager, child.id, b="2")
        grandchild = await manager.create(options(template=(await manager.snapshot(child.id)).id))
        assert read(manager, grandchild.id) == ({"b": "2"}, {"a": "1", "b": "2"})
        await manager.connect(source.id, 300)
        assert read(manager, source.id) == ONE

    run(world, scenario)


def test_a_snapshot_of_a_disk_only_pause_has_no_memory(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        await manager.pause(source.id, memory=False)
        snapshot = await manager.snapshot(source.id)
        assert not snapshot.memory
        assert (await manager.get(source.id)).pause_mode is PauseMode.FILESYSTEM

    run(world, scenario)


def test_many_snapshots_of_one_sandbox_keep_their_own_content(world: World) -> None:
    """Some of what it writes goes back to what it was in an earlier layer, and chains are merged in between."""

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        expected = []
        for number in range(14):
            write(manager, source.id, **{f"k{number % 5}": str(number), "flips": str(number % 2), "stays": "same"})
            await manager.snapshot(source.id, name=f"s{number}")
            expected.append(read(manager, source.id))
            await settled(manager)
        assert len(manager._sandboxes[source.id].record.memory) < 14
        for number in (0, 1, 6, 7, 12, 13):
            child = await manager.create(options(template=f"s{number}"))
            assert read(manager, child.id) == expected[number]
        assert read(manager, source.id) == expected[-1]

    run(world, scenario)


def test_names_move_and_those_of_templates_are_refused(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        captures = world.host.count["capture"]
        for name, error in (("base", ConflictError), ("base:default", ConflictError), ("../x", InvalidInputError)):
            with pytest.raises(error):
                await manager.snapshot(source.id, name=name)
        assert world.host.count["capture"] == captures  # before anything was done
        old = await manager.snapshot(source.id, name="mine:v1")
        write(manager, source.id, a="1")
        new = await manager.snapshot(source.id, name="mine:v1")
        assert {s.id: s.names for s in await manager.snapshots()} == {old.id: (), new.id: ("mine:v1",)}
        assert read(manager, (await manager.create(options(template="mine:v1"))).id) == ONE
        assert read(manager, (await manager.create(options(template=old.id))).id) == ({}, {})
        assert [t.names for t in await manager.templates()] == [("base",)]

    run(world, scenario)


def test_a_name_that_a_template_got_meanwhile_is_refused_and_nothing_is_left(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        world.host.hold["capture"] = asyncio.Event()
        taking = asyncio.create_task(manager.snapshot(source.id, name="late"))
        await world.host.until("capture")
        with world.repository._changing_names() as names:
            names["late"] = world.template.id
        world.host.hold["capture"].set()
        with pytest.raises(ConflictError, match="late"):
            await taking
        assert await manager.snapshots() == []
        assert read(manager, source.id) == ONE
        await manager.snapshot(source.id, name="other")

    run(world, scenario)


def test_the_chain_of_parents(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        first = await manager.snapshot(source.id)
        second = await manager.snapshot(source.id)
        assert second.parent_id == first.id
        child = await manager.create(options(template=second.id))
        third = await manager.snapshot(child.id)
        assert (third.parent_id, third.sandbox_id) == (second.id, child.id)
        await manager.delete_template(third.id)
        await manager.delete_template(second.id)
        fourth = await manager.snapshot(child.id)  # the parent is the nearest that is there
        assert fourth.parent_id == first.id
        assert (await manager.snapshot(source.id)).parent_id == first.id
        assert manager._sandboxes[child.id].record.lineage == [
            fourth.id, third.id, second.id, first.id,
        ]  # fmt: skip

    run(world, scenario)


def test_a_record_remembers_so_many_ancestors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LINEAGE == 64
    for module in ("snapshots", "lifecycle"):
        monkeypatch.setattr(f"aenv.sandbox.{module}.LINEAGE", 3)

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        ids = [(await manager.snapshot(source.id)).id for _ in range(5)]
        assert manager._sandboxes[source.id].record.lineage == ids[:1:-1]
        (child,) = await manager.fork(source.id, 1, 300)
        assert manager._sandboxes[child.id].record.lineage == [source.id, *ids[:2:-1]]  # type: ignore[union-attr]

    run(world, scenario)


def test_a_snapshot_can_be_deleted_while_it_is_in_use(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        snapshot = await manager.snapshot(source.id, name="s")
        running, paused = [await manager.create(options(template="s")) for _ in range(2)]
        await manager.pause(paused.id)
        await manager.delete_template("s")
        for name in ("s", snapshot.id):
            with pytest.raises(NotFoundError):
                await manager.create(options(template=name))
        assert await manager.snapshots() == []
        await manager.connect(paused.id, 300)
        for info in (source, running, paused):
            assert read(manager, info.id) == ONE
            await manager.pause(info.id)
            await manager.connect(info.id, 300)
            assert read(manager, info.id) == ONE
        later = await manager.snapshot(running.id)
        assert read(manager, (await manager.create(options(template=later.id))).id) == ONE

    run(world, scenario)


def test_a_snapshot_that_is_deleted_while_a_sandbox_starts_from_it(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        for number, moment in enumerate(("create layer", "prepare")):
            await manager.snapshot(source.id, name="s")
            world.host.reached.clear()
            world.host.hold[moment] = asyncio.Event()
            creating = asyncio.ensure_future(manager.create(options(template="s")))
            await world.host.until(moment)
            await manager.delete_template("s")
            world.host.hold.pop(moment).set()
            child = await creating  # it has links to all it needs
            assert read(manager, child.id) == ONE
            assert len(await manager.sandboxes()) == number + 2
        await manager.snapshot(source.id, name="s")
        creating = asyncio.ensure_future(manager.create(options(template="s")))
        await asyncio.sleep(0)  # it is found, and nothing of it is linked
        world.repository.delete("s")
        with pytest.raises(NotFoundError):
            await creating

    run(world, scenario)


def test_sandboxes_of_a_deleted_snapshot_are_there_after_a_restart(world: World) -> None:
    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            source = await manager.create(BASE)
            write(manager, source.id, a="1")
            await manager.snapshot(source.id, name="s")
            child = await manager.create(options(template="s"))
            await manager.delete_template("s")
            await settled(manager)
        async with world.daemon() as manager:
            assert read(manager, child.id) == ONE
            await manager.pause(child.id)
        async with world.daemon() as manager:
            await manager.connect(child.id, 300)
            assert read(manager, child.id) == ONE

    asyncio.run(main())


@pytest.mark.parametrize("error", [VmmError("no"), UnavailableError("no"), DISK_FULL])
@pytest.mark.parametrize("step", ["capture", "vm.pause", "save", "collect", "restack", "rehome", "seal"])
def test_a_snapshot_that_fails_leaves_the_guest_running_or_ends_it(world: World, step: str, error: Exception) -> None:
    """And no snapshot, and nothing else. Only a machine that may be half mapped is ended."""
    fatal = step == "rehome" and isinstance(error, VmmError)
    ignored = step == "rehome" and not fatal

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="0", b="0", c="0")
        await manager.snapshot(source.id, name="before")
        write(manager, source.id, a="1", b="1")
        world.host.fail[step] = error
        if ignored:
            await manager.snapshot(source.id)
        else:
            with pytest.raises((VmmError, type(error))):
                await manager.snapshot(source.id)
        world.host.fail.clear()
        assert len(await manager.snapshots()) == 1 + ignored
        if fatal:
            assert await gone(manager, source.id)
            return
        assert (await manager.get(source.id)).state is SandboxState.RUNNING
        write(manager, source.id, a="0")  # what an earlier layer says
        expected = {"a": "0", "b": "1", "c": "0"}
        for _ in range(2):
            snapshot = await manager.snapshot(source.id)
            assert read(manager, (await manager.create(options(template=snapshot.id))).id) == (expected, expected)
        await manager.pause(source.id)
        await manager.connect(source.id, 300)
        assert read(manager, source.id) == (expected, expected)

    run(world, scenario)


@pytest.mark.parametrize("error", [UnavailableError("no block server"), DISK_FULL])
def test_a_capture_whose_layer_cannot_be_mapped_costs_no_content(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The next one is compared with what could be mapped last, and lies on top of that."""

    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="0")
        await manager.snapshot(source.id)
        write(manager, source.id, a="1", b="1")
        with monkeypatch.context() as patch:

            async def fail(*_: object, **__: object) -> None:
                raise error

            patch.setattr(world.machines, "_map", fail)
            await manager.snapshot(source.id, name="unmapped")
        write(manager, source.id, a="0")
        for name in ("one", "two"):
            await manager.snapshot(source.id, name=name)
        for name, memory in (
            ("unmapped", {"a": "1", "b": "1"}),
            ("one", {"a": "0", "b": "1"}),
            ("two", {"a": "0", "b": "1"}),
        ):
            assert read(manager, (await manager.create(options(template=name))).id)[0] == memory

    run(world, scenario)


def test_a_machine_that_does_not_go_on_after_a_capture_is_the_end_of_its_sandbox(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.fail["resume"] = VmmError("no")
        with pytest.raises(VmmError, match="did not go on"):
            await manager.snapshot(source.id)
        world.host.fail.clear()
        assert await gone(manager, source.id)
        assert await manager.snapshots() == []

    run(world, scenario)


@pytest.mark.parametrize("moment", ["capture", "restack", "rehome", "seal"])
def test_a_kill_during_a_snapshot_waits_for_it(world: World, moment: str) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.hold[moment] = asyncio.Event()
        taking = asyncio.create_task(manager.snapshot(source.id))
        await world.host.until(moment)
        killing = asyncio.create_task(manager.kill(source.id))
        await asyncio.sleep(0)
        world.host.hold[moment].set()
        (outcome,) = await asyncio.gather(taking, return_exceptions=True)
        await killing
        assert await gone(manager, source.id)
        whole = not isinstance(outcome, BaseException)
        assert whole or isinstance(outcome, NotFoundError)
        assert len(await manager.snapshots()) == whole

    run(world, scenario)


def test_a_guest_that_dies_during_a_snapshot_is_the_end_of_its_sandbox(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.hold["collect"] = asyncio.Event()
        taking = asyncio.create_task(manager.snapshot(source.id))
        await world.host.until("collect")
        vm_of(manager, source.id).die()
        world.host.hold["collect"].set()
        with pytest.raises(VmmError):
            await taking
        await settled(manager)
        assert await gone(manager, source.id)
        assert await manager.snapshots() == []

    run(world, scenario)


def test_a_sick_guest_gives_no_snapshot_of_its_disk_alone(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.listens = False
        with pytest.raises(UnavailableError):
            await manager.snapshot(source.id, memory=False)
        world.host.listens = True
        assert (await manager.get(source.id)).state is SandboxState.RUNNING
        assert await manager.snapshots() == []

    run(world, scenario)


def test_traffic_and_time_go_on_during_a_capture(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        incarnation = (await manager.reach(source.id))[1].incarnation
        world.host.hold["capture"] = asyncio.Event()
        taking = asyncio.create_task(manager.snapshot(source.id))
        await world.host.until("capture")
        assert (await manager.get(source.id)).state is SandboxState.SNAPSHOTTING
        assert (await manager.reach(source.id))[1].incarnation == incarnation
        await manager.set_timeout(source.id, 77)
        world.host.hold["capture"].set()
        await taking
        _, running = await manager.reach(source.id)
        assert not running.closed.done()
        assert running.incarnation == incarnation

    run(world, scenario)


def test_a_time_out_during_a_capture_waits_for_it(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        world.host.hold["capture"] = asyncio.Event()
        taking = asyncio.create_task(manager.snapshot(source.id))
        await world.host.until("capture")
        await manager.set_timeout(source.id, 0)
        await until(lambda: manager._sandboxes[source.id].doomed)
        world.host.hold["capture"].set()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: source.id not in manager._sandboxes)

    run(world, scenario)


def test_who_cannot_be_captured(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        with pytest.raises(NotFoundError):
            await manager.snapshot("nobody")
        source = await manager.create(BASE)
        await manager.kill(source.id)
        with pytest.raises(NotFoundError):
            await manager.snapshot(source.id)

    run(world, scenario)


def test_a_snapshot_of_another_vmm_is_refused_with_what_differs(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        snapshot = world.repository.find((await manager.snapshot(source.id)).id)
        manifest = snapshot.directory / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"7.2"', '"9.9"'))
        world.repository._manifests.clear()
        with pytest.raises(UnavailableError, match=r"VMM version is 9\.9, this node has 7\.2"):
            await manager.create(options(template=snapshot.id))
        with pytest.raises(UnavailableError, match=r"9\.9"):
            await manager.rollback(source.id, snapshot.id)
        assert vm_of(manager, source.id).runs

    run(world, scenario)


def test_a_snapshot_counts_what_no_older_one_has(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        snapshot = await manager.snapshot(source.id)
        assert snapshot.memory_bytes > 0
        assert snapshot.disk_bytes > 0
        await manager.pause(source.id)
        first, second = await manager.snapshot(source.id), await manager.snapshot(source.id)
        assert first.memory_bytes > 0
        assert (second.memory_bytes, second.disk_bytes) == (0, 0)  # of the same pause
        await manager.delete_template(first.id)
        newest, oldest = await manager.snapshots()
        assert (newest.memory_bytes, newest.disk_bytes) == (first.memory_bytes, first.disk_bytes)
        assert oldest == snapshot
        assert (await manager.template(snapshot.id)).id == snapshot.id
        assert world.repository.find(snapshot.id).kind is SnapshotKind.SNAPSHOT

    run(world, scenario)


def test_the_log_tells_of_snapshots_and_rollbacks(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        await manager.snapshot(source.id, name="s")
        await manager.fork(source.id, 2, 300)
        await manager.rollback(source.id, "s")
        entries = await manager.logs(source.id, LogQuery())
        assert [e.fields["event"] for e in entries] == [
            "created", "checkpointed", "checkpointed", "rolled_back", "resumed",
        ]  # fmt: skip
        assert "2 of 2" in entries[2].message

    run(world, scenario)


def test_the_limit_of_running_sandboxes_holds_for_all_ways_to_start_one(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"sandbox.max": 3})

    async def scenario(manager: Manager) -> None:
        first = await manager.create(BASE)
        await manager.snapshot(first.id, name="s")
        await manager.pause(first.id)
        source = await manager.create(BASE)
        with pytest.raises(LimitError):
            await manager.fork(source.id, 3, 300)
        await manager.fork(source.id, 2, 300)
        with pytest.raises(LimitError):
            await manager.create(options(template="s"))
        with pytest.raises(LimitError):
            await manager.rollback(first.id, "s")
        assert (await manager.get(first.id)).state is SandboxState.PAUSED

    run(world, scenario)
    world.clear()
