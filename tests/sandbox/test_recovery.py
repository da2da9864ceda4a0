"""What a daemon finds when the one before it was killed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.sandbox.lifecycle import machine_record
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import PauseMode, SandboxState
from aenv.sandbox.store import Machine, Store
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeSlot
from tests.sandbox.world import BASE, World, gone, options, quiet, read, running_of, settled, vm_of, write

MACHINELESS = (SandboxState.PAUSED, SandboxState.STARTING, SandboxState.KILLING, SandboxState.GONE, SandboxState.FAILED)
ONE = ({"a": "1"}, {"a": "1"})


async def left_behind(world: World, state: SandboxState, machine: str) -> str:
    """A sandbox as a killed daemon left it in the middle of something. `machine` is none, alive or dead."""
    async with world.daemon(crash=True) as manager:
        sandbox_id = (await manager.create(BASE)).id
        write(manager, sandbox_id, a="1")
        sandbox = manager._sandboxes[sandbox_id]
        running = running_of(manager, sandbox_id)
        if machine == "none" or state in (SandboxState.PAUSED, SandboxState.RESUMING):
            await manager.pause(sandbox_id)
            await settled(manager)
        if machine != "none" and state in (SandboxState.PAUSED, SandboxState.RESUMING):
            record = sandbox.record
            running = await world.machines.restore(
                sandbox.checkpoint(world.machines.directory(sandbox_id)), running.slot.policy
            )
            record.machine, record.upper = machine_record(running), running.disk.upper
            world.store.save(record)
        if machine == "dead":
            sandbox.running = None  # the daemon has not noticed
            world.host.alive[running.vm.pid][0].end("killed")
        record = sandbox.record
        world.store.transition(record, list(SandboxState), state)
    return sandbox_id


def expected(state: SandboxState, machine: str) -> SandboxState | None:
    if state is SandboxState.PAUSED or (state is SandboxState.RESUMING and machine != "alive"):
        return SandboxState.PAUSED
    if machine == "alive" and state not in MACHINELESS:
        return SandboxState.RUNNING
    return None


@pytest.mark.parametrize("machine", ["none", "alive", "dead"])
@pytest.mark.parametrize("state", list(SandboxState))
def test_every_state_is_finished_or_undone(world: World, state: SandboxState, machine: str) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, state, machine)
        async with world.daemon() as manager:
            await settled(manager)
            found = {s.id: s.state for s in await manager.sandboxes()}
            want = expected(state, machine)
            assert found == ({} if want is None else {sandbox_id: want})
            quiet(world, manager)
            if want is SandboxState.PAUSED:
                assert (await manager.get(sandbox_id)).pause_mode is PauseMode.FULL
                await manager.connect(sandbox_id, 300)
            if want is not None:
                assert read(manager, sandbox_id) == ONE
                await manager.pause(sandbox_id)
                await manager.connect(sandbox_id, 300)
                assert read(manager, sandbox_id) == ONE
        assert world.host.alive == {}
        assert world.host.count["started"] == world.host.count["ended"]

    asyncio.run(main())


def test_a_crash_and_a_restart_keep_what_ran_and_its_time(world: World) -> None:
    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            running, paused, late = [await manager.create(BASE) for _ in range(3)]
            write(manager, running.id, a="1")
            await manager.pause(paused.id)
            await settled(manager)
            late_sandbox = manager._sandboxes[late.id]
            late_sandbox.record.end_at -= 310
            world.store.save(late_sandbox.record)
            vm = vm_of(manager, running.id)
        async with world.daemon() as manager:
            assert (await manager.get(running.id)).end_at == running.end_at
            assert vm_of(manager, running.id) is vm
            assert (await manager.get(paused.id)).state is SandboxState.PAUSED
            while late.id in manager._sandboxes:  # its time was over while there was no daemon
                await asyncio.sleep(0.005)
            write(manager, running.id, b="2")
            await manager.snapshot(running.id, name="s")  # on top of what the daemon before knew
            child = await manager.create(options(template="s"))
            assert read(manager, child.id) == ({"a": "1", "b": "2"},) * 2
        assert world.host.alive == {}

    asyncio.run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_a_pause_that_was_not_on_the_disk_when_the_host_went_down(
    world: World, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """It is the end of the sandbox: what can be read of it may be anything. In the same boot nothing is lost."""

    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            info = await manager.create(BASE)
            write(manager, info.id, a="1")
            world.host.fail["seal"] = VmmError("no")
            await manager.pause(info.id)
            await settled(manager)
            assert manager._sandboxes[info.id].record.unsettled is not None
        world.host.fail.clear()
        if not reads:
            for module in ("lifecycle", "recovery"):
                monkeypatch.setattr(f"aenv.sandbox.{module}.boot_id", lambda: "another boot")
        async with world.daemon() as manager:
            await settled(manager)
            assert {s.id for s in await manager.sandboxes()} == ({info.id} if reads else set())
            quiet(world, manager)
            if reads:
                assert manager._sandboxes[info.id].record.unsettled is None
                await manager.connect(info.id, 300)
                assert read(manager, info.id) == ONE

    asyncio.run(main())


def test_who_was_seen_to_be_gone_does_not_come_back(world: World) -> None:
    """A kill has to wait for the resume under way, and clients are told before that is over."""
    told = []

    async def work(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        await settled(manager)
        world.host.reached.clear()
        world.host.hold["resume"] = asyncio.Event()
        resuming = asyncio.create_task(manager.connect(info.id, 300))
        await world.host.until("resume")
        killing = asyncio.create_task(manager.kill(info.id))
        await asyncio.sleep(0.01)
        assert not resuming.done()
        assert not killing.done()
        assert await gone(manager, info.id)
        told.append(info.id)
        world.host.stop_at = 0
        await world.host.step("the end")

    assert world.killed(work, 10**6)
    assert told
    world.host.hold.clear()

    async def after() -> None:
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.host.alive == {}
            quiet(world, manager)

    asyncio.run(after())


def test_a_kill_that_cannot_be_recorded_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            info = await manager.create(BASE)
            with monkeypatch.context() as broken:
                broken.setattr(world.store, "save", full_disk)
                with pytest.raises(OSError, match="No space"):
                    await manager.kill(info.id)
            assert (await manager.get(info.id)).state is SandboxState.RUNNING
            await manager.kill(info.id)
            assert await gone(manager, info.id)

    asyncio.run(main())


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("ill", ["silent", "broken", "disk"])
def test_an_adopted_guest_that_does_not_answer_is_ended(tmp_path: Path, ill: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def main() -> None:
        sandbox_id = await left_behind(world, SandboxState.RUNNING, "alive")
        if ill == "silent":
            world.host.guest = doubles.silent
        elif ill == "broken":
            world.host.fail["resume"] = VmmError("no")
        else:
            (image,) = [image for image in world.host.blocks.images.values() if image.data is not None]
            del world.host.blocks.images[image.name]  # the block server is another one
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.host.alive == {}
            assert world.host.slots == {}
            assert sandbox_id not in world.folders()

    asyncio.run(main())


def test_hung_guests_hold_up_the_start_once_and_not_each(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            for _ in range(6):
                await manager.create(BASE)
        silent = set(sorted(world.host.alive)[:5])
        waiting: set[int] = set()
        all_wait = asyncio.Event()

        async def some(slot: FakeSlot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert slot.vm is not None
            if slot.vm.pid not in silent:
                await doubles.healthy(slot, reader, writer)
                return
            waiting.add(slot.vm.pid)
            if waiting == silent and silent <= set(world.host.alive):
                all_wait.set()  # none of them has been given up yet
            await doubles.silent(slot, reader, writer)

        world.host.guest = some
        async with world.daemon() as manager:
            assert len(await manager.sandboxes()) == 1
        assert all_wait.is_set()

    asyncio.run(main())


def test_what_nobody_owns_is_removed(world: World) -> None:
    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            folder = world.machines.directory("ipool")
            orphan = await world.machines.branch(
                world.template, world.template.checkpoint, "ipool", doubles.Policy()
            )  # waits in the pool of a daemon
            assert folder.exists()
            assert await manager.sandboxes() == []
        (world.home.sandboxes / "i1234").mkdir()
        async with world.daemon() as manager:
            assert orphan.vm.pid not in world.host.alive
            quiet(world, manager)

    asyncio.run(main())


def test_a_sandbox_whose_files_are_gone_is_removed_with_its_machine(world: World) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, SandboxState.RUNNING, "alive")
        shutil.rmtree(world.template.directory)
        (world.home.sandboxes / sandbox_id / "manifest.json").unlink()
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.host.alive == {}
            assert world.folders() == set()
            assert world.store.load() == []

    asyncio.run(main())


@pytest.mark.parametrize("state", [SandboxState.RUNNING, SandboxState.PAUSED])
def test_a_sandbox_does_not_need_the_directory_of_its_template(world: World, state: SandboxState) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, state, "alive" if state is SandboxState.RUNNING else "none")
        shutil.rmtree(world.template.directory)
        async with world.daemon() as manager:
            await manager.connect(sandbox_id, 300)
            assert read(manager, sandbox_id) == ONE

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_a_paused_sandbox_waits_for_its_manifest(world: World, damage: str) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, SandboxState.PAUSED, "none")
        shutil.rmtree(world.template.directory)
        manifest = world.home.sandboxes / sandbox_id / "manifest.json"
        whole = manifest.read_bytes()
        if damage == "gone":
            manifest.unlink()
        else:
            manifest.write_bytes(whole[:40])
        world.repository._manifests.clear()  # a new daemon remembers none
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.folders() == {sandbox_id}
        manifest.write_bytes(whole)
        async with world.daemon() as manager:
            await manager.connect(sandbox_id, 300)
            assert read(manager, sandbox_id) == ONE

    asyncio.run(main())


def test_a_machine_that_cannot_be_ended_does_not_stop_the_start(world: World) -> None:
    async def main() -> None:
        await left_behind(world, SandboxState.KILLING, "alive")
        world.host.fail["kill process"] = OSError("no")
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
        world.host.fail.clear()
        assert await world.machines.sweep([]) == 1

    asyncio.run(main())


def test_a_pid_that_belongs_to_somebody_else_is_not_taken(world: World) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, SandboxState.RUNNING, "alive")
        store = Store(world.home.database)
        (record,) = store.load()
        machine = record.machine
        assert machine is not None
        record.machine = Machine(machine.pid, 1, machine.run_dir, machine.slot, machine.disk, "x")
        store.save(record)
        store.close()
        async with world.daemon() as manager:
            assert sandbox_id not in {s.id for s in await manager.sandboxes()}
            assert [vm.dead for vm, _ in world.host.alive.values()] == [False]  # it is not ours to end

    asyncio.run(main())


def test_scratch_of_a_merge_is_removed(world: World) -> None:
    async def main() -> None:
        sandbox_id = await left_behind(world, SandboxState.PAUSED, "none")
        (world.home.sandboxes / sandbox_id / ".merged.lsmt").touch()
        async with world.daemon() as manager:
            await settled(manager)
            quiet(world, manager)

    asyncio.run(main())
