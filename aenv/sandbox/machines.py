"""Machines for sandboxes: a VM together with the network slot it is wired to.

This is where VMM, network, snapshots and disks meet; it knows templates and directories, not sandbox states.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

from aenv.agent.client import Agent
from aenv.errors import NotFoundError
from aenv.network.base import GUEST_MAC, Policy
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.sandbox.store import Machine
from aenv.snapshot.capture import CaptureStats, capture_delta
from aenv.snapshot.manifest import DELTA_NAME, STATE_NAME
from aenv.snapshot.restore import restore
from aenv.storage.home import Home
from aenv.storage.overlay import create_overlay
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import Disk, Nic, Vm, Vmm
from aenv.vmm.pool import WarmPool
from aenv.vmm.spawn import Process, processes_in

DISK_NAME = "disk.qcow2"
CONNECT_TIMEOUT = 5.0  # seconds; a live guest answers or refuses within a millisecond


@dataclass(frozen=True, slots=True)
class Prepared:
    """What waits in the pool: a process with its RAM mapped, wired to a slot nobody has used."""

    vm: Vm
    slot: Slot


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Running:
    """One incarnation of a sandbox: from start or resume until pause or end."""

    vm: Vm
    slot: Slot
    incarnation: str
    closed: asyncio.Future[None] = field(default_factory=_future)  # done when connections must be dropped

    def close(self) -> None:
        """Have every connection to this incarnation dropped."""
        if not self.closed.done():
            self.closed.set_result(None)

    async def connect(self, port: int) -> socket.socket:
        """A connected non-blocking socket to a port of the guest. Raises OSError or TimeoutError."""
        return await self.slot.connect(port, CONNECT_TIMEOUT)

    def revived(self) -> Running:
        """The same machine for new connections, after a pause that failed."""
        return Running(self.vm, self.slot, secrets.token_hex(8))

    def agent(self, token: str | None) -> Agent:
        return Agent(self.connect, token)


class Machines:
    """Makes, captures, adopts and ends machines. All methods leave nothing behind when they raise."""

    def __init__(self, home: Home, vmm: Vmm, slots: SlotPool, repository: Repository, *, pool: int, hot: int) -> None:
        self._home = home
        self._vmm = vmm
        self._slots = slots
        self._repository = repository
        self._pool: WarmPool[str, Prepared] = WarmPool(
            self._prepare, self._discard, size=pool, hot=hot, broken=_is_dead
        )

    @property
    def kind(self) -> str:
        return self._vmm.kind.value

    @property
    def version(self) -> str:
        return self._vmm.version

    def directory(self, sandbox_id: str) -> Path:
        return self._home.sandboxes / sandbox_id

    def new_disk(self, sandbox_id: str, template: Template) -> Disk:
        """Make the sandbox's directory and its private, empty disk overlay."""
        folder = self.directory(sandbox_id)
        folder.mkdir(mode=0o711)
        path = folder / DISK_NAME
        create_overlay(path, template.disk, template.disk_size)
        return Disk(path, "qcow2", backing=template.disk)

    def disk(self, sandbox_id: str, template: Template) -> Disk:
        return Disk(self.directory(sandbox_id) / DISK_NAME, "qcow2", backing=template.disk)

    def ready(self, template_id: str) -> int:
        """How many machines of this template wait in the pool."""
        return self._pool.count(template_id)

    async def warm(self, template_id: str) -> None:
        """Begin to keep machines of this template ready."""
        await self._pool.warm(template_id)

    async def restore(
        self, template: Template, disk: Disk, policy: Policy, paused: Path | None = None, *, pooled: bool = True
    ) -> Running:
        """Restore the template's snapshot, or the pause in directory `paused`, which is a delta to the same memory
        image. The machine is PAUSED: its vCPUs have not run yet. `pooled=False` starts a VMM although one waits."""
        prepared = await (self._pool.take(template.id) if pooled else self._prepare(template.id))
        try:
            if policy != Policy():
                await prepared.slot.apply(policy)
            state = template.state if paused is None else paused / STATE_NAME
            delta = None if paused is None else paused / DELTA_NAME
            await restore(prepared.vm, state=state, disk=disk, delta=delta)
        except BaseException:
            await self._discard(prepared)
            raise
        return Running(prepared.vm, prepared.slot, secrets.token_hex(8))

    async def boot(self, template: Template, disk: Disk, policy: Policy) -> Running:
        """Cold boot from a disk, for a sandbox whose memory was not kept."""
        slot = await self._slots.take()
        try:
            if policy != Policy():
                await slot.apply(policy)
            blank = self._home.cache / f"zero-{template.manifest.memory_mib}"
            with blank.open("ab") as file:
                file.truncate(template.manifest.memory_mib << 20)
            tap = slot.tap_fd()
            try:
                vm = await self._vmm.boot(
                    template.machine, memory_image=blank, disk=disk, nic=Nic(tap, GUEST_MAC), run_dir=self._run_dir()
                )
            finally:
                os.close(tap)
        except BaseException:
            await self._slots.release(slot)
            raise
        return Running(vm, slot, secrets.token_hex(8))

    async def capture_pause(self, running: Running, template: Template, target: Path) -> CaptureStats:
        """Stop the vCPUs and write device state and changed memory to `target`, which appears whole or not at all.

        The machine stays paused: the caller kills it or lets it run on.
        """
        staging = target.with_name(target.name + ".part")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        try:
            stats = await capture_delta(running.vm, staging, parent_image=template.memory)
            staging.rename(target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return stats

    async def end(self, running: Running) -> None:
        """Kill the machine and give its slot back."""
        running.close()
        await self._discard(Prepared(running.vm, running.slot))

    async def adopt(self, machine: Machine) -> Running:
        """Take over a machine of an earlier daemon. Raises NotFoundError when it is gone."""
        slot = await self._slots.adopt(machine.slot)
        try:
            vm = await self._vmm.adopt(machine.pid, machine.start_time, Path(machine.run_dir))
        except BaseException:
            await self._slots.release(slot)
            raise
        return Running(vm, slot, machine.incarnation)

    async def abandon(self, machine: Machine) -> None:
        """End what is left of a machine of an earlier daemon."""
        try:
            await Process.adopt(machine.pid, machine.start_time).kill()
        except NotFoundError:
            pass  # it has ended by itself
        shutil.rmtree(machine.run_dir, ignore_errors=True)
        try:
            slot = await self._slots.adopt(machine.slot)
        except NotFoundError:
            return
        await self._slots.release(slot)

    async def sweep(self, keep: set[Path]) -> int:
        """Kill the VMM processes of this home whose run directory is not in `keep`: they waited in the pool of a
        daemon that was killed. Returns how many there were."""
        ended = 0
        for folder in self._home.run.glob("vm-*"):
            if folder in keep:
                continue
            for pid, start_time in await asyncio.to_thread(processes_in, folder):
                try:
                    await Process.adopt(pid, start_time).kill()
                except NotFoundError:
                    continue
                ended += 1
            shutil.rmtree(folder, ignore_errors=True)
        return ended

    def folders(self) -> list[Path]:
        """The directories of all sandboxes."""
        return [path for path in self._home.sandboxes.iterdir() if path.is_dir()]

    async def cool(self, template_id: str) -> None:
        """Stop keeping machines of this template ready."""
        await self._pool.cool(template_id)

    async def close(self) -> None:
        await self._pool.close()

    async def _prepare(self, template_id: str) -> Prepared:
        template = self._repository.find(template_id)
        slot = await self._slots.take()
        try:
            tap = slot.tap_fd()
            try:
                vm = await self._vmm.prepare(
                    template.machine,
                    memory_image=template.memory,
                    nic=Nic(tap, GUEST_MAC),
                    run_dir=self._run_dir(),
                    base=template.disk,
                )
            finally:
                os.close(tap)
        except BaseException:
            await self._slots.release(slot)
            raise
        return Prepared(vm, slot)

    async def _discard(self, prepared: Prepared) -> None:
        try:
            await prepared.vm.kill()
        finally:
            await self._slots.release(prepared.slot)

    def _run_dir(self) -> Path:
        return self._home.run / f"vm-{secrets.token_hex(6)}"


def _is_dead(prepared: Prepared) -> bool:
    return prepared.vm.exited.done()
