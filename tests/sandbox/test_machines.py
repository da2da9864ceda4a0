"""VM, slot and disk together: whatever fails, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from aenv.errors import NotFoundError, VmmError
from aenv.network.base import Policy
from aenv.sandbox.lifecycle import machine_record
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.store import Machine
from aenv.snapshot.checkpoint import Checkpoint
from aenv.storage.disks import Disks
from aenv.storage.memory import MemoryImages
from aenv.vmm.base import MemoryMap, VmState
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeSlot, FakeVm, blocks_of, slots_of, vmm_of
from tests.sandbox.world import World, until
from tests.storage.templates import committed

STRICT = Policy(deny=("8.8.8.8",))
Scenario = Callable[[Machines, World], Coroutine[Any, Any, None]]


@asynccontextmanager
async def machines_of(world: World, **pools: int) -> AsyncIterator[Machines]:
    memory = MemoryImages(blocks_of(world.host), world.home.images)
    await memory.start()
    made = Machines(
        world.home, vmm_of(world.host), slots_of(world.host), world.repository, Disks(blocks_of(world.host)), memory,
        **({"pool": 0, "pool_max": 0, "hot": 0} | pools),
    )  # fmt: skip
    yield made
    world.host.fail.clear()
    await made.close()
    await memory.close()


@pytest.fixture
def check(world: World) -> Callable[..., None]:
    """Run a scenario; afterwards there are no more machines, slots in use, images and descriptors than before."""

    def run(scenario: Scenario, **pools: int) -> None:
        async def main() -> None:
            before = len(os.listdir("/proc/self/fd"))
            async with machines_of(world, **pools) as machines:
                await scenario(machines, world)
            assert (world.host.alive, world.host.slots, world.host.blocks.images) == ({}, {}, {})
            assert list(world.home.run.glob("vm-*")) == []
            assert world.host.faults == []
            assert len(os.listdir("/proc/self/fd")) == before

        asyncio.run(main())

    return run


def fake(running: Running) -> FakeVm:
    return cast(FakeVm, running.vm)


def checkpoint_of(world: World, machines: Machines, sandbox_id: str) -> Checkpoint:
    folder = machines.directory(sandbox_id)
    folder.mkdir()
    return world.template.checkpoint.link_into(folder)


START = ["", "slot", "prepare", "create layer", "open image", "apply", "map", "attach", "load"]


@pytest.mark.parametrize("step", START)
def test_start_leaves_nothing_when_a_step_fails(check: Callable[..., None], step: str) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        if step:
            world.host.fail[step] = VmmError(step)
            with pytest.raises(VmmError, match=step):
                await machines.start(world.template, "i1", STRICT)
            assert world.folders() == set()
            return
        running = await machines.start(world.template, "i1", STRICT)
        assert running.vm.state is VmState.PAUSED
        assert cast(FakeSlot, running.slot).policy == STRICT
        assert world.files("i1") == {
            "manifest.json", *world.template.manifest.memory, *running.disk.layers, running.disk.upper,
            running.disk.upper.replace("lsmt", "index"),
        }  # fmt: skip
        assert list(running.memory_layers) == world.template.manifest.memory
        await machines.end(running)
        assert running.closed.done()
        await machines.drop_upper(running)
        assert running.disk.upper not in world.files("i1")

    check(scenario)


@pytest.mark.parametrize("step", ["attach_disk", "load_state", "map_memory"])
def test_a_machine_that_died_while_it_waited_is_replaced(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(FakeVm, step)
    died = []

    async def dies(vm: FakeVm, argument: Any) -> None:
        if not died:
            died.append(vm)
            vm.die()
        await real(vm, argument)

    async def scenario(machines: Machines, world: World) -> None:
        monkeypatch.setattr(FakeVm, step, dies)
        running = await machines.start(world.template, "i1", STRICT)
        assert not running.vm.exited.done()
        assert len(died) == 1
        assert len(world.host.blocks.images) == 2  # its memory, and one disk
        await machines.end(running)

    check(scenario)


@pytest.mark.parametrize("step", ["", "slot", "apply", "create layer", "open image", "boot"])
def test_boot_leaves_nothing_when_a_step_fails(check: Callable[..., None], step: str) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        checkpoint = checkpoint_of(world, machines, "i1")
        before = world.files("i1")
        if step:
            world.host.fail[step] = VmmError(step)
            with pytest.raises(VmmError, match=step):
                await machines.boot(checkpoint, STRICT)
            assert world.files("i1") == before
            return
        running = await machines.boot(checkpoint, STRICT)
        assert (running.memory_layers, running.memory) == ((), None)
        await machines.end(running)

    check(scenario)


def test_a_template_without_memory_boots(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        template = committed(world.repository, world.home.staging, "cold", memory=[], state=None)
        running = await machines.start(template, "i1", Policy())
        assert fake(running).runs
        await machines.end(running)

    check(scenario)


def test_what_is_too_scattered_to_be_mapped_is_served_whole(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory_map(size: int, base: Path, layers: list[Path], zero: Path, *, limit: int | None = 1) -> MemoryMap | None:
        assert zero.stat().st_size == size
        return None if layers else MemoryMap(size, (base,), b"")

    async def scenario(machines: Machines, world: World) -> None:
        monkeypatch.setattr("aenv.sandbox.machines.memory_map", memory_map)
        template = committed(world.repository, world.home.staging, memory=["m1.lsmt", "m2.lsmt"], state="state")
        (template.directory / "m1.lsmt").write_text('{"a": "1", "b": "1"}')
        (template.directory / "m2.lsmt").write_text('{"b": "2"}')
        (template.directory / "state").write_text('{"memory": {"a": "1", "b": "2"}}')
        running = await machines.start(template, "i1", Policy())
        assert fake(running).memory == {"a": "1", "b": "2"}
        await machines.end(running)

    check(scenario)


def test_many_machines_of_one_checkpoint_map_it_once(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        memory = await machines.map_memory(world.template.checkpoint)
        opened = world.host.count["open image"]
        running = [
            await machines.branch(world.template, world.template.checkpoint, f"i{n}", Policy(), memory=memory)
            for n in range(3)
        ]
        assert world.host.count["open image"] == opened + 3  # a disk each
        for number, one in enumerate(running):
            assert one.memory is not None
            folders = {path.parent for path in one.memory.files}
            assert world.template.directory not in folders  # which may be gone before they are
            assert folders <= {machines.directory(f"i{number}"), world.host.blocks.directory}
            await machines.end(one)

    check(scenario)


def test_a_slot_comes_back_although_its_machine_cannot_be_killed(world: World) -> None:
    async def main() -> None:
        async with machines_of(world) as machines:
            running = await machines.start(world.template, "i1", Policy())
            world.host.fail["kill"] = VmmError("stuck")
            with pytest.raises(VmmError, match="stuck"):
                await machines.end(running)
            assert world.host.slots == {}
            assert running.disk.image in world.host.blocks.images  # somebody may be writing to it
            world.host.fail.clear()
            await machines.end(running)
            assert running.disk.image not in world.host.blocks.images

    asyncio.run(main())


def test_adoption(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        running = await machines.start(world.template, "i1", Policy())
        await running.vm.resume()
        fake(running).write("a", "1")
        record, folder = machine_record(running), machines.directory("i1")
        for change in ({"pid": 404}, {"start_time": 1}, {"slot": 404}, {"disk": "none"}):
            with pytest.raises(NotFoundError):
                await machines.adopt(_changed(record, **change), folder)
            if "slot" not in change:  # what was taken for it was given back: this slot is gone
                world.host.slots[running.slot.index] = cast(FakeSlot, running.slot)
        cast(FakeSlot, running.slot).tap.close()
        adopted = await machines.adopt(record, folder)
        assert adopted.disk == running.disk
        assert adopted.incarnation == running.incarnation
        assert adopted.vm is running.vm
        await machines.remember(adopted, world.template.machine, list(running.memory_layers))
        captured = await machines.capture(adopted, world.template.machine, restack=False, goes_on=False)
        assert doubles.content_of(folder / captured.memory) == {"a": "1"}
        await machines.end(adopted)

    check(scenario)


def _changed(record: Machine, **change: Any) -> Machine:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return Machine(**(fields | change))


def test_what_an_earlier_daemon_left_is_abandoned_whole(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        running = await machines.start(world.template, "i1", Policy())
        await machines.restack(running)
        layers = await machines.abandon(machine_record(running), machines.directory("i1"))
        assert layers == (*running.disk.layers, running.disk.upper)
        assert await machines.abandon(machine_record(running), machines.directory("i1")) is None  # again

    check(scenario)


def test_a_pid_of_another_process_is_not_killed(check: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        run_dir = tmp_path / "vm-x"
        run_dir.mkdir()
        running = await machines.start(world.template, "i1", Policy())
        stranger = Machine(running.vm.pid, 1, str(run_dir), 404, "none", "x")  # its pid, another start time
        await machines.abandon(stranger, machines.directory("i1"))
        assert not run_dir.exists()
        assert not running.vm.exited.done()
        await machines.end(running)

    check(scenario)


def test_a_sweep_ends_what_waited_for_a_dead_daemon(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        kept, swept = [await machines.start(world.template, f"i{n}", Policy()) for n in range(2)]
        assert await machines.sweep([machine_record(kept)]) == 1
        assert list(world.host.alive) == [kept.vm.pid]
        disks = [image.name for image in world.host.blocks.images.values() if image.data is not None]
        assert disks == [kept.disk.image]
        await machines.end(kept)
        await machines.end(swept)

    check(scenario)


def test_a_revived_machine_has_connections_of_its_own(check: Callable[..., None]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        running = await machines.start(world.template, "i1", Policy())
        running.close()
        running.close()
        revived = running.revived()
        assert not revived.closed.done()
        assert revived.incarnation != running.incarnation
        assert (revived.vm, revived.slot, revived.disk) == (running.vm, running.slot, running.disk)
        assert (revived.memory, revived.memory_layers) == (running.memory, running.memory_layers)
        await machines.end(revived)

    check(scenario)


@pytest.mark.parametrize("step", ["capture", "vm.pause", "save", "collect", "restack"])
def test_a_capture_that_fails_leaves_no_file_and_a_disk_that_is_described_rightly(
    check: Callable[..., None], step: str
) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        running = await machines.start(world.template, "i1", Policy())
        await running.vm.resume()
        fake(running).write_disk("a", "1")
        before = world.files("i1")
        world.host.fail[step] = VmmError("no")
        with pytest.raises(VmmError):
            await machines.capture(running, world.template.machine, restack=True, goes_on=True)
        world.host.fail.clear()
        (image,) = [image for image in world.host.blocks.images.values() if image.data is not None]
        assert running.disk.layers == tuple(path.name for path in image.layers)
        assert image.data == machines.directory("i1") / running.disk.upper
        assert world.files("i1") == before | {running.disk.upper, running.disk.upper.replace("lsmt", "index")}
        await machines.end(running)

    check(scenario)


# Machines that wait


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids of the machines that were rehearsed; whether they are in the background is noted as its negative."""
    seen: list[int] = []

    async def rehearse(slot: FakeSlot, template: object) -> None:
        assert slot.vm is not None
        assert slot.vm.runs
        await slot.host.step("rehearse")
        seen.append(slot.vm.pid)

    async def record(vm: FakeVm) -> list[tuple[int, int]]:
        return [(0, 4096)]

    monkeypatch.setattr("aenv.sandbox.machines.rehearse", rehearse)
    monkeypatch.setattr("aenv.sandbox.working_sets.record_working_set", record)
    monkeypatch.setattr("aenv.sandbox.machines.set_background", lambda pid, yes: None)
    monkeypatch.setattr("aenv.sandbox.machines.WARM_UP_QUIET", 0)
    return seen


def test_a_warmed_machine_is_the_next_sandbox(check: Callable[..., None], rehearsed: list[int]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        template = world.template
        assert machines.ready(template) == (0, 0)
        await machines.warm(template)
        await machines.warmed(template)
        assert machines.ready(template)[0] == 1
        sandbox_id = machines.reserve(template)
        assert sandbox_id in world.folders()
        other = machines.reserve(template)
        assert other not in world.folders()
        running = await machines.start(template, sandbox_id, STRICT)
        assert running.vm.pid in rehearsed
        assert running.vm.state is VmState.PAUSED
        assert cast(FakeSlot, running.slot).policy == STRICT
        await machines.end(running)

    check(scenario, pool=1, hot=1, pool_max=1)


def test_a_warmed_machine_whose_network_cannot_be_set_is_discarded(
    check: Callable[..., None], rehearsed: list[int]
) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        await machines.warm(world.template)
        await machines.warmed(world.template)
        sandbox_id = machines.reserve(world.template)
        world.host.fail["apply"] = VmmError("no")
        with pytest.raises(VmmError):
            await machines.start(world.template, sandbox_id, STRICT)
        assert sandbox_id not in world.folders()

    check(scenario, pool=1, hot=1, pool_max=1)


@pytest.mark.parametrize("step", ["rehearse", "resume", "load", "vm.pause"])
def test_a_warm_up_that_fails_leaves_nothing(check: Callable[..., None], rehearsed: list[int], step: str) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        world.host.fail[step] = VmmError("no")
        await machines.warm(world.template)
        await machines.warmed(world.template)
        assert machines.ready(world.template)[0] == 0
        assert world.folders() == set()
        assert world.host.alive == {}

    check(scenario, pool=1, hot=1, pool_max=1)


def test_those_that_nobody_took_end_with_the_daemon(check: Callable[..., None], rehearsed: list[int]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        await machines.warm(world.template)
        await machines.expect(world.template.machine)
        await machines.warmed(world.template)
        machines.reserve(world.template)  # and never started
        await until(lambda: machines.ready(world.template) == (1, 1))
        await machines.close()
        assert world.folders() == set()

    check(scenario, pool=1, hot=1, pool_max=1)


def test_cooling_a_template_ends_what_waits_for_it(check: Callable[..., None], rehearsed: list[int]) -> None:
    async def scenario(machines: Machines, world: World) -> None:
        await machines.warm(world.template)
        await machines.warmed(world.template)
        await machines.cool(world.template)
        assert machines.ready(world.template)[0] == 0
        assert world.folders() == set()

    check(scenario, pool=1, hot=1, pool_max=1)
