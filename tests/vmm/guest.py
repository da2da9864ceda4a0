"""A tiny real guest for the tests of VMM and snapshots: a stock kernel and the program guest.c as PID 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv.boot import cpio
from aenv.boot.cmdline import host_tsc_khz
from aenv.boot.kernel import ensure_kernel
from aenv.boot.modules import ModuleTree
from aenv.vmm.base import Disk, Machine, MemoryMap, Vm, Vmm, VmmKind
from aenv.vmm.qemu import QemuVmm

MEMORY_MIB = 160
DISK_SIZE = 8 << 20
SECTOR = 512
PATIENCE = 60.0  # seconds for a loaded host; nothing waits that long when all is well


@dataclass(frozen=True)
class Guest:
    """A booted and captured guest: what a template is to the product."""

    machine: Machine
    folder: Path

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def state(self) -> Path:
        return self.folder / "state"


def write_command(disk: Path, command: str) -> None:
    """Tell the guest what to do next: it reads the first sector again and again."""
    with disk.open("r+b") as file:
        file.write(command.encode().ljust(SECTOR, b"\0"))


def new_disk(path: Path, command: str = "IDLE") -> Disk:
    with path.open("wb") as file:
        file.truncate(DISK_SIZE)
    write_command(path, command)
    return Disk(path, "raw")


async def console(vm: Vm, text: str) -> str:
    """Wait until the guest has printed `text`."""
    async with asyncio.timeout(PATIENCE):
        while text not in (seen := await vm.serial_tail(1 << 16)):
            assert not vm.exited.done(), vm.exited.result()
            await asyncio.sleep(0.01)  # the console gives no event
    return seen


@contextlib.asynccontextmanager
async def killed(vm: Vm) -> AsyncIterator[Vm]:
    try:
        yield vm
    finally:
        await vm.kill()
        assert not vm.run_dir.exists()


def build_machine(folder: Path) -> Machine:
    cache = os.environ.get("AENV_TEST_CACHE", str(Path(tempfile.gettempdir()) / "aenv-test-cache"))
    kernel = ensure_kernel(Path(cache), print)
    init = folder / "init"
    source = Path(__file__).with_name("guest.c")
    subprocess.run(["cc", "-O2", "-static", "-Wall", "-o", str(init), str(source)], check=True)
    modules = ModuleTree(kernel.modules_dir).resolve(["virtio_mmio", "virtio_blk"])
    paths = [f"{number}.ko" for number in range(len(modules))]
    archive = cpio.write_archive(
        [
            cpio.directory("dev"),
            cpio.character_device("dev/console", 5, 1),
            cpio.regular("init", init.read_bytes(), 0o755),
            *(cpio.regular(p, m.data) for p, m in zip(paths, modules, strict=True)),
            cpio.regular("modules.list", "".join(f"/{p}\n" for p in paths).encode()),
        ]
    )
    initrd = folder / "initrd"
    initrd.write_bytes(archive)
    cmdline = f"console=ttyS0 quiet reboot=t panic=-1 tsc_early_khz={host_tsc_khz()} mitigations=off"
    return Machine(1, MEMORY_MIB, kernel.boot_image, initrd, cmdline)


async def ram(vm: Vm) -> bytes:
    """All guest memory, as the process has it."""
    (region,) = await vm.memory_regions()
    with open(f"/proc/{vm.pid}/mem", "rb") as file:
        file.seek(region.address)
        return file.read(region.length)


async def capture_guest(folder: Path) -> Guest:
    vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
    machine = build_machine(folder)
    disk = new_disk(folder / "disk")
    vm = await vmm.boot(machine, disk=disk, nic=None, run_dir=folder / "run")
    async with killed(vm):
        await console(vm, "round 0: IDLE")
        await vm.pause()
        guest = Guest(machine, folder)
        await vm.save_state(guest.state)
        guest.memory.write_bytes(await ram(vm))
    return guest


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("guest")
    yield asyncio.run(capture_guest(folder))
    shutil.rmtree(folder)


async def prepared(guest: Guest, run_dir: Path, vmm: Vmm | None = None) -> Vm:
    """A machine that waits for the guest's state, with the guest's memory."""
    vmm = vmm or await QemuVmm.detect(VmmKind.QEMU_TCG)
    vm = await vmm.prepare(guest.machine, nic=None, run_dir=run_dir)
    try:
        await vm.map_memory(MemoryMap.whole(guest.memory, MEMORY_MIB << 20))
    except BaseException:
        await vm.kill()
        raise
    return vm


async def load(vm: Vm, state: Path, disk: Disk) -> None:
    """PREPARED → PAUSED."""
    await vm.attach_disk(disk)
    await vm.load_state(state)
