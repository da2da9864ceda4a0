"""Capture and restore of real guests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from aenv._native import memory
from aenv.errors import VmmError
from aenv.snapshot import capture
from aenv.snapshot.capture import capture_delta, capture_template
from aenv.snapshot.restore import apply_delta, restore
from aenv.vmm.base import VmState
from tests.vmm.guest import MEMORY_MIB, Guest, console, killed, new_disk, prepared, write_command

pytestmark = pytest.mark.vm


def line_after(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(word))


def test_pause_and_resume_again_and_again(guest: Guest, tmp_path: Path):
    """What the guest has written to memory survives two pauses; each delta is to the template's image alone."""

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "FILL 24")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=guest.state, disk=disk)
            await vm.resume()
            await console(vm, "FILL 24")
            write_command(disk.path, "SUM  24")
            expected = line_after(await console(vm, "SUM  24"), "sum ")
            (tmp_path / "one").mkdir()
            stats = await capture_delta(vm, tmp_path / "one", parent_image=guest.memory)
            assert vm.state is VmState.PAUSED
            assert stats.stored_pages >= 24 << 8
            assert stats.memory_bytes == (tmp_path / "one/memory.lsmt").stat().st_size
        write_command(disk.path, "SUM  24;two")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=tmp_path / "one/state", disk=disk, delta=tmp_path / "one/memory.lsmt")
            await vm.resume()
            assert line_after(await console(vm, "SUM  24;two"), "sum ") == expected
            (tmp_path / "two").mkdir()
            await capture_delta(vm, tmp_path / "two", parent_image=guest.memory)
        shutil.rmtree(tmp_path / "one")
        write_command(disk.path, "SUM  24;three")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=tmp_path / "two/state", disk=disk, delta=tmp_path / "two/memory.lsmt")
            await vm.resume()
            assert line_after(await console(vm, "SUM  24;three"), "sum ") == expected

    asyncio.run(main())


def test_zeroed_memory_is_not_stored(guest: Guest, tmp_path: Path):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "ZERO 64")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=guest.state, disk=disk)
            await vm.resume()
            await console(vm, "ZERO 64")
            stats = await capture_delta(vm, tmp_path, parent_image=guest.memory)
            assert stats.dirty_pages >= 64 << 8
            assert stats.stored_pages < 16 << 8

    asyncio.run(main())


def test_guest_goes_on_after_a_capture(guest: Guest, tmp_path: Path):
    """And a template made of it while it runs starts from the captured moment."""

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "FILL 4")
        target = tmp_path / "template"
        target.mkdir()
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=guest.state, disk=disk)
            await vm.resume()
            await console(vm, "FILL 4")
            await capture_template(vm, target, parent_image=guest.memory)
            assert sorted(os.listdir(target)) == ["memory", "state"]
            await vm.resume()
            write_command(disk.path, "SUM  4")
            expected = line_after(await console(vm, "SUM  4"), "sum ")
        assert (target / "memory").stat().st_size == MEMORY_MIB << 20
        write_command(disk.path, "SUM  4;child")
        child = Guest(guest.machine, target)
        async with killed(await prepared(child, tmp_path / "run")) as vm:
            await restore(vm, state=child.state, disk=disk)
            await vm.resume()
            assert line_after(await console(vm, "SUM  4;child"), "sum ") == expected

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["state", "memory", "sync"])
def test_failed_capture_leaves_guest_and_directory_usable(guest: Guest, tmp_path: Path, monkeypatch, moment: str):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk")
        target = tmp_path / "target"
        target.mkdir()
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=guest.state, disk=disk)
            await vm.resume()
            with monkeypatch.context() as patch:
                if moment == "state":
                    (target / "state").touch()  # in the way
                elif moment == "memory":
                    (tmp_path / "short").write_bytes(bytes(4096))
                else:
                    patch.setattr(capture, "_sync", lambda *paths: (_ for _ in ()).throw(OSError("disk failure")))
                parent = tmp_path / "short" if moment == "memory" else guest.memory
                with pytest.raises((OSError, VmmError)):
                    await capture_delta(vm, target, parent_image=parent)
            assert os.listdir(target) == []
            assert vm.state is VmState.PAUSED
            await vm.resume()
            write_command(disk.path, "ALIVE")
            await console(vm, "ALIVE")
            await capture_delta(vm, target, parent_image=guest.memory)

    asyncio.run(main())


def test_death_of_the_vmm_during_a_capture(guest: Guest, tmp_path: Path, monkeypatch):
    async def main() -> None:
        disk = new_disk(tmp_path / "disk")
        target = tmp_path / "target"
        target.mkdir()
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await restore(vm, state=guest.state, disk=disk)
            await vm.resume()
            real = memory.capture

            def die_first(pid: int, *rest: object, **options: object) -> object:
                pidfd = os.pidfd_open(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
                os.close(pidfd)
                return real(pid, *rest, **options)  # type: ignore[arg-type]

            monkeypatch.setattr(memory, "capture", die_first)
            with pytest.raises(VmmError):
                await capture_delta(vm, target, parent_image=guest.memory)
            assert os.listdir(target) == []
            assert (await vm.exited).reason.startswith("QEMU was killed by SIGKILL")

    asyncio.run(main())


def test_hostile_delta_is_refused(guest: Guest, tmp_path: Path):
    async def main() -> None:
        (tmp_path / "delta").write_bytes(bytes(8192))
        disk = new_disk(tmp_path / "disk")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            with pytest.raises(VmmError, match=r"delta is damaged: header\.magic"):
                await restore(vm, state=guest.state, disk=disk, delta=tmp_path / "delta")
            with pytest.raises(VmmError, match="cannot open"):
                await apply_delta(vm, tmp_path / "none")

    asyncio.run(main())
