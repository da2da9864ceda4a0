"""The rival of our restore: QEMU's own way, all of memory in one migration stream.

`save` lets a running guest of ours `migrate` to a file; `restore` starts a QEMU with empty memory and has it read that
file by `-incoming`. Same guest, same disk, same devices.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from pathlib import Path

from aenv.network.base import GUEST_MAC, Policy
from aenv.node import Node
from aenv.sandbox.machines import Running
from aenv.storage.repository import Template
from aenv.vmm.base import Nic, VmState
from aenv.vmm.qemu import QemuVm

POLL = 0.001  # seconds


class Rival:
    """One saved guest. `close` removes its files."""

    def __init__(self, node: Node, template: Template, stream: Path, disk: Path) -> None:
        self._node = node
        self._template = template
        self._stream = stream
        self._disk = disk

    @classmethod
    async def save(cls, node: Node, template: Template, folder: Path) -> Rival:
        """Start a guest, stop it, and have QEMU write it to a file."""
        name = f"rival{secrets.token_hex(6)}"
        running = await node.machines.restore_template(template, name, Policy())
        stream = folder / "rival.migration"
        try:
            await running.vm.resume()
            await running.agent(None).health()
            await running.vm.pause()
            fd = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                await _command(running, "getfd", {"fdname": "out"}, fd)
            finally:
                os.close(fd)
            await _command(running, "migrate", {"uri": "fd:out"})
            await _migrated(running)
            disk = folder / "rival.qcow2"
            shutil.copyfile(node.machines.disk(name, template).path, disk)
        finally:
            await node.machines.end(running)
            shutil.rmtree(node.machines.directory(name))
        return cls(node, template, stream, disk)

    async def restore(self) -> Running:
        """From nothing to a stopped machine with all its memory. `end` it with `Machines.end`."""
        name = f"rival{secrets.token_hex(6)}"
        machines = self._node.machines
        machines.directory(name).mkdir()
        disk = machines.disk(name, self._template)
        shutil.copyfile(self._disk, disk.path)
        slot = await self._node.slots.take()
        tap = slot.tap_fd()
        try:
            vm = await self._node.vmm.prepare(
                self._template.machine,
                memory_image=_blank(self._stream.parent, self._template.manifest.memory_mib),
                nic=Nic(tap, GUEST_MAC),
                run_dir=self._node.home.run / f"vm-{name}",
            )
        finally:
            os.close(tap)
        running = Running(vm, slot, name)
        await vm.attach_disk(disk)
        fd = os.open(self._stream, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await _command(running, "getfd", {"fdname": "in"}, fd)
        finally:
            os.close(fd)
        await _command(running, "migrate-incoming", {"uri": "fd:in"})
        await _migrated(running)
        vm.state = VmState.PAUSED
        shutil.rmtree(machines.directory(name))
        return running

    def close(self) -> None:
        for path in (self._stream, self._disk, _blank(self._stream.parent, self._template.manifest.memory_mib)):
            path.unlink(missing_ok=True)


def _blank(folder: Path, memory_mib: int) -> Path:
    path = folder / "rival.blank"
    with path.open("ab") as file:
        file.truncate(memory_mib << 20)
    return path


async def _command(running: Running, command: str, arguments: dict[str, object], fd: int = -1) -> object:
    """The monitor takes one connection, so the rival shares the machine's own."""
    assert isinstance(running.vm, QemuVm)
    return await running.vm._command(command, arguments, fd=fd)


async def _migrated(running: Running) -> None:
    """Wait for a migration in either direction; it has no other sign that both QEMU 7.2 and 10 give."""
    while True:
        status = await _command(running, "query-migrate", {})
        assert isinstance(status, dict)
        match status.get("status"):
            case "completed":
                return
            case "failed" | "cancelled":
                raise RuntimeError(f"the rival's migration ended: {status}")
        await asyncio.sleep(POLL)
