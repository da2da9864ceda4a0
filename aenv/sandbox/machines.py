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

from aenv.agent.client import ENVD_PORT, Agent, identity
from aenv.agent.process import Ended, Processes
from aenv.errors import GuestError, NotFoundError, VmmError
from aenv.http.client import Connection
from aenv.network.base import GUEST_MAC, Policy
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.sandbox.store import Machine
from aenv.snapshot.capture import CaptureStats, capture_delta
from aenv.snapshot.manifest import DELTA_NAME, STATE_NAME, sync_directory
from aenv.snapshot.restore import restore
from aenv.storage.home import Home
from aenv.storage.overlay import create_overlay
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import Disk, Nic, Vm, Vmm
from aenv.vmm.pool import WarmPool
from aenv.vmm.spawn import Process, processes_in, set_background

DISK_NAME = "disk.qcow2"
WARM_PREFIX = "warm-"
WARM_UP_TIMEOUT = 120  # seconds; a busy host leaves it little time
WARM_UP_QUIET = 0.5  # seconds after a create: its user's first commands go before
REHEARSALS = 2
CONSOLE_LINE = 4096  # bytes of a line of the guest's console
CONNECT_TIMEOUT = 5.0  # seconds; a live guest answers or refuses within a millisecond


@dataclass(frozen=True, slots=True)
class Prepared:
    """A process with its RAM mapped, wired to a slot nobody has used. Any snapshot that is the template's memory or a
    delta to it can be loaded into it."""

    vm: Vm
    slot: Slot


@dataclass(frozen=True, slots=True)
class Warmed:
    """A machine restored from a template ahead of time, with a disk of its own, that has done once what every sandbox
    does first, and was stopped again. Nobody has used it."""

    vm: Vm
    slot: Slot
    folder: Path  # becomes the sandbox's directory


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Running:
    """One incarnation of a sandbox: from start or resume until pause or end."""

    vm: Vm
    slot: Slot
    incarnation: str
    closed: asyncio.Future[None] = field(default_factory=_future)  # done when connections must be dropped
    console: int = 0  # bytes of the guest's serial console that were read as lines

    async def console_lines(self) -> list[str]:
        """The whole lines that the guest has written to its serial console since the last call. Raises VmmError."""
        text, end = await self.vm.serial_since(self.console)
        whole = text.rfind(b"\n") + 1
        if len(text) - whole > CONSOLE_LINE:
            whole = len(text)  # what never ends is no line
        self.console = end - (len(text) - whole)
        return [line for line in text[:whole].decode(errors="replace").splitlines() if line.strip()]

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
        self._prepared: WarmPool[str, Prepared] = WarmPool(
            self._prepare, self._discard, size=pool, hot=hot, broken=_is_dead
        )
        self._warmed: WarmPool[str, Warmed] = WarmPool(
            self._warm_up, self._discard_warmed, size=pool, hot=hot, broken=_is_dead, quiet=WARM_UP_QUIET
        )

    @property
    def kind(self) -> str:
        return self._vmm.kind.value

    @property
    def version(self) -> str:
        return self._vmm.version

    def directory(self, sandbox_id: str) -> Path:
        return self._home.sandboxes / sandbox_id

    def disk(self, sandbox_id: str, template: Template) -> Disk:
        return _disk(self.directory(sandbox_id), template)

    def ready(self, template_id: str) -> tuple[int, int]:
        """How many machines of this template wait: warmed, and prepared."""
        return self._warmed.count(template_id), self._prepared.count(template_id)

    async def warm(self, template_id: str) -> None:
        """Begin to keep machines ready from which sandboxes of this template start."""
        await self._warmed.warm(template_id)

    async def warmed(self, template_id: str) -> None:
        """Wait until a machine of a template that is kept warm is ready, or making one has failed."""
        await self._warmed.ready(template_id)

    async def expect_resume(self, template_id: str) -> None:
        """A sandbox of this template was paused: begin to keep machines ready into which its memory can be loaded."""
        await self._prepared.warm(template_id)

    async def start(self, template: Template, sandbox_id: str, policy: Policy) -> Running:
        """A fresh machine for a new sandbox, with the sandbox's directory and a private, empty disk in it.

        The machine is PAUSED. It was restored from the template's snapshot, ahead of time where one waits.
        """
        warmed = self._warmed.take_ready(template.id)
        if warmed is None:
            return await self.restore_template(template, sandbox_id, policy)
        try:
            if policy != Policy():
                await warmed.slot.apply(policy)
            set_background(warmed.vm.pid, False)
            warmed.folder.rename(self.directory(sandbox_id))
        except BaseException:
            await self._discard_warmed(warmed)
            raise
        return Running(warmed.vm, warmed.slot, secrets.token_hex(8))

    async def restore_template(
        self, template: Template, sandbox_id: str, policy: Policy, *, pooled: bool = True
    ) -> Running:
        """`start` without a machine that was restored ahead; `pooled=False` starts a VMM although one waits."""
        folder = self.directory(sandbox_id)
        _make_disk(folder, template)
        return await self.restore(template, _disk(folder, template), policy, pooled=pooled)

    async def restore(
        self, template: Template, disk: Disk, policy: Policy, paused: Path | None = None, *, pooled: bool = True
    ) -> Running:
        """Restore the template's snapshot, or the pause in directory `paused`, which is a delta to the same memory
        image. The machine is PAUSED: its vCPUs have not run yet."""
        prepared = await (self._prepared.take(template.id) if pooled else self._prepare(template.id))
        try:
            if policy != Policy():
                await prepared.slot.apply(policy)
            state = template.state if paused is None else paused / STATE_NAME
            delta = None if paused is None else paused / DELTA_NAME
            await restore(prepared.vm, state=state, disk=disk, delta=delta)
        except BaseException as error:
            died = isinstance(error, VmmError) and prepared.vm.exited.done()
            await self._discard(prepared)
            if not (died and pooled):
                raise
        else:
            return Running(prepared.vm, prepared.slot, secrets.token_hex(8))
        # It died while it waited and nobody had noticed yet: that is not the caller's misfortune.
        return await self.restore(template, disk, policy, paused, pooled=False)

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
        for leftover in (staging, target):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir(mode=0o700)
        try:
            stats = await capture_delta(running.vm, staging, parent_image=template.memory)
            staging.rename(target)
            sync_directory(target.parent)
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
        for folder in self._home.staging.glob(f"{WARM_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return ended

    def folders(self) -> list[Path]:
        """The directories of all sandboxes."""
        return [path for path in self._home.sandboxes.iterdir() if path.is_dir()]

    async def cool(self, template_id: str) -> None:
        """Stop keeping machines of this template ready."""
        await self._warmed.cool(template_id)
        await self._prepared.cool(template_id)

    async def close(self) -> None:
        await asyncio.gather(self._warmed.close(), self._prepared.close())

    async def _prepare(self, template_id: str) -> Prepared:
        template = self._repository.find(template_id)
        template.manifest.require_vmm(self._vmm)
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

    async def _warm_up(self, template_id: str) -> Warmed:
        """Restore the template and let the guest do once what every sandbox does first.

        Under software emulation most of a guest's first answer and first command is translation of its code, which
        this leaves behind in the VMM. It runs in the background: nobody waits for it.
        """
        template = self._repository.find(template_id)
        folder = self._home.staging / f"{WARM_PREFIX}{secrets.token_hex(6)}"
        prepared = await self._prepare(template_id)
        try:
            set_background(prepared.vm.pid, True)
            _make_disk(folder, template)
            await restore(prepared.vm, state=template.state, disk=_disk(folder, template))
            await prepared.vm.resume()
            async with asyncio.timeout(WARM_UP_TIMEOUT):
                await _rehearse(prepared.slot, template)
            await prepared.vm.pause()
        except BaseException as error:
            await self._discard(prepared)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, TimeoutError):
                raise GuestError(f"a guest of template {template.title} took over {WARM_UP_TIMEOUT} s") from error
            raise
        return Warmed(prepared.vm, prepared.slot, folder)

    async def _discard_warmed(self, warmed: Warmed) -> None:
        try:
            await self._discard(Prepared(warmed.vm, warmed.slot))
        finally:
            shutil.rmtree(warmed.folder, ignore_errors=True)

    async def _discard(self, prepared: Prepared) -> None:
        try:
            await prepared.vm.kill()
        finally:
            await self._slots.release(prepared.slot)

    def _run_dir(self) -> Path:
        return self._home.run / f"vm-{secrets.token_hex(6)}"


def _is_dead(item: Prepared | Warmed) -> bool:
    return item.vm.exited.done()


def _disk(folder: Path, template: Template) -> Disk:
    return Disk(folder / DISK_NAME, "qcow2", backing=template.disk)


def _make_disk(folder: Path, template: Template) -> None:
    """A directory with an empty disk over the template's."""
    folder.mkdir(mode=0o711)
    try:
        create_overlay(folder / DISK_NAME, template.disk, template.disk_size)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _rehearse(slot: Slot, template: Template) -> None:
    """Initialise the agent and run a command, as for a sandbox that nobody will get to see."""

    async def connect(port: int) -> socket.socket:
        return await slot.connect(port, CONNECT_TIMEOUT)

    async def dial() -> Connection:
        return await Connection.open(await connect(ENVD_PORT))

    context = template.manifest.context
    for _ in range(REHEARSALS):
        body = identity(
            "rehearsal",
            template.id,
            token=None,
            env=context.env,
            user=context.user,
            workdir=context.workdir or "",
            incarnation="rehearsal",
            machine_id=secrets.token_hex(16),
        )
        await Agent(connect, None).init(body)
        async for event in Processes(dial, {"Host": "guest"}).start("/bin/bash", ["-l", "-c", "true"]):
            if isinstance(event, Ended) and event.exit_code != 0:
                raise GuestError(f"a command of a fresh guest ended with {event.status}")
