"""Machines for sandboxes: a VM together with the network slot it is wired to and the disk it writes to.

This is where VMM, network, snapshots and disks meet; it knows checkpoints and directories, not sandbox states.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from aenv.agent.client import Agent
from aenv.errors import GuestError, InvalidInputError, NotFoundError, VmmError
from aenv.network.base import GUEST_MAC, Policy
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.sandbox.rehearsal import CONNECT_TIMEOUT, rehearse
from aenv.sandbox.store import Machine, Record
from aenv.sandbox.working_sets import WorkingSets
from aenv.snapshot.capture import CaptureStats, capture, sync_capture
from aenv.snapshot.checkpoint import INDEX_SUFFIX, LAYER_SUFFIX, STATE_SUFFIX, Checkpoint, new_layer_id
from aenv.snapshot.manifest import MANIFEST_NAME
from aenv.snapshot.map import memory_map
from aenv.snapshot.rehome import rehome
from aenv.snapshot.restore import restore
from aenv.storage.disks import Disks, OpenDisk
from aenv.storage.home import Home
from aenv.storage.memory import MemoryImages
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import MAX_EXTENTS, Disk, MemoryMap, Nic, Vm, Vmm
from aenv.vmm.base import Machine as Shape
from aenv.vmm.pool import WarmPool
from aenv.vmm.spawn import Process, processes_in, set_background

T = TypeVar("T")

ID_ALPHABET = string.ascii_lowercase + string.digits
WARM_MARK = ".warm"  # in the directory of a machine that waits in the pool
WARM_UP_TIMEOUT = 120  # seconds; a busy host leaves it little time
WARM_UP_QUIET = 0.5  # seconds after a create: its user's first commands go before
CONSOLE_LINE = 4096  # bytes of a line of the guest's console


def new_sandbox_id() -> str:
    """`i` and 20 lower-case letters or digits, the form the E2B clients know."""
    return "i" + "".join(secrets.choice(ID_ALPHABET) for _ in range(20))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A process with empty RAM, wired to a slot nobody has used. Any checkpoint of its shape can be loaded into it."""

    vm: Vm
    slot: Slot


@dataclass(frozen=True, slots=True)
class Warmed:
    """A machine restored from a template ahead of time, in the directory of the sandbox it is to become, that has done
    once what every sandbox does first, and was stopped again. Nobody has used it."""

    sandbox_id: str
    running: Running


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture left in the sandbox's directory: names of files, not yet durable."""

    memory: str
    state: str
    stats: CaptureStats


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Running:
    """One incarnation of a sandbox: from start or resume until pause or end."""

    vm: Vm
    slot: Slot
    incarnation: str
    disk: OpenDisk
    # What its RAM was made of, files in the disk's folder; empty after a cold boot. The next capture's layer belongs on
    # top of these: if `remember` of the last one failed, it is not among them.
    memory_layers: tuple[str, ...]
    memory: MemoryMap | None  # the same, as the next capture compares with it; None as long as nobody has looked
    closed: asyncio.Future[None] = field(default_factory=_future)  # done when connections must be dropped
    retrying: bool = False  # a failed disk request is being tried again
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
        return Running(self.vm, self.slot, secrets.token_hex(8), self.disk, self.memory_layers, self.memory)

    def agent(self, token: str | None) -> Agent:
        return Agent(self.connect, token)


class Machines:
    """Makes, captures, adopts and ends machines. All methods leave nothing behind when they raise."""

    def __init__(
        self,
        home: Home,
        vmm: Vmm,
        slots: SlotPool,
        repository: Repository,
        disks: Disks,
        memory: MemoryImages,
        *,
        pool: int,
        pool_max: int,
        hot: int,
    ) -> None:
        self._home = home
        self._vmm = vmm
        self._slots = slots
        self._repository = repository
        self._disks = disks
        self._memory = memory
        self._prepared: WarmPool[Shape, Prepared] = WarmPool(
            self._prepare, self._discard, size=pool, limit=pool_max, hot=hot, broken=_is_dead
        )
        self._warmed: WarmPool[str, Warmed] = WarmPool(
            self._warm_up,
            self._discard_warmed,
            size=pool,
            limit=pool,
            hot=hot,
            broken=_has_died,
            quiet=WARM_UP_QUIET,
        )
        self._working_sets = WorkingSets(home.cache / "working-sets")
        self._reserved: dict[str, Warmed] = {}  # by the id of the sandbox that gets it

    @property
    def kind(self) -> str:
        return self._vmm.kind.value

    @property
    def version(self) -> str:
        return self._vmm.version

    def directory(self, sandbox_id: str) -> Path:
        return self._home.sandboxes / sandbox_id

    def folders(self) -> list[Path]:
        """The directories of all sandboxes."""
        return [path for path in self._home.sandboxes.iterdir() if path.is_dir()]

    def tidy(self, record: Record, *machines: Running | None) -> None:
        """Remove the files in a sandbox's directory that neither its record nor an open disk needs. Hidden ones are
        somebody's work under way."""
        needed = {MANIFEST_NAME, *record.disk, *record.memory, record.upper, record.state_file}
        for running in machines:
            if running is not None:
                needed |= {*running.disk.layers, running.disk.upper, *running.memory_layers}
        for path in self.directory(record.id).iterdir():
            layer = path.with_suffix(LAYER_SUFFIX).name if path.suffix == INDEX_SUFFIX else path.name
            if layer not in needed and not path.name.startswith("."):
                path.unlink(missing_ok=True)

    # Pools

    def ready(self, template: Template) -> tuple[int, int]:
        """How many machines wait for this template: warmed ones of its own, and prepared ones of its shape."""
        return self._warmed.count(template.id), self._prepared.count(template.machine)

    async def warm(self, template: Template) -> None:
        """Begin to keep machines ready from which sandboxes of this template start."""
        await self._warmed.warm(template.id)

    async def warmed(self, template: Template) -> None:
        """Wait until a machine of a template that is kept warm is ready, or making one has failed."""
        await self._warmed.ready(template.id)

    async def expect(self, shape: Shape) -> None:
        """Something of this shape may be restored soon: begin to keep processes ready for it."""
        await self._prepared.warm(shape)

    async def cool(self, template: Template) -> None:
        """Stop keeping machines of this template ready."""
        await self._warmed.cool(template.id)

    async def close(self) -> None:
        for warmed in self._reserved.values():
            await self._discard_warmed(warmed)
        self._reserved.clear()
        await asyncio.gather(self._warmed.close(), self._prepared.close())

    # Start

    def require(self, template: Template) -> None:
        """Raise UnavailableError, naming what differs, when this node cannot restore a machine of the template."""
        template.manifest.require_vmm(self._vmm)

    def reserve(self, template: Template) -> str:
        """The id of the next sandbox of this template. A machine that waits for it is kept until `start`."""
        warmed = self._warmed.take_ready(template.id)
        if warmed is None:
            return new_sandbox_id()
        self._reserved[warmed.sandbox_id] = warmed
        return warmed.sandbox_id

    async def start(self, template: Template, sandbox_id: str, policy: Policy) -> Running:
        """A fresh machine for a new sandbox whose id was reserved: PAUSED if the template has a memory, else booting.

        The sandbox's directory is made, with links to all layers and a private disk.
        """
        warmed = self._reserved.pop(sandbox_id, None)
        if warmed is None:
            return await self.branch(template, template.checkpoint, sandbox_id, policy)
        try:
            if policy != Policy():
                await warmed.running.slot.apply(policy)
            set_background(warmed.running.vm.pid, False)
            (self.directory(sandbox_id) / WARM_MARK).unlink()
        except BaseException:
            await self._discard_warmed(warmed)
            raise
        return warmed.running

    async def branch(
        self,
        template: Template,
        source: Checkpoint,
        sandbox_id: str,
        policy: Policy,
        *,
        pooled: bool = True,
        memory: MemoryMap | None = None,
    ) -> Running:
        """A machine for a new sandbox from any checkpoint, in whose directory there is a manifest, too;
        `pooled=False` starts a VMM although one waits."""
        if source.state is not None:
            self.require(template)
        else:
            template.manifest.require_boot_files()
        folder = self.directory(sandbox_id)
        folder.mkdir(mode=0o711, exist_ok=True)
        try:
            os.link(source.directory / MANIFEST_NAME, folder / MANIFEST_NAME)
            checkpoint = source.link_into(folder)
            if checkpoint.state is None:
                return await self.boot(checkpoint, policy)
            if memory is not None:  # what it names in the source's directory is here, too, and stays
                here = (folder / file.name if file.parent == source.directory else file for file in memory.files)
                memory = replace(memory, files=tuple(here))
            running = await self.restore(checkpoint, policy, pooled=pooled, memory=memory)
            (folder / checkpoint.state).unlink()
            return running
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, FileNotFoundError) and not source.directory.exists():
                raise NotFoundError(f"template {template.title} does not exist") from error  # it was just deleted
            if isinstance(error, FileNotFoundError):
                raise VmmError(f"template {template.title} is damaged: {error.filename} is missing") from error
            raise

    async def restore(
        self, checkpoint: Checkpoint, policy: Policy, *, pooled: bool = True, memory: MemoryMap | None = None
    ) -> Running:
        """A machine from a checkpoint in its sandbox's directory, PAUSED: its vCPUs have not run yet. `memory` is the
        checkpoint's, if the caller knows it."""
        assert checkpoint.state_file is not None
        mapping = _known(memory) if memory is not None else self._map(checkpoint.machine, checkpoint.memory_layers)
        taking = self._prepared.take(checkpoint.machine) if pooled else self._prepare(checkpoint.machine)
        prepared, disk, mapped = await asyncio.gather(
            taking, self._disks.open(checkpoint), mapping, return_exceptions=True
        )
        try:
            prepared, disk, mapped = _result(prepared), _result(disk), _result(mapped)
            if policy != Policy():
                await prepared.slot.apply(policy)
            await restore(prepared.vm, state=checkpoint.state_file, disk=Disk(disk.path, "raw"), memory=mapped)
        except BaseException as error:
            died = isinstance(error, VmmError) and isinstance(prepared, Prepared) and prepared.vm.exited.done()
            if isinstance(prepared, Prepared):
                await self._discard(prepared)
            if isinstance(disk, OpenDisk):
                await self._disks.discard(disk)
            if isinstance(error, InvalidInputError):
                raise VmmError(f"what should be restored is damaged: {error}") from error
            if not (died and pooled):
                raise
        else:
            return Running(prepared.vm, prepared.slot, secrets.token_hex(8), disk, checkpoint.memory, mapped)
        # It died while it waited and nobody had noticed yet: that is not the caller's misfortune.
        return await self.restore(checkpoint, policy, pooled=False, memory=memory)

    async def boot(self, checkpoint: Checkpoint, policy: Policy) -> Running:
        """Cold boot from a checkpoint's disk in its sandbox's directory."""
        slot = await self._slots.take()
        try:
            if policy != Policy():
                await slot.apply(policy)
            try:
                disk = await self._disks.open(checkpoint)
            except InvalidInputError as error:
                raise VmmError(f"the disk is damaged: {error}") from error
            try:
                tap = slot.tap_fd()
                try:
                    vm = await self._vmm.boot(
                        checkpoint.machine,
                        disk=Disk(disk.path, "raw"),
                        nic=Nic(tap, GUEST_MAC),
                        run_dir=self._run_dir(),
                    )
                finally:
                    os.close(tap)
            except BaseException:
                await self._disks.discard(disk)
                raise
        except BaseException:
            await self._slots.release(slot)
            raise
        return Running(vm, slot, secrets.token_hex(8), disk, (), None)

    async def map_memory(self, checkpoint: Checkpoint) -> MemoryMap:
        """What several machines of one checkpoint can be restored with."""
        return await self._map(checkpoint.machine, checkpoint.memory_layers)

    async def _map(self, shape: Shape, layers: list[Path], *, limit: int | None = MAX_EXTENTS) -> MemoryMap:
        """What RAM is made of: one image that many share, and the layers over it, in at most `limit` pieces."""
        size = shape.memory_mib << 20
        base = await self._memory.open(layers[:1])
        found = await asyncio.to_thread(memory_map, size, base, layers[1:], self._zero(size), limit=limit)
        await self._working_sets.read_ahead(MemoryMap.whole(base, size), layers[0].name)
        if found is None:  # too scattered to be mapped piece by piece
            found = memory_map(size, await self._memory.open(layers), [], self._zero(size))
            assert found is not None
        return found

    def _zero(self, size: int) -> Path:
        path = self._home.cache / f"zero-{size >> 20}"
        with path.open("ab") as file:
            file.truncate(size)
        return path

    # Capture

    async def capture(self, running: Running, shape: Shape, *, restack: bool, goes_on: bool) -> Captured:
        """Stop the vCPUs and write device state and changed memory into the sandbox's directory.

        With `restack` the disk gets a new writable layer at the same moment. A guest that `goes_on` is stopped for less
        time, but it takes longer in all. The machine stays paused, whatever
        happens: the caller ends it or lets it run on. Nothing is durable before `settle`.
        """
        folder, name = running.disk.folder, new_layer_id()
        state, layer = folder / f"{name}{STATE_SUFFIX}", folder / f"{name}{LAYER_SUFFIX}"

        async def beside() -> None:
            if restack:
                await self._disks.restack(running.disk)

        await self.ready_to_capture(running, shape)
        captured = await capture(
            running.vm, state=state, layer=layer, parent=running.memory, beside=beside, ahead=goes_on
        )
        return Captured(layer.name, state.name, captured.stats)

    async def restack(self, running: Running) -> None:
        """Give the disk a new writable layer; what was written before is a layer of its own."""
        await self._disks.restack(running.disk)

    async def replace(self, running: Running, layers: Sequence[str]) -> None:
        """The disk's layers below the writable one were merged: these have the same content."""
        await self._disks.replace(running.disk, layers)

    async def rehome(self, running: Running, captured: Captured, shape: Shape) -> None:
        """A paused machine's RAM is made of the layer that was just captured from it, too: its pages become mappings of
        the file, as far as that is quick. So they are shared, and the next capture need not look at them.

        After VmmError the machine is good for nothing but `end`; after any other error it may run on.
        """
        size, layer = shape.memory_mib << 20, running.disk.folder / captured.memory
        content = await asyncio.to_thread(memory_map, size, None, [layer], self._zero(size), limit=None)
        running.memory_layers, running.memory = (*running.memory_layers, captured.memory), None
        if content is not None:
            await rehome(running.vm, captured.stats, content)

    async def remember(self, running: Running, shape: Shape, layers: Sequence[str]) -> None:
        """These layers in the disk's folder are what the machine's memory is compared with in the next capture."""
        paths = [running.disk.folder / name for name in layers]
        running.memory = await self._map(shape, paths, limit=None) if layers else None
        running.memory_layers = tuple(layers)

    async def ready_to_capture(self, running: Running, shape: Shape) -> None:
        """Know what the machine's memory is compared with: the next capture, which needs that, is quicker."""
        if running.memory is None:
            await self.remember(running, shape, running.memory_layers)

    async def settle(self, checkpoint: Checkpoint) -> None:
        """Make all files of a checkpoint durable."""
        if checkpoint.state_file is not None:
            for layer in checkpoint.memory_layers:  # a fork does not wait for its own: any of them may not be there yet
                await sync_capture(checkpoint.state_file, layer)
        await self._disks.seal(checkpoint.directory, checkpoint.disk)

    async def seal(self, folder: Path, layers: Sequence[str]) -> None:
        """Make disk layers durable and sealed."""
        await self._disks.seal(folder, layers)

    # End and adoption

    async def drop_upper(self, running: Running) -> None:
        """Remove what an ended machine wrote to its disk."""
        await self._disks.discard(running.disk)

    async def end(self, running: Running) -> None:
        """Kill the machine, give its slot back and close its disk."""
        running.close()
        try:
            await self._discard(Prepared(running.vm, running.slot))
        finally:
            if running.vm.exited.done():  # else it has its disk open still
                await self._disks.close(running.disk)

    async def adopt(self, machine: Machine, folder: Path) -> Running:
        """Take over a machine of an earlier daemon. Raises NotFoundError when it or its disk is gone. What its memory
        is made of is not known yet: `remember` tells."""
        slot = await self._slots.adopt(machine.slot)
        try:
            disk = await self._disks.find(machine.disk, folder)
            vm = await self._vmm.adopt(machine.pid, machine.start_time, Path(machine.run_dir))
        except BaseException:
            await self._slots.release(slot)
            raise
        return Running(vm, slot, machine.incarnation, disk, (), None)

    async def abandon(self, machine: Machine, folder: Path) -> tuple[str, ...] | None:
        """End what is left of a machine of an earlier daemon. Gives the layers of its disk, lowest first and the one
        it wrote to last; None when the block server does not know it any more."""
        try:
            await Process.adopt(machine.pid, machine.start_time).kill()
        except NotFoundError:
            pass  # it has ended by itself
        shutil.rmtree(machine.run_dir, ignore_errors=True)
        try:
            slot = await self._slots.adopt(machine.slot)
        except NotFoundError:
            pass  # remade or released already
        else:
            await self._slots.release(slot)
        try:
            disk = await self._disks.find(machine.disk, folder)
        except NotFoundError:
            return None
        await self._disks.close(disk)
        return (*disk.layers, disk.upper)

    async def sweep(self, machines: list[Machine]) -> int:
        """Kill the VMM processes of this home that are not among `machines`: they waited in the pool of a daemon that
        was killed. Closes their disks. Returns how many there were."""
        keep = {Path(machine.run_dir) for machine in machines}
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
        await self._disks.sweep({machine.disk for machine in machines})
        return ended

    # Making

    async def _prepare(self, shape: Shape) -> Prepared:
        slot = await self._slots.take()
        try:
            tap = slot.tap_fd()
            try:
                vm = await self._vmm.prepare(shape, nic=Nic(tap, GUEST_MAC), run_dir=self._run_dir())
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
        sandbox_id = new_sandbox_id()
        folder = self.directory(sandbox_id)
        folder.mkdir(mode=0o711)
        (folder / WARM_MARK).touch()
        running = await self.branch(template, template.checkpoint, sandbox_id, Policy())
        warmed = Warmed(sandbox_id, running)
        try:
            set_background(running.vm.pid, True)
            await running.vm.resume()
            async with asyncio.timeout(WARM_UP_TIMEOUT):
                await rehearse(running.slot, template)
            await running.vm.pause()
            await self._working_sets.record(running.vm, running.memory_layers, template.machine)
        except BaseException as error:
            await self._discard_warmed(warmed)
            if isinstance(error, TimeoutError):
                raise GuestError(f"a guest of template {template.title} took over {WARM_UP_TIMEOUT} s") from error
            raise
        return warmed

    async def _discard_warmed(self, warmed: Warmed) -> None:
        try:
            await self.end(warmed.running)
        finally:
            shutil.rmtree(self.directory(warmed.sandbox_id), ignore_errors=True)

    async def _discard(self, prepared: Prepared) -> None:
        try:
            await prepared.vm.kill()
        finally:
            await self._slots.release(prepared.slot)

    def _run_dir(self) -> Path:
        return self._home.run / f"vm-{secrets.token_hex(6)}"


async def _known(memory: MemoryMap) -> MemoryMap:
    return memory


def _is_dead(item: Prepared) -> bool:
    return item.vm.exited.done()


def _has_died(item: Warmed) -> bool:
    return item.running.vm.exited.done()


def _result(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
