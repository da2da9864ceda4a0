"""The rivals of our snapshots: QEMU's own ways, which save all of memory and read it back.

One guest, the same as ours (kernel, sizes, devices), on a qcow2 disk. `migrate` writes it to a file, `-incoming` starts
another process from that file; `savevm` and `loadvm` write it into the qcow2 image and take it back in place.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv.network.base import GUEST_MAC
from aenv.network.slot import Slot
from aenv.node import Node
from aenv.storage.repository import Template
from aenv.vmm.base import Nic, VmState
from aenv.vmm.qemu import QemuVm
from aenv.vmm.spawn import run

POLL = 0.001  # seconds
PATIENCE = 600  # seconds that one command of QEMU may take
TAG = "bench"


@dataclass(frozen=True, slots=True)
class RivalGuest:
    """A machine of QEMU's alone: its disk is a qcow2 file, its memory is nobody else's."""

    vm: QemuVm
    slot: Slot
    disk: Path

    async def connect(self, port: int) -> socket.socket:
        return await self.slot.connect(port, 5)

    async def command(self, command: str, arguments: dict[str, object] | None = None, fd: int = -1) -> object:
        """The monitor takes one connection, so the rival shares the machine's own."""
        return await self.vm._command(command, arguments, fd=fd, timeout=PATIENCE)

    async def monitor(self, line: str) -> None:
        """A command of the human monitor, which answers with nothing when all is well."""
        answer = await self.command("human-monitor-command", {"command-line": line})
        if answer:
            raise RuntimeError(f"{line}: {answer}")


class Rival:
    """The guest and what was saved of it."""

    def __init__(self, node: Node, template: Template, folder: Path) -> None:
        self._node = node
        self._template = template
        self._folder = folder
        self._stream = folder / "stream"
        self.guest: RivalGuest

    @classmethod
    @asynccontextmanager
    async def start(cls, node: Node, template: Template) -> AsyncIterator[Rival]:
        """A running guest in the template's state."""
        folder = node.home.staging / f"rival-{secrets.token_hex(6)}"
        folder.mkdir(mode=0o711)
        try:
            rival = cls(node, template, folder)
            rival.guest = await rival._launch(await rival._convert())
            try:
                state = template.checkpoint.state_file
                assert state is not None
                await rival.guest.vm.map_memory(await node.machines.map_memory(template.checkpoint))
                await rival.guest.vm.load_state(state)
                await rival.guest.vm.resume()
                yield rival
            finally:
                await rival.end(rival.guest)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)

    async def _convert(self) -> Path:
        """The template's disk as qcow2."""
        disks, disk = self._node.machines._disks, self._folder / "disk.qcow2"
        layers = self._folder / "layers"
        layers.mkdir()
        shown = await disks.open(self._template.checkpoint.link_into(layers))
        try:
            await run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", shown.path, disk], timeout=PATIENCE)
        finally:
            await disks.discard(shown)
        return disk

    async def _launch(self, disk: Path) -> RivalGuest:
        """A process that waits for memory and device state, with a qcow2 disk."""
        slot = await self._node.slots.take()
        try:
            tap = slot.tap_fd()
            try:
                vm = await self._node.vmm.prepare(
                    self._template.machine,
                    nic=Nic(tap, GUEST_MAC),
                    run_dir=self._node.home.run / f"vm-rival{secrets.token_hex(6)}",
                )
            finally:
                os.close(tap)
            assert isinstance(vm, QemuVm)
            guest = RivalGuest(vm, slot, disk)
            try:
                await _attach(guest)
            except BaseException:
                await vm.kill()
                raise
        except BaseException:
            await self._node.slots.release(slot)
            raise
        return guest

    async def end(self, guest: RivalGuest) -> None:
        try:
            await guest.vm.kill()
        finally:
            await self._node.slots.release(guest.slot)

    # migrate and -incoming

    async def migrate(self) -> float:
        """Seconds from the stop of the vCPUs until the whole machine is in a file. It stays stopped: see `go_on`."""
        began = time.perf_counter()
        await self.guest.vm.pause()
        with self._stream.open("wb") as file:
            await self.guest.command("getfd", {"fdname": "out"}, file.fileno())
            # Without a limit of bandwidth, as befits a file.
            await self.guest.command("migrate-set-parameters", {"max-bandwidth": 1 << 40})
            await self.guest.command("migrate", {"uri": "fd:out"})
            await _migrated(self.guest)
        return time.perf_counter() - began

    async def go_on(self) -> float:
        """Let the guest run after `migrate`; seconds that took."""
        began = time.perf_counter()
        await self.guest.vm.resume()
        return time.perf_counter() - began

    async def overlay(self) -> Path:
        """A disk for one `incoming`, made ahead: the guest that was saved keeps its own."""
        disk = self._folder / f"{secrets.token_hex(6)}.qcow2"
        await run(["qemu-img", "create", "-f", "qcow2", "-F", "qcow2", "-b", self.guest.disk, disk])
        return disk

    async def incoming(self, disk: Path) -> RivalGuest:
        """From nothing to a stopped machine with all that `migrate` has saved. `end` it."""
        guest = await self._launch(disk)
        try:
            with self._stream.open("rb") as file:
                await guest.command("getfd", {"fdname": "in"}, file.fileno())
                await guest.command("migrate-incoming", {"uri": "fd:in"})
                await _migrated(guest)
        except BaseException:
            await self.end(guest)
            raise
        guest.vm.state = VmState.PAUSED
        return guest

    @property
    def stored(self) -> int:
        """Bytes of the file that `migrate` wrote last."""
        return self._stream.stat().st_size

    # savevm and loadvm

    async def save(self) -> float:
        """Seconds of one `savevm`, in which the guest stands still."""
        if await self._saved():
            await self.guest.monitor(f"delvm {TAG}")
        began = time.perf_counter()
        await self.guest.monitor(f"savevm {TAG}")
        return time.perf_counter() - began

    async def load(self) -> float:
        """Seconds of a `loadvm` in the process that made the snapshot, until it runs."""
        began = time.perf_counter()
        await self.guest.monitor(f"loadvm {TAG}")
        return time.perf_counter() - began

    async def _saved(self) -> bool:
        answer = await self.guest.command("human-monitor-command", {"command-line": "info snapshots"})
        return isinstance(answer, str) and TAG in answer


async def _attach(guest: RivalGuest) -> None:
    """Put a qcow2 image, and what it is based on, below the node that the disk device looks at."""
    with guest.disk.open("r+b") as top:
        await guest.command("add-fd", {"fdset-id": 100}, top.fileno())
    node: dict[str, object] = {
        "driver": "qcow2",
        "node-name": "image",
        "discard": "unmap",
        "file": {"driver": "file", "filename": "/dev/fdset/100", "locking": "off"},
    }
    below = await _backing(guest.disk)
    if below is not None:
        with below.open("rb") as file:
            await guest.command("add-fd", {"fdset-id": 101}, file.fileno())
        image = {"driver": "file", "filename": "/dev/fdset/101", "locking": "off", "read-only": True}
        node["backing"] = {"driver": "qcow2", "read-only": True, "file": image}
    await guest.command("blockdev-add", node)
    await guest.command("blockdev-reopen", {"options": [{"driver": "raw", "node-name": "disk", "file": "image"}]})


async def _backing(disk: Path) -> Path | None:
    """The file that a qcow2 image made by `overlay` is based on: its name stands where the header says."""
    header = disk.read_bytes()[:4096]
    offset, length = int.from_bytes(header[8:16]), int.from_bytes(header[16:20])
    return Path(os.fsdecode(header[offset : offset + length])) if offset else None


async def _migrated(guest: RivalGuest) -> None:
    """Wait for a migration in either direction; it has no other sign that both QEMU 7.2 and 10 give."""
    while True:
        status = await guest.command("query-migrate")
        assert isinstance(status, dict)
        match status.get("status"):
            case "completed":
                return
            case "failed" | "cancelled":
                raise RuntimeError(f"the rival's migration ended: {status}")
        await asyncio.sleep(POLL)
