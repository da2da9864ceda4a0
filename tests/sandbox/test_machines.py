"""VM, slot and disk together: whatever fails, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from aenv.errors import NotFoundError, VmmError
from aenv.network.base import Policy
from aenv.network.pool import SlotPool
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.store import Machine
from aenv.storage.home import Home
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import Exit, Vmm, VmmKind
from tests.storage.templates import committed

STRICT = Policy(deny=("8.8.8.8",))


class Parts:
    """The VMM and the slots below `Machines`; `fail` names the step that raises."""

    def __init__(self) -> None:
        self.fail = ""
        self.dies = ""  # the step at which the machine dies, once
        self.vms = 0
        self.taken = 0

    def step(self, name: str) -> None:
        if name == self.fail:
            raise VmmError(name)


class PartVm:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pid = os.getpid()
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        parts.vms += 1

    def step(self, name: str) -> None:
        if self.parts.dies == name:
            self.parts.dies = ""
            self.exited.set_result(Exit("killed", ""))
            raise VmmError(f"{name}: the machine has ended")
        self.parts.step(name)

    async def attach_disk(self, disk: Any) -> None:
        self.step("attach_disk")

    async def load_state(self, state: Path) -> None:
        self.step("load_state")

    async def kill(self) -> None:
        self.parts.vms -= 1
        self.parts.step("kill")


class PartSlot:
    index = 1

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def tap_fd(self) -> int:
        self.parts.step("tap_fd")
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    async def apply(self, policy: Policy) -> None:
        self.parts.step("apply")


class PartSlots:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def take(self) -> PartSlot:
        self.parts.step("take")
        self.parts.taken += 1
        return PartSlot(self.parts)

    async def adopt(self, index: int) -> PartSlot:
        if index == 404:
            raise NotFoundError("no such slot")
        self.parts.taken += 1
        return PartSlot(self.parts)

    async def release(self, slot: PartSlot) -> None:
        self.parts.taken -= 1


class PartVmm:
    kind = VmmKind.QEMU_TCG
    version = "7.2"
    cpu_model = "max"

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def prepare(self, machine: Any, **options: Any) -> PartVm:
        self.parts.step("prepare")
        return PartVm(self.parts)

    async def boot(self, machine: Any, **options: Any) -> PartVm:
        self.parts.step("boot")
        assert options["memory_image"].stat().st_size == 128 << 20
        return PartVm(self.parts)

    async def adopt(self, pid: int, start_time: int, run_dir: Path) -> PartVm:
        self.parts.step("adopt")
        if pid == 404:
            raise NotFoundError("gone")
        return PartVm(self.parts)


Scenario = Callable[[Machines, Template, Parts], Coroutine[Any, Any, None]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Run a scenario; afterwards there are no more machines, slots in use and descriptors than before."""
    monkeypatch.setattr(Home, "run", property(lambda self: tmp_path / "run"))
    home = Home(tmp_path / "home", tmp_path / "home/cache")
    home.create()
    repository = Repository(home.templates)
    template = committed(repository, home.staging, "base")

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            parts = Parts()
            machines = Machines(
                home, cast(Vmm, PartVmm(parts)), cast(SlotPool, PartSlots(parts)), repository, pool=0, hot=0
            )
            before = len(os.listdir("/proc/self/fd"))
            await scenario(machines, template, parts)
            parts.fail = ""
            await machines.close()
            assert (parts.vms, parts.taken) == (0, 0)
            assert len(os.listdir("/proc/self/fd")) == before

        asyncio.run(main())

    return run


@pytest.mark.parametrize("step", ["", "take", "tap_fd", "prepare", "apply", "attach_disk", "load_state"])
def test_start_leaves_nothing_when_a_step_fails(check: Callable[[Scenario], None], step: str) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        parts.fail = step
        if step:
            with pytest.raises(VmmError, match=step):
                await machines.start(template, "i1", STRICT)
            return
        running = await machines.start(template, "i1", STRICT)
        assert machines.disk("i1", template).path.stat().st_size > 0
        assert (parts.vms, parts.taken) == (1, 1)
        await machines.end(running)
        assert running.closed.done()

    check(scenario)


@pytest.mark.parametrize("step", ["attach_disk", "load_state"])
def test_a_machine_that_died_while_it_waited_is_replaced(check: Callable[[Scenario], None], step: str) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        parts.dies = step
        running = await machines.start(template, "i1", STRICT)
        assert not running.vm.exited.done()
        await machines.end(running)

    check(scenario)


@pytest.mark.parametrize("step", ["", "take", "apply", "tap_fd", "boot"])
def test_boot_leaves_nothing_when_a_step_fails(check: Callable[[Scenario], None], step: str) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        parts.fail = step
        disk = machines.disk("i1", template)
        if step:
            with pytest.raises(VmmError, match=step):
                await machines.boot(template, disk, STRICT)
            return
        await machines.end(await machines.boot(template, disk, STRICT))

    check(scenario)


def test_a_slot_comes_back_although_its_machine_cannot_be_killed(check: Callable[[Scenario], None]) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        running = await machines.start(template, "i1", Policy())
        parts.fail = "kill"
        with pytest.raises(VmmError):
            await machines.end(running)

    check(scenario)


def test_adoption(check: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        running = await machines.adopt(Machine(1, 1, str(tmp_path), 1, "incarnation"))
        assert running.incarnation == "incarnation"
        await machines.end(running)
        for machine in (Machine(404, 1, str(tmp_path), 1, "x"), Machine(1, 1, str(tmp_path), 404, "x")):
            with pytest.raises(NotFoundError):
                await machines.adopt(machine)

    check(scenario)


def test_a_pid_of_another_process_is_not_killed(check: Callable[[Scenario], None], tmp_path: Path) -> None:
    run_dir = tmp_path / "vm-x"
    run_dir.mkdir()

    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        await machines.abandon(Machine(os.getpid(), 1, str(run_dir), 1, "x"))  # our own pid, another start time
        await machines.abandon(Machine(os.getpid(), 1, str(run_dir), 404, "x"))
        assert not run_dir.exists()

    check(scenario)


def test_a_revived_machine_has_connections_of_its_own(check: Callable[[Scenario], None]) -> None:
    async def scenario(machines: Machines, template: Template, parts: Parts) -> None:
        running = await machines.start(template, "i1", Policy())
        running.close()
        running.close()
        revived = running.revived()
        assert isinstance(revived, Running)
        assert not revived.closed.done()
        assert revived.incarnation != running.incarnation
        assert (revived.vm, revived.slot) == (running.vm, running.slot)
        await machines.end(revived)

    check(scenario)
