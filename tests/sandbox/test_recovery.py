"""What a daemon finds when the one before it was killed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import cast

import pytest

from aenv.errors import VmmError
from aenv.sandbox.manager import _machine_record
from aenv.sandbox.service import CreateOptions, PauseMode, SandboxState
from aenv.sandbox.store import Machine, Record, Store, now
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeSlot, FakeVm, World

BASE = CreateOptions(template="base", timeout=300)
MACHINELESS = (SandboxState.PAUSED, SandboxState.STARTING, SandboxState.KILLING, SandboxState.GONE, SandboxState.FAILED)


def left_behind(world: World, state: SandboxState, machine: str, *, capture: bool = False) -> str:
    """A sandbox as a killed daemon left it. `machine` is none, alive or dead."""
    record = Record(
        id="i" + "0" * 20,
        template_id=world.template.id,
        options=BASE,
        started_at=now(),
        end_at=now() + 300,
        state=state,
        machine_id="m" * 32,
    )
    if machine != "none":
        running = world.host.start()
        record.machine = _machine_record(running)
        if machine == "dead":
            world.host.stop(running.slot.index)
    folder = world.folder / "sandboxes" / record.id
    folder.mkdir(parents=True)
    (folder / "disk.qcow2").touch()
    if capture or state is SandboxState.PAUSED or (state is SandboxState.RESUMING):
        (folder / "pause").mkdir()
        (folder / "pause/state").touch()
    if state is SandboxState.PAUSING:
        (folder / "pause.part").mkdir()
    store = Store(world.database)
    store.insert(record)
    store.close()
    return record.id


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
        sandbox_id = left_behind(world, state, machine)
        async with world.daemon() as manager:
            found = {s.id: s.state for s in await manager.sandboxes()}
            want = expected(state, machine)
            assert found == ({} if want is None else {sandbox_id: want})
            assert {r.id: r.state for r in world.store.load()} == found
            assert world.folders() == set(found)
            # A machine that belongs to nobody is gone, one that belongs to somebody runs.
            assert [vm.runs for vm, _ in world.host.alive.values()] == [True] * (want is SandboxState.RUNNING)
            if want is SandboxState.RUNNING:
                ((_, slot),) = world.host.alive.values()
                assert slot.inits[0].get("machineId", slot.inits[0].get("machineID")) == "m" * 32
                assert not (world.folder / "sandboxes" / sandbox_id / "pause").exists()
                assert not (world.folder / "sandboxes" / sandbox_id / "pause.part").exists()
                await manager.pause(sandbox_id)
            if (state, machine) == (SandboxState.RESUMING, "dead"):  # it has run: its memory does not fit its disk
                assert (await manager.get(sandbox_id)).pause_mode is PauseMode.FILESYSTEM
            if want is not None:
                assert (await manager.connect(sandbox_id, 300))[1]
        assert world.host.alive == {}
        assert world.host.count["started"] == world.host.count["ended"]

    asyncio.run(main())


def test_a_whole_capture_of_a_dead_machine_is_a_pause(world: World) -> None:
    async def main() -> None:
        sandbox_id = left_behind(world, SandboxState.PAUSING, "dead", capture=True)
        async with world.daemon() as manager:
            assert (await manager.get(sandbox_id)).state is SandboxState.PAUSED
            assert (await manager.connect(sandbox_id, 300))[1]

    asyncio.run(main())


def test_a_crash_and_a_restart_keep_what_ran_and_its_time(world: World) -> None:
    async def main() -> None:
        async with world.daemon(crash=True) as manager:
            running, paused = await manager.create(BASE), await manager.create(BASE)
            late = await manager.create(BASE)
            await manager.pause(paused.id)
            while manager._tasks:
                await asyncio.wait(set(manager._tasks))
            late_sandbox = manager._sandboxes[late.id]
            late_sandbox.record.end_at = now() - 10
            world.store.save(late_sandbox.record)
            vm = cast(FakeVm, manager._sandboxes[running.id].running.vm)  # type: ignore[union-attr]
        async with world.daemon() as manager:
            assert (await manager.get(running.id)).end_at == running.end_at
            assert manager._sandboxes[running.id].running.vm is vm  # type: ignore[union-attr]
            assert (await manager.get(paused.id)).state is SandboxState.PAUSED
            while late.id in manager._sandboxes:  # its time was over while there was no daemon
                await asyncio.sleep(0.005)
        assert world.host.alive == {}

    asyncio.run(main())


@pytest.mark.parametrize("ill", ["silent", "broken"])
def test_an_adopted_guest_that_does_not_answer_is_ended(tmp_path: Path, ill: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def main() -> None:
        sandbox_id = left_behind(world, SandboxState.RUNNING, "alive")
        if ill == "silent":
            world.host.guest = doubles.silent
        else:
            world.host.fail["resume"] = VmmError("no")
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.host.alive == {}
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
            if slot.index not in silent:
                await doubles.healthy(slot, reader, writer)
                return
            waiting.add(slot.index)
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
        orphan = world.host.start()
        stray = world.folder / "sandboxes/i1234"
        stray.mkdir(parents=True)
        async with world.daemon():
            assert orphan.slot.index not in world.host.alive
            assert world.folders() == set()

    asyncio.run(main())


def test_a_sandbox_whose_template_is_gone_is_removed_with_its_machine_and_files(world: World) -> None:
    async def main() -> None:
        left_behind(world, SandboxState.RUNNING, "alive")
        shutil.rmtree(world.template.directory)
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.host.alive == {}
            assert world.folders() == set()
            assert world.store.load() == []

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_a_paused_sandbox_waits_for_its_template(world: World, damage: str) -> None:
    async def main() -> None:
        sandbox_id = left_behind(world, SandboxState.PAUSED, "none")
        manifest = world.template.directory / "manifest.json"
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
            assert (await manager.get(sandbox_id)).state is SandboxState.PAUSED

    asyncio.run(main())


def test_a_machine_that_cannot_be_ended_does_not_stop_the_start(world: World) -> None:
    async def main() -> None:
        left_behind(world, SandboxState.KILLING, "alive")
        world.host.fail["abandon"] = OSError("no")
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
        assert await world.machines.sweep(set()) == 1

    asyncio.run(main())


def test_a_pid_that_belongs_to_somebody_else_is_not_taken(world: World) -> None:
    async def main() -> None:
        sandbox_id = left_behind(world, SandboxState.RUNNING, "alive")
        store = Store(world.database)
        (record,) = store.load()
        assert record.machine is not None
        record.machine = Machine(record.machine.pid + 7, 1, record.machine.run_dir, record.machine.slot, "x")
        store.save(record)
        store.close()
        async with world.daemon() as manager:
            assert sandbox_id not in {s.id for s in await manager.sandboxes()}

    asyncio.run(main())
