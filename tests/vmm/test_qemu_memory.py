"""Memory of real machines: mapped from files when they are restored, and again while they are paused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from aenv.errors import ConflictError, InvalidInputError, LimitError, VmmError
from aenv.vmm import mapper
from aenv.vmm.base import MAX_EXTENTS, MAX_FILES, PAGE, Disk, MemoryExtent, MemoryMap, Vm, VmmKind, VmState
from aenv.vmm.qemu import QemuVm, QemuVmm
from tests.processes import open_files
from tests.vmm.guest import MEMORY_MIB, Guest, console, killed, load, new_disk, prepared, ram, write_command

pytestmark = pytest.mark.vm

SIZE = MEMORY_MIB << 20
PAGES = SIZE // PAGE


async def changed(vm: Vm) -> list[int]:
    """Numbers of the pages that are the process's own: neither absent nor a file's (see pagemap.rst of the kernel)."""
    (region,) = await vm.memory_regions()
    with open(f"/proc/{vm.pid}/pagemap", "rb") as file:
        file.seek(region.address // PAGE * 8)
        entries = struct.unpack(f"={PAGES}Q", file.read(PAGES * 8))
    return [page for page, bits in enumerate(entries) if bits >> 62 & 1 or (bits >> 63 and not bits >> 61 & 1)]


async def capture(vm: Vm, layer: Path, file: int) -> list[MemoryExtent]:
    """Write the pages that the guest has changed to a file; the extents that map them, as file number `file`."""
    memory, extents, at = await ram(vm), [], 0
    with layer.open("xb") as out:
        for page in await changed(vm):
            out.write(memory[page * PAGE : (page + 1) * PAGE])
            last = extents[-1] if extents else None
            if last is not None and last.guest_offset + last.length == page * PAGE:
                extents[-1] = MemoryExtent(last.guest_offset, last.length + PAGE, file, last.file_offset)
            else:
                extents.append(MemoryExtent(page * PAGE, PAGE, file, at))
            at += PAGE
    return extents


def test_one_process_serves_any_snapshot(guest: Guest, tmp_path: Path):
    """The same prepared machine takes base and layer of a snapshot made later, and goes on from there."""

    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        generic = await vmm.prepare(guest.machine, nic=None, run_dir=tmp_path / "generic")
        async with killed(generic):
            disk = new_disk(tmp_path / "disk", "FILL 8")
            async with killed(await prepared(guest, tmp_path / "run", vmm)) as source:
                await load(source, guest.state, disk)
                await source.resume()
                await console(source, "FILL 8")
                write_command(disk.path, "SUM  8")
                seen = await console(source, "SUM  8")
                await source.pause()
                await source.save_state(tmp_path / "state")
                layer = await capture(source, tmp_path / "layer", 1)
                expected = await ram(source)
            assert 8 << 20 < (tmp_path / "layer").stat().st_size < 16 << 20
            whole = MemoryExtent(0, SIZE, 0, 0)
            await generic.map_memory(MemoryMap.of(SIZE, (guest.memory,), [whole]))
            await generic.map_memory(MemoryMap.of(SIZE, (guest.memory, tmp_path / "layer"), layer))
            assert await ram(generic) == expected
            await load(generic, tmp_path / "state", disk)
            write_command(disk.path, "SUM  8;")
            await generic.resume()
            total = next(line for line in seen.splitlines() if line.startswith("sum"))
            assert total in await console(generic, "SUM  8;")

    uvloop.run(main())


def test_memory_of_a_new_process_is_empty_and_clean(guest: Guest, tmp_path: Path):
    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        async with killed(await vmm.prepare(guest.machine, nic=None, run_dir=tmp_path / "run")) as vm:
            assert (await ram(vm))[1 << 20 :] == bytes(SIZE - (1 << 20))  # below lie tables of the firmware
            await vm.map_memory(MemoryMap.whole(guest.memory, SIZE))
            await vm.populate([(0, SIZE)])
            # Read, mapped, populated: nothing of that is a change.
            assert await ram(vm) == guest.memory.read_bytes()
            assert await changed(vm) == []

    asyncio.run(main())


def test_many_extents(guest: Guest, tmp_path: Path):
    """As many as there may be, in a scattered order of the file; memory is still one region."""

    async def main() -> None:
        layer = tmp_path / "layer"
        layer.write_bytes(random.Random(1).randbytes(64 * PAGE))
        extents = [MemoryExtent(n * 2 * PAGE, PAGE, 1, n * 7 % 64 * PAGE) for n in range(MAX_EXTENTS)]
        content, expected = layer.read_bytes(), bytearray(guest.memory.read_bytes())
        for extent in extents:
            at, source = extent.guest_offset, extent.file_offset
            expected[at : at + PAGE] = content[source : source + PAGE]
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            before = await vm.memory_regions()
            many = MemoryMap.of(SIZE, (guest.memory, layer), extents)
            await vm.map_memory(many)
            assert await vm.memory_regions() == before
            assert await ram(vm) == expected
            # Mappings are limited: told before anything is changed.
            odd = [MemoryExtent(e.guest_offset + PAGE, PAGE, 1, e.file_offset) for e in extents]
            with pytest.raises(LimitError, match="mappings"):
                await vm.map_memory(MemoryMap.of(SIZE, (guest.memory, layer), odd))
            assert await ram(vm) == expected
            # Fewer mappings than it had: counted again, not only added up.
            for _ in range(3):
                await vm.map_memory(MemoryMap.whole(guest.memory, SIZE))
                await vm.map_memory(many)
            assert await ram(vm) == expected

    asyncio.run(main())


def test_source_shares_its_own_snapshot_and_goes_on(guest: Guest, tmp_path: Path):
    """Re-homing: its changed pages become pages of the layer's file; afterwards only new changes are changes."""

    async def main() -> None:
        disk = new_disk(tmp_path / "disk", "FILL 32")
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            await load(vm, guest.state, disk)
            await vm.resume()
            await console(vm, "FILL 32")
            write_command(disk.path, "SUM  32")
            seen = await console(vm, "SUM  32")
            total = next(line for line in seen.splitlines() if line.startswith("sum"))
            for number in range(3):
                await vm.pause()
                layer = tmp_path / f"layer{number}"
                before, extents = await ram(vm), await capture(vm, layer, 0)
                image = layer.read_bytes()
                assert len(image) > 32 << 20 if number == 0 else len(image) < 8 << 20
                await vm.map_memory(MemoryMap.of(SIZE, (layer,), extents))
                assert await ram(vm) == before
                assert await changed(vm) == []
                await vm.resume()
                write_command(disk.path, f"SUM  32;{number}")
                assert (await console(vm, f"SUM  32;{number}")).count(total) == number + 2
                assert layer.read_bytes() == image
            write_command(disk.path, "ZERO 32")
            await console(vm, "ZERO 32")
            assert layer.read_bytes() == image

    asyncio.run(main())


def test_memory_with_a_hole_for_devices_is_one_region(guest: Guest, tmp_path: Path):
    """For the guest what is beyond 3 GiB lies above 4 GiB; for us it follows."""
    size, hole = 5 << 30, 3 << 30

    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(size)
            file.seek(hole - 4)
            file.write(b"low.high")
        machine = dataclasses.replace(guest.machine, memory_mib=size >> 20, vcpus=2)
        async with killed(await vmm.prepare(machine, nic=None, run_dir=tmp_path / "run")) as vm:
            (region,) = await vm.memory_regions()
            assert (region.guest_offset, region.length) == (0, size)
            await vm.map_memory(MemoryMap.whole(image, size))
            assert isinstance(vm, QemuVm)
            for place, text in ((hole - 4, "l"), (4 << 30, "h")):
                shown = await vm._command("human-monitor-command", {"command-line": f"xp /1bc {place:#x}"})
                assert shown.endswith(f"'{text}'\r\n")

    asyncio.run(main())


def test_no_file_of_memory_is_open_for_writing(guest: Guest, tmp_path: Path):
    """Nor open at all: a VMM that was taken over holds mappings, which are private."""

    async def main() -> None:
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            assert str(guest.memory) not in open_files(vm.pid).values()
            lines = [line.split() for line in Path(f"/proc/{vm.pid}/maps").read_text().splitlines()]
            assert {fields[1] for fields in lines if fields[-1] == str(guest.memory)} == {"rw-p"}

    asyncio.run(main())


def test_bad_maps_are_refused(guest: Guest, tmp_path: Path):
    async def main() -> None:
        good = MemoryMap.whole(guest.memory, SIZE)
        (tmp_path / "short").write_bytes(bytes(PAGE))
        async with killed(await prepared(guest, tmp_path / "run")) as vm:
            for bad, field in (
                (MemoryMap.whole(guest.memory, SIZE - PAGE), "map.size"),
                (MemoryMap(SIZE, good.files, good.extents[:-1]), "map.extents"),
                (MemoryMap(SIZE, good.files, good.extents * (MAX_EXTENTS + 1)), "map.extents"),
                (MemoryMap(SIZE, good.files * (MAX_FILES + 1), good.extents), "map.files"),
            ):
                with pytest.raises(InvalidInputError, match=field.replace(".", r"\.")):
                    await vm.map_memory(bad)
            for broken, why in (
                (MemoryMap.whole(tmp_path / "none", SIZE), "No such file"),
                (MemoryMap.whole(tmp_path / "short", SIZE), "file_offset of entry 0"),
                (MemoryMap(SIZE, (), good.extents), "file index of entry 0"),
                (MemoryMap(SIZE, good.files, good.extents * 2), "guest_offset of entry 1"),
            ):
                with pytest.raises(VmmError, match=why):
                    await vm.map_memory(broken)
            for ranges in ([(-PAGE, PAGE)], [(0, SIZE + PAGE)], [(SIZE, PAGE)], [(0, 0)], [(0, PAGE)] * 16385):
                with pytest.raises(InvalidInputError, match="ranges"):
                    await vm.populate(ranges)
            with pytest.raises(VmmError, match="guest_offset of entry 0"):
                await vm.populate([(1, PAGE)])
            assert await ram(vm) == guest.memory.read_bytes()
            await load(vm, guest.state, new_disk(tmp_path / "disk"))
            await vm.resume()
            with pytest.raises(ConflictError, match="running"):
                await vm.map_memory(good)
            await vm.populate([(0, SIZE)])
            os.kill(vm.pid, signal.SIGKILL)
            with pytest.raises(VmmError):
                await vm.populate([(0, SIZE)])
            await vm.exited
            with pytest.raises(ConflictError, match="exited"):
                await vm.map_memory(good)

    asyncio.run(main())


def test_another_daemon_maps_memory(guest: Guest, tmp_path: Path):
    async def first() -> tuple[int, int]:
        vm = await prepared(guest, tmp_path / "run")
        await load(vm, guest.state, new_disk(tmp_path / "disk"))
        await vm.detach()
        return vm.pid, vm.start_time

    async def second(pid: int, start_time: int) -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        vm = await vmm.adopt(pid, start_time, tmp_path / "run")
        async with killed(vm):
            await vm.map_memory(MemoryMap.whole(guest.memory, SIZE))  # what it has already
            assert await ram(vm) == guest.memory.read_bytes()
            write_command(tmp_path / "disk", "ADOPTED")
            await vm.resume()
            await console(vm, "ADOPTED")

    asyncio.run(second(*uvloop.run(first())))


def test_library_that_cannot_be_loaded_is_an_error(guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        monkeypatch.setattr(mapper, "START_TIMEOUT", 0.5)
        for content, why in ((None, "cannot open"), (b"no library", "cannot be preloaded")):
            monkeypatch.setattr(mapper, "LIBRARY", tmp_path / "library")
            if content is not None:
                (tmp_path / "library").write_bytes(content)
            with pytest.raises(VmmError, match=why):
                await vmm.prepare(guest.machine, nic=None, run_dir=tmp_path / "run")
            assert not (tmp_path / "run").exists()

    asyncio.run(main())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Disk, Path]]:
    """A disk on a file system that is full until the second file is removed."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    try:
        disk = new_disk(folder / "disk")
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        yield disk, filler
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_failing_disk_stops_the_machine_and_the_guest_never_knows(
    guest: Guest, tmp_path: Path, small_disk: tuple[Disk, Path]
):
    disk, filler = small_disk

    async def first() -> tuple[int, int]:
        told: asyncio.Queue[str] = asyncio.Queue()

        async def failed() -> str:
            return await asyncio.wait_for(told.get(), 60)

        vm = await prepared(guest, tmp_path / "run")
        try:
            vm.on_io_error = told.put_nowait
            await load(vm, guest.state, disk)
            await vm.resume()
            write_command(disk.path, "SAVE 77")
            assert "No space" in await failed()
            assert vm.state is VmState.IO_ERROR
            with pytest.raises(ConflictError, match="io-error"):
                await vm.save_state(tmp_path / "state")
            await vm.resume()
            await failed()  # again
            assert vm.state is VmState.IO_ERROR
            await vm.pause()
            assert vm.state is VmState.PAUSED
            await vm.save_state(tmp_path / "state")
            await vm.resume()
            await failed()
            await vm.detach()
        except BaseException:
            await vm.kill()
            raise
        return vm.pid, vm.start_time

    async def second(pid: int, start_time: int) -> None:
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        async with killed(await vmm.adopt(pid, start_time, tmp_path / "run")) as vm:
            assert vm.state is VmState.IO_ERROR
            assert "saved" not in await vm.serial_tail()
            filler.unlink()
            await vm.resume()
            assert "error" not in await console(vm, "saved 77")
            assert vm.state is VmState.RUNNING

    asyncio.run(second(*asyncio.run(first())))
