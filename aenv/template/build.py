"""Building a template: a disk image, one boot of it, and a snapshot of memory and disk when the agent answers."""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from aenv.agent.client import ENVD_PORT, Agent, identity
from aenv.agent.process import Ended, Processes
from aenv.boot.cmdline import kernel_cmdline
from aenv.boot.initramfs import build_initramfs
from aenv.boot.kernel import ensure_kernel
from aenv.errors import AenvError, GuestError
from aenv.http.client import Connection
from aenv.network.base import GUEST_MAC, Uplink, UplinkKind
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.snapshot.capture import write_base
from aenv.snapshot.checkpoint import LAYER_SUFFIX, new_layer_id
from aenv.snapshot.manifest import STATE_NAME, BootFile, Context, Disk, Manifest, SnapshotKind
from aenv.storage.home import Home
from aenv.storage.image import import_raw
from aenv.storage.repository import Repository, Template, new_template_id
from aenv.template.rootfs import build_rootfs
from aenv.vmm.base import Disk as VmDisk
from aenv.vmm.base import Machine, Nic, Vm, Vmm

Progress = Callable[[str], None]
CONTEXT = Context(workdir="/home/user")
CONNECT_TIMEOUT = 2.0
# Run before the snapshot: what the first commands of every child need is then in the guest's page cache, and so in
# the memory image that all children share.
WARM_UP = (
    "true",
    "TERM=xterm bash -i -l -c true 2>/dev/null",
    "ls -la /home/user /tmp >/dev/null; cat /etc/os-release >/dev/null",
    "python3 -c 'import asyncio, http.server, json, os, re, subprocess, sys'",
    "git --version >/dev/null; sudo -n true",
)
WARM_UP_ROUNDS = 2
WARM_UP_TIMEOUT = 120  # seconds
SETTLE_SECONDS = 2.0  # of quiet afterwards: what a guest still does by itself, no child should have to


@dataclass(frozen=True, slots=True)
class Sizes:
    vcpus: int = 1
    memory_mib: int = 512
    disk_mib: int = 2048


class Builder:
    """Builds templates into one home. `boot_timeout` is in seconds."""

    def __init__(self, home: Home, vmm: Vmm, repository: Repository, progress: Progress, *, boot_timeout: int) -> None:
        self._home = home
        self._vmm = vmm
        self._repository = repository
        self._progress = progress
        self._boot_timeout = boot_timeout

    def base(self, name: str, sizes: Sizes) -> Template:
        """The Debian base template. Blocks for minutes; leaves nothing behind when it fails or is interrupted."""
        staged = self._home.staging / f"build-{secrets.token_hex(6)}"
        staged.mkdir(mode=0o700)
        try:
            self._progress("kernel")
            kernel = ensure_kernel(self._home.cache, self._progress)
            guest = importlib.resources.files("aenv._guest")
            initrd = build_initramfs(kernel, Path(str(guest / "init")), Path(str(guest / "envd")), self._home.cache)
            self._progress("root file system")
            disk = staged / "disk.raw"
            build_rootfs(disk, self._home.cache / "rootfs", self._progress, disk_mib=sizes.disk_mib)
            machine = Machine(sizes.vcpus, sizes.memory_mib, kernel.boot_image, initrd, kernel_cmdline(self._vmm.kind))
            memory_layer, disk_layer = (f"{new_layer_id()}{LAYER_SUFFIX}" for _ in range(2))
            uvloop.run(self._boot_and_capture(machine, disk, staged, memory_layer))
            self._progress("disk layer")
            written = import_raw(disk, staged / disk_layer)
            self._progress(f"disk of {written.data >> 20} MiB")
            disk.unlink()
            manifest = Manifest(
                id=new_template_id(),
                build_id=str(uuid.uuid4()),
                kind=SnapshotKind.TEMPLATE,
                created=time.time(),
                vmm_kind=self._vmm.kind,
                vmm_version=self._vmm.version,
                cpu_model=self._vmm.cpu_model,
                devices=self._vmm.devices,
                vcpus=sizes.vcpus,
                memory_mib=sizes.memory_mib,
                kernel=BootFile.of(machine.kernel),
                initrd=BootFile.of(machine.initrd),
                cmdline=machine.cmdline,
                memory=[memory_layer],
                disk=Disk([disk_layer], sizes.disk_mib << 20),
                context=CONTEXT,
            )
            manifest.save(staged)
            return self._repository.commit(staged, [name])
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    async def _boot_and_capture(self, machine: Machine, disk: Path, staged: Path, layer: str) -> None:
        # A tag of its own: a daemon that serves this home must not take our slot for a leftover.
        slots = SlotPool(
            uplink=Uplink(UplinkKind.NONE), size=0, tag=f"{self._home.tag[:4]}{secrets.token_hex(2)}", limit=1
        )
        await slots.start()
        try:
            slot = await slots.take()
            try:
                self._progress(f"first boot ({self._vmm.kind})")
                began = time.monotonic()
                vm = await self._boot(machine, disk, slot)
                try:
                    await self._wait_for_agent(vm, slot)
                    self._progress(f"the agent answers after {time.monotonic() - began:.1f} s")
                    await self._warm_up(slot)
                    await asyncio.sleep(SETTLE_SECONDS)  # nothing tells when a guest has settled
                    self._progress("snapshot")
                    state, memory = staged / STATE_NAME, staged / layer
                    stats = await write_base(vm, state=state, layer=memory)
                    self._progress(f"memory of {stats.stored_pages * 4096 >> 20} MiB")
                finally:
                    await vm.kill()
            finally:
                await slots.release(slot)
        finally:
            await slots.close()

    async def _boot(self, machine: Machine, disk: Path, slot: Slot) -> Vm:
        tap = slot.tap_fd()
        try:
            return await self._vmm.boot(
                machine,
                disk=VmDisk(disk, "raw"),
                nic=Nic(tap, GUEST_MAC),
                run_dir=self._home.run / f"build-{secrets.token_hex(6)}",
            )
        finally:
            os.close(tap)

    async def _warm_up(self, slot: Slot) -> None:
        """Do once what the first commands of a sandbox do. Raises GuestError when one of them fails."""
        self._progress("warm-up")

        async def dial() -> Connection:
            return await Connection.open(await slot.connect(ENVD_PORT, CONNECT_TIMEOUT))

        async with asyncio.timeout(WARM_UP_TIMEOUT):
            for _ in range(WARM_UP_ROUNDS):
                body = identity(
                    "warmup",
                    "warmup",
                    token=None,
                    env=CONTEXT.env,
                    user=CONTEXT.user,
                    workdir=CONTEXT.workdir or "",
                    incarnation="warmup",
                    machine_id=secrets.token_hex(16),
                )
                await Agent(lambda port: slot.connect(port, CONNECT_TIMEOUT), None).init(body)
                for command in WARM_UP:
                    async for event in Processes(dial, {"Host": "guest"}).start("/bin/bash", ["-l", "-c", command]):
                        if isinstance(event, Ended) and event.exit_code != 0:
                            raise GuestError(f"warm-up command {command!r} ended with {event.status}")

    async def _wait_for_agent(self, vm: Vm, slot: Slot) -> None:
        """Ask until it answers: a booting guest has nothing earlier to tell us with."""
        agent = Agent(lambda port: slot.connect(port, CONNECT_TIMEOUT), None)
        deadline = time.monotonic() + self._boot_timeout
        reason = "no answer"
        while time.monotonic() < deadline and not vm.exited.done():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await agent.health()
                return
            except (GuestError, TimeoutError) as error:
                reason = str(error) or reason
            await asyncio.wait([vm.exited], timeout=0.1)
        try:
            tail = vm.exited.result().serial_tail if vm.exited.done() else await vm.serial_tail()
        except AenvError as error:
            tail = f"(serial console: {error})"
        raise GuestError(f"the guest agent did not answer within {self._boot_timeout} s ({reason}):\n{tail}")
