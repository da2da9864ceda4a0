"""Real machines under QEMU."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from aenv.errors import ConflictError, InvalidInputError, NotFoundError, VmmError
from aenv.vmm import qemu
from aenv.vmm.base import Disk, MemoryMap, VmmKind, VmState
from aenv.vmm.qemu import QemuVmm
from aenv.vmm.qemu_command import SERIAL_RING
from aenv.vmm.spawn import process_start_time, processes_in
from tests.processes import open_files
from tests.vmm.guest import (
    MEMORY_MIB,
    PATIENCE,
    SECTOR,
    Guest,
    console,
    killed,
    load,
    new_disk,
    prepared,
    write_command,
)

pytestmark = pytest.mark.vm


def test_restored_guest_goes_on_with_the_disk_it_is_given(guest: Guest, tmp_path: Path):
    """Memory and program go on (no second READY); the disk is the new one."""

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "HELLO-FROM-DISK")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            assert vm.state is VmState.PREPARED
            await load(vm, guest.state, disk)
            assert vm.state is VmState.PAUSED
            await vm.resume()
            assert vm.state is VmState.RUNNING
            assert "READY" not in await console(vm, "HELLO-FROM-DISK")

    uvloop.run(main())


def test_what_the_guest_writes_stays_on_its_disk(guest: Guest, tmp_path: Path):
    """And reaches it past the page cache."""

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "SAVE 42")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            flags = [
                int(re.search(r"flags:\s+(\d+)", Path(f"/proc/{vm.pid}/fdinfo/{fd}").read_text())[1], 8)
                for fd, name in open_files(vm.pid).items()
                if name == str(disk.path)
            ]
            assert flags
            assert all(flag & os.O_DIRECT and flag & os.O_ACCMODE == os.O_RDWR for flag in flags)
            await vm.resume()
            await console(vm, "saved 42")
            await vm.pause()
        write_command(disk.path, "SHOW ")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            await vm.resume()
            await console(vm, "shown saved 42")

    asyncio.run(main())


def test_quiet_tells_a_guest_that_works_from_one_that_waits(guest: Guest, tmp_path: Path):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "HELLO")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            assert await vm.quiet(0), "it does not run"
            await vm.resume()
            await console(vm, ": HELLO")
            assert await vm.quiet(PATIENCE), "it sleeps between looks at its disk"
            write_command(disk.path, "FLOOD")
            await console(vm, "quick brown fox")
            assert not await vm.quiet(0.1)
            await vm.pause()
            assert await vm.quiet(0)
        assert await vm.quiet(PATIENCE), "it is gone"

    asyncio.run(main())


@pytest.mark.parametrize("restored", [True, False])
def test_what_the_guest_discards_is_given_back(guest: Guest, tmp_path: Path, restored: bool):
    """Each node of the disk must pass it on."""

    async def main() -> None:
        disk, vmm = new_disk(tmp_path / "disk", "TRIM 4"), await QemuVmm.detect(VmmKind.QEMU_TCG)
        with disk.path.open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"x" * (6 << 20))
        before = disk.path.stat().st_blocks
        if restored:
            vm = await prepared(guest, tmp_path / "run", vmm)
        else:
            vm = await vmm.boot(guest.machine, disk=disk, nic=None, run_dir=tmp_path / "run")
        async with killed(vm):
            if restored:
                await load(vm, guest.state, disk)
                await vm.resume()
            await console(vm, "trimmed 4")
        content = disk.path.read_bytes()
        assert content[1 << 20 : 2 << 20] == content[6 << 20 : 7 << 20] == b"x" * (1 << 20)
        assert content[2 << 20 : 6 << 20] == bytes(4 << 20)
        assert before - disk.path.stat().st_blocks == (4 << 20) // SECTOR

    asyncio.run(main())


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    disk = new_disk(tmp_path / "backing", "SAVE 44")
    done = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", str(disk.path)], check=True, capture_output=True, text=True
    )
    yield Path(done.stdout.strip())
    subprocess.run(["losetup", "--detach", done.stdout.strip()], check=True)


@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="the kernel has no loop devices")
def test_disk_may_be_a_block_device(guest: Guest, tmp_path: Path, loop_device: Path):
    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        async with killed(await prepared(guest, tmp_path / "run", vmm)) as vm:
            await load(vm, guest.state, Disk(loop_device))
            await vm.resume()
            await console(vm, "saved 44")
        disk = Disk(loop_device)
        async with killed(await vmm.boot(guest.machine, disk=disk, nic=None, run_dir=tmp_path / "run")) as vm:
            await console(vm, "saved 44")

    asyncio.run(main())


def test_disk_that_cannot_do_without_the_page_cache_is_served(
    guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real_open = os.open

    def refuse(path: os.PathLike[str] | str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "SAVE 43")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            await vm.resume()
            await console(vm, "saved 43")

    asyncio.run(main())


def test_process_is_confined(guest: Guest, tmp_path: Path):
    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        async with (
            killed(await prepared(guest, tmp_path / "run1", vmm)) as one,
            killed(await prepared(guest, tmp_path / "run2", vmm)) as two,
        ):
            uids = set()
            for vm in (one, two):
                status = Path(f"/proc/{vm.pid}/status").read_text()
                fields = dict(line.split(":\t", 1) for line in status.splitlines())
                assert set(fields["Gid"].split()) == {str(qemu.GROUP)}
                assert fields["Groups"].strip() == ""
                assert int(fields["CapEff"], 16) == 0
                assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
                uids |= set(fields["Uid"].split())
                assert "Max core file size        0" in Path(f"/proc/{vm.pid}/limits").read_text()
            assert len(uids) == 2
            assert all(int(uid) > qemu.UID_BASE for uid in uids)
            assert [pid for pid, _ in processes_in(two.run_dir)] == [two.pid]

    asyncio.run(main())


def test_memory_image_is_shared_and_never_changed(guest: Guest, tmp_path: Path):
    async def main() -> None:
        image = guest.memory.read_bytes()
        disk = new_disk(tmp_path / "disk", "FILL 8")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            await vm.resume()
            await console(vm, "FILL 8")
            regions = await vm.memory_regions()
            assert [(r.pid, r.guest_offset, r.length) for r in regions] == [(vm.pid, 0, len(image))]
        assert guest.memory.read_bytes() == image

    asyncio.run(main())


def test_end_of_the_guest_is_told_with_its_last_words(guest: Guest, tmp_path: Path):
    async def main() -> None:
        for command, reason, words in (
            ("HALT ", "the guest shut down (guest-reset)", "reboot: Restarting"),
            ("PANIC", "the guest shut down (guest-reset)", "Attempted to kill init"),
        ):
            disk = new_disk(tmp_path / "disk", command)
            async with killed(await prepared(guest, tmp_path / "run")) as vm:
                await load(vm, guest.state, disk)
                await vm.resume()
                end = await asyncio.wait_for(vm.exited, 60)
                assert end.reason == reason
                assert words in end.serial_tail
                assert vm.state is VmState.EXITED
                with pytest.raises(ConflictError):
                    await vm.pause()
                assert words in await vm.serial_tail()

    asyncio.run(main())


def test_death_of_the_process_is_noticed(guest: Guest, tmp_path: Path):
    async def main() -> None:
        vm = await prepared(guest, tmp_path / "run")
        async with killed(vm):
            await load(vm, guest.state, new_disk(tmp_path / "disk"))
            await vm.resume()
            os.kill(vm.pid, signal.SIGKILL)
            assert (await asyncio.wait_for(vm.exited, 60)).reason.startswith("QEMU was killed by SIGKILL")
            for operation in (vm.pause, vm.resume, vm.memory_regions):
                with pytest.raises((ConflictError, VmmError)):
                    await operation()
        await vm.kill()  # a second time

    asyncio.run(main())


def test_death_in_the_middle_of_each_step(guest: Guest, tmp_path: Path):
    """No step hangs and none succeeds silently."""

    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        disk = new_disk(tmp_path / "disk")
        for step in ("attach_disk", "load_state", "resume", "pause", "save_state"):
            async with killed(await prepared(guest, tmp_path / "run", vmm)) as vm:
                calls = {
                    "attach_disk": lambda vm=vm: vm.attach_disk(disk),
                    "load_state": lambda vm=vm: vm.load_state(guest.state),
                    "resume": vm.resume,
                    "pause": vm.pause,
                    "save_state": lambda vm=vm: vm.save_state(tmp_path / "state"),
                }
                for name, call in calls.items():
                    if name == step:
                        os.kill(vm.pid, signal.SIGKILL)
                        with pytest.raises((VmmError, ConflictError)):
                            await asyncio.wait_for(call(), 60)
                        break
                    await call()
                assert not (tmp_path / "state").exists()

    asyncio.run(main())


def test_flooded_console_keeps_its_end(guest: Guest, tmp_path: Path):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "FLOOD")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            await vm.resume()
            await console(vm, "fox" + " jumps over the lazy dog")
            tails = [await vm.serial_tail(1 << 20) for _ in range(20)]
            assert all(len(tail) <= SERIAL_RING for tail in tails)
            assert await vm.serial_tail(0) == ""
            text, end = await vm.serial_since(0)
            assert 0 < len(text) <= min(end, SERIAL_RING)
            assert (await vm.serial_since(end + 10**9))[0] == b""
            more, later = await vm.serial_since(end)
            assert len(more) <= later - end

    asyncio.run(main())


def test_another_daemon_adopts_the_machine(guest: Guest, tmp_path: Path):
    async def first() -> tuple[int, int]:
        vm = await prepared(guest, tmp_path / "run")
        await load(vm, guest.state, new_disk(tmp_path / "disk"))
        await vm.resume()
        await vm.detach()
        return vm.pid, process_start_time(vm.pid)

    async def second(pid: int, start_time: int) -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        with pytest.raises(NotFoundError):
            await vmm.adopt(pid, start_time + 1, tmp_path / "run")
        vm = await vmm.adopt(pid, start_time, tmp_path / "run")
        async with killed(vm):
            assert vm.state is VmState.RUNNING
            write_command(tmp_path / "disk", "ADOPTED")
            await console(vm, "ADOPTED")
            await vm.pause()
            await vm.save_state(tmp_path / "state")
            assert (await vm.memory_regions())[0].length == guest.memory.stat().st_size
            await vm.resume()
            write_command(tmp_path / "disk", "HALT ")
            assert "shut down" in (await asyncio.wait_for(vm.exited, 60)).reason
        with pytest.raises(NotFoundError):
            await vmm.adopt(pid, start_time, tmp_path / "run")

    second_arguments = uvloop.run(first())
    asyncio.run(second(*second_arguments))


def test_wrong_state_of_the_machine_is_refused(guest: Guest, tmp_path: Path):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            for call in (vm.pause, vm.resume, lambda: vm.save_state(tmp_path / "s")):
                with pytest.raises(ConflictError, match="prepared"):
                    await call()
            with pytest.raises(InvalidInputError, match="read_only"):
                await vm.attach_disk(Disk(disk.path, "raw", read_only=True))
            with pytest.raises(InvalidInputError, match=r"disk\.format"):
                await vm.attach_disk(Disk(disk.path, "vmdk"))
            with pytest.raises(VmmError, match="No such file"):
                await vm.attach_disk(Disk(tmp_path / "none", "raw"))
            await load(vm, guest.state, disk)
            for call in (lambda: vm.attach_disk(disk), lambda: vm.load_state(guest.state)):
                with pytest.raises(ConflictError, match="paused"):
                    await call()
            await vm.pause()
            for _ in range(2):  # what runs already is left alone
                await vm.resume()
                assert vm.state is VmState.RUNNING
            with pytest.raises(ConflictError, match="running"):
                await vm.save_state(tmp_path / "s")

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "noise-inside", "long"])
def test_bad_device_state_is_an_error(guest: Guest, tmp_path: Path, damage: str):
    async def main() -> None:
        good = guest.state.read_bytes()
        bad = {
            "empty": b"",
            "cut": good[: len(good) // 2],
            "noise": os.urandom(len(good)),
            "noise-inside": good[:100] + os.urandom(len(good) - 100),
            "long": good + bytes(2 << 20),
        }[damage]
        (tmp_path / "state").write_bytes(bad)
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            with pytest.raises(VmmError):
                await load(vm, tmp_path / "state", new_disk(tmp_path / "disk"))

    asyncio.run(main())


def test_disk_whose_server_hangs_holds_up_nobody(guest: Guest, tmp_path: Path):
    """A FIFO stands for it: opening one waits for the other end. Nor is anything left when the caller gives up."""

    async def main() -> None:
        os.mkfifo(tmp_path / "fifo")
        before = len(os.listdir("/proc/self/fd"))
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            hanging = MemoryMap.whole(tmp_path / "fifo", MEMORY_MIB << 20)
            # More than the loop's own threads, which are still there afterwards.
            calls = [asyncio.create_task(vm.map_memory(hanging)) for _ in range(40)]
            await asyncio.sleep(0)
            await load(vm, guest.state, new_disk(tmp_path / "disk", "ALIVE"))
            await asyncio.to_thread(lambda: None)
            assert not any(call.done() for call in calls)
            for call in calls:
                call.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls, return_exceptions=True)
            )
            late = os.open(tmp_path / "fifo", os.O_WRONLY)  # now all of them open
            await vm.resume()
            await console(vm, "ALIVE")
            os.close(late)
        async with asyncio.timeout(30):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)  # until the last thread has closed what it got

    asyncio.run(main())


def test_failed_start_leaves_nothing_and_says_why(guest: Guest, tmp_path: Path):
    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        run_dir = tmp_path / "run"
        broken = QemuVmm(VmmKind.QEMU_TCG, version="7.2.0", binary=Path("/bin/false"))
        with pytest.raises(VmmError, match="exited with status 1"):
            await broken.prepare(guest.machine, nic=None, run_dir=run_dir)
        for disk, error in ((Disk(tmp_path / "none"), VmmError), (Disk(guest.memory, "qcow2"), InvalidInputError)):
            with pytest.raises(error):
                await vmm.boot(guest.machine, disk=disk, nic=None, run_dir=run_dir)
        assert not run_dir.exists()
        with pytest.raises(InvalidInputError):
            QemuVmm(VmmKind.FIRECRACKER, version="1", binary=Path("/bin/false"))

    asyncio.run(main())


def test_twenty_restores_in_a_row(guest: Guest, tmp_path: Path):
    """Twenty restores in a row: nothing is left between them and each one runs."""

    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            disk = new_disk(tmp_path / "disk", f"NUMBER {number};")
            async with killed(await prepared(guest, tmp_path / "run", vmm)) as vm:
                await load(vm, guest.state, disk)
                await vm.resume()
                await console(vm, f"NUMBER {number};")
            assert len(os.listdir("/proc/self/fd")) == before

    uvloop.run(main())
