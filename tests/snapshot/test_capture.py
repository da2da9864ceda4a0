"""Capture, rehoming and restore of real guests: chains of layers over the guest's memory image."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from aenv._native import memory
from aenv._native.lsmt import Layer
from aenv.errors import VmmError
from aenv.snapshot import capture as module
from aenv.snapshot.capture import Captured, capture, nothing_beside, sync_capture, write_base
from aenv.snapshot.compaction import compact
from aenv.snapshot.map import memory_map
from aenv.snapshot.rehome import MAPPING_LIMIT, rehome
from aenv.snapshot.restore import restore
from aenv.snapshot.working_set import load_working_set, prefetch, record_working_set, save_working_set
from aenv.vmm.base import PAGE, MemoryMap, Vm, VmmKind, VmState
from aenv.vmm.qemu import QemuVmm
from tests.vmm.guest import MEMORY_MIB, Guest, build_machine, console, killed, new_disk, write_command

pytestmark = pytest.mark.vm

SIZE = MEMORY_MIB << 20


class Chain:
    """A guest's image and the layers captured from machines that started from it."""

    def __init__(self, guest: Guest, folder: Path) -> None:
        self.guest, self.folder = guest, folder
        self.layers: list[Path] = []
        self.states = [guest.state]
        self.zero = folder / "zero"
        self.zero.touch()
        os.truncate(self.zero, SIZE)
        self.disk = new_disk(folder / "disk")

    def content(self, count: int | None = None, *, limit: int | None = None) -> MemoryMap:
        found = memory_map(SIZE, self.guest.memory, self.layers[:count], self.zero, limit=limit)
        assert found is not None
        return found

    @asynccontextmanager
    async def restored(self, at: int = -1) -> AsyncIterator[Vm]:
        """A running machine of the state after `at` layers; -1 is the last."""
        count = range(len(self.states))[at]
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        vm = await vmm.prepare(self.guest.machine, nic=None, run_dir=self.folder / "run")
        async with killed(vm):
            await restore(vm, state=self.states[count], disk=self.disk, memory=self.content(count))
            assert vm.state is VmState.PAUSED
            await vm.resume()
            yield vm

    async def capture(self, vm: Vm, *, ahead: bool = True) -> Captured[None]:
        number = len(self.states)
        state, layer = self.folder / f"state-{number}", self.folder / f"layer-{number}"
        done = await capture(vm, state=state, layer=layer, parent=self.content(), beside=nothing_beside, ahead=ahead)
        assert vm.state is VmState.PAUSED
        self.states.append(state)
        self.layers.append(layer)
        return done

    async def rehome(self, vm: Vm, done: Captured[None]) -> int:
        return await rehome(vm, done.stats, self.content())

    def order(self, command: str) -> None:
        write_command(self.disk.path, command)

    def names(self) -> set[str]:
        return set(os.listdir(self.folder)) - {"zero", "disk", "run"}


async def answer(vm: Vm, command: str, word: str) -> str:
    """The line that begins with `word`, of what the guest printed after it was told `command`."""
    text = await console(vm, command)
    return [line for line in text.splitlines() if line.startswith(word)][-1]


@pytest.fixture
def chain(guest: Guest, tmp_path: Path) -> Chain:
    return Chain(guest, tmp_path)


def test_ten_captures_cost_what_changed_since_the_last(chain: Chain):
    """A guest with a small working set; and each state can be restored, also after layers were merged."""

    async def main() -> None:
        chain.order("FILL 24")
        async with chain.restored() as vm:
            await console(vm, "FILL 24")
            first = await chain.capture(vm)
            assert first.stats.stored_pages >= 24 << 8
            assert await chain.rehome(vm, first) >= 24 << 8
            later = []
            for number in range(9):
                chain.order(f"IDLE {number}")
                await vm.resume()
                await console(vm, f"IDLE {number}")
                later.append((await chain.capture(vm, ahead=number % 2 == 0)).stats)
                await chain.rehome(vm, Captured(later[-1], None))
            for stats in later:
                assert stats.dirty_pages < 2 << 8, "pages that were captured before are looked at again"
                assert stats.memory_bytes < 4 << 20
            chain.order("SUM  24")
            await vm.resume()
            expected = await answer(vm, "SUM  24", "sum ")
        for at in (1, 5, -1):
            chain.order(f"SUM  24;{at}")
            async with chain.restored(at) as vm:
                assert await answer(vm, f"SUM  24;{at}", "sum ") == expected
        merged = chain.folder / "merged"
        await compact(chain.layers[3:], merged, below=True)
        chain.layers[3:] = [merged]
        chain.states[4:] = chain.states[-1:]
        chain.order("SUM  24;merged")
        async with chain.restored() as vm:
            assert await answer(vm, "SUM  24;merged", "sum ") == expected

    asyncio.run(main())


def test_pages_written_with_what_they_held_are_rehomed_too(chain: Chain):
    async def main() -> None:
        async with chain.restored() as vm:
            chain.order("FILL 8")
            await console(vm, "FILL 8")
            await chain.rehome(vm, await chain.capture(vm))
            await vm.resume()
            chain.order("FILL 8 ;again")
            await console(vm, "FILL 8 ;again")
            again = await chain.capture(vm)
            assert again.stats.equal_pages >= 8 << 8
            assert again.stats.stored_pages < 2 << 8
            assert await chain.rehome(vm, again) >= 8 << 8
            await vm.resume()
            chain.order("IDLE then")
            await console(vm, "IDLE then")
            assert (await chain.capture(vm)).stats.dirty_pages < 2 << 8

    asyncio.run(main())


def test_what_is_not_rehomed_is_compared_again(chain: Chain):
    """With no mapping to spare nothing is mapped, and nothing is stored twice."""

    async def main() -> None:
        async with chain.restored() as vm:
            chain.order("FILL 8")
            await console(vm, "FILL 8")
            done = await chain.capture(vm)
            assert done.stats.mappings > 10
            assert await rehome(vm, replace(done.stats, mappings=MAPPING_LIMIT), chain.content()) == 0
            assert await rehome(vm, done.stats, chain.content(), limit=0) == 0
            await vm.resume()
            again = await chain.capture(vm)
            assert again.stats.equal_pages >= 8 << 8
            assert again.stats.stored_pages < 2 << 8

    asyncio.run(main())


def test_zeroed_memory_is_not_stored(chain: Chain):
    async def main() -> None:
        async with chain.restored() as vm:
            chain.order("ZERO 64")
            await console(vm, "ZERO 64")
            done = await chain.capture(vm)
            assert done.stats.dirty_pages >= 64 << 8
            assert done.stats.stored_pages < 16 << 8
            assert chain.layers[0].stat().st_blocks * 512 < 20 << 20

    asyncio.run(main())


def test_base_of_a_booted_machine(tmp_path: Path):
    """`write_base` makes the lowest layer of all: complete, durable, with no zeros in it."""

    async def main() -> None:
        machine = build_machine(tmp_path)
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        disk = new_disk(tmp_path / "disk")
        state, base = tmp_path / "state", tmp_path / "base"
        vm = await vmm.boot(machine, disk=disk, nic=None, run_dir=tmp_path / "run")
        async with killed(vm):
            await console(vm, "round 0: IDLE")
            stats = await write_base(vm, state=state, layer=base)
            assert vm.state is VmState.PAUSED
            assert stats.zero_pages == 0
        assert sum(s.length for s in Layer(base).segments()) == stats.stored_pages * PAGE
        assert not any(s.zeroed for s in Layer(base).segments())
        write_command(disk.path, "IDLE restored")
        vm = await vmm.prepare(machine, nic=None, run_dir=tmp_path / "run")
        async with killed(vm):
            memory_of = memory_map(SIZE, None, [base], tmp_path / "unused")
            assert memory_of is not None
            await restore(vm, state=state, disk=disk, memory=memory_of)
            await vm.resume()
            await console(vm, "IDLE restored")

    asyncio.run(main())


def test_work_beside_runs_while_the_guest_stands(chain: Chain):
    async def main() -> None:
        async with chain.restored() as vm:

            async def beside() -> VmState:
                await asyncio.sleep(0)
                return vm.state

            paths = {"state": chain.folder / "state", "layer": chain.folder / "layer"}
            done = await capture(vm, **paths, parent=chain.content(), beside=beside)
            assert done.beside is VmState.PAUSED
            assert done.stats.frozen_s >= max(done.stats.state_s, done.stats.memory_s, done.stats.beside_s)
            await vm.resume()
            await sync_capture(**paths)
            with pytest.raises(VmmError, match="durable"):
                await sync_capture(chain.folder / "state", chain.folder / "none")

    asyncio.run(main())


async def alive(chain: Chain, vm: Vm) -> None:
    """The machine goes on, and can be captured."""
    assert vm.state is VmState.PAUSED
    await vm.resume()
    chain.order("ALIVE")
    await console(vm, "ALIVE")
    await chain.capture(vm)


@pytest.mark.parametrize("moment", ["prepare", "state", "layer", "beside", "memory"])
def test_failed_capture_leaves_guest_and_directory_usable(chain: Chain, monkeypatch, moment: str):
    async def main() -> None:
        state, layer = chain.folder / "state", chain.folder / "layer"

        async def beside() -> None:
            if moment == "beside":
                raise OSError("no restack")

        async with chain.restored() as vm:
            parent = chain.content()
            if moment in ("state", "layer"):
                (chain.folder / moment).write_text("in the way")
            if moment == "prepare":
                parent = MemoryMap.whole(chain.folder / "gone", SIZE)
            with monkeypatch.context() as patch:
                if moment == "memory":
                    patch.setattr(memory, "capture", failing_capture)
                with pytest.raises((OSError, VmmError)):
                    await capture(vm, state=state, layer=layer, parent=parent, beside=beside)
            assert chain.names() == ({moment} if moment in ("state", "layer") else set())
            if moment in ("prepare", "layer"):
                assert vm.state is VmState.RUNNING, "the guest was not stopped in vain"
                await vm.pause()
            await alive(chain, vm)

    asyncio.run(main())


def failing_capture(
    pid: int, regions: object, size: int, fds: object, extents: bytes, out: int, **rest: object
) -> None:
    os.write(out, b"half a layer")
    raise OSError(5, "write layer")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.root
@pytest.mark.parametrize("seen", ["by asking", "by making room", "by writing"])
def test_full_disk(chain: Chain, small: Path, monkeypatch, seen: str):
    """If it can be known it is known before the guest stops; in any case nothing is left behind."""

    async def main() -> None:
        async with chain.restored() as vm:
            chain.order("FILL 16")
            await console(vm, "FILL 16")
            with monkeypatch.context() as patch:
                if seen != "by asking":
                    patch.setattr(module, "_free_bytes", lambda folder: 1 << 40)
                with pytest.raises(VmmError, match=r"8 MiB are free" if seen == "by asking" else "No space"):
                    await capture(
                        vm,
                        state=chain.folder / "state",
                        layer=small / "layer",
                        parent=chain.content(),
                        beside=nothing_beside,
                        ahead=seen == "by making room",
                    )
            assert os.listdir(small) == []
            assert chain.names() == {"small"}
            if seen != "by writing":
                assert vm.state is VmState.RUNNING
                await vm.pause()
            await alive(chain, vm)

    asyncio.run(main())


def test_death_of_the_vmm_during_a_capture(chain: Chain, monkeypatch):
    async def main() -> None:
        async with chain.restored() as vm:
            real = memory.capture

            def die_first(pid: int, *rest: object, **options: object) -> object:
                pidfd = os.pidfd_open(pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
                os.close(pidfd)
                return real(pid, *rest, **options)  # type: ignore[arg-type]

            monkeypatch.setattr(memory, "capture", die_first)
            with pytest.raises(VmmError):
                await chain.capture(vm)
            assert chain.names() == set()
            assert (await vm.exited).reason.startswith("QEMU was killed by SIGKILL")

    asyncio.run(main())


def test_cancelled_capture_leaves_nothing(chain: Chain):
    async def main() -> None:
        async with chain.restored() as vm:
            started, ended = asyncio.Event(), asyncio.Event()

            async def beside() -> None:
                started.set()
                await asyncio.sleep(0.05)
                ended.set()

            paths = {"state": chain.folder / "state", "layer": chain.folder / "layer"}
            task = asyncio.ensure_future(capture(vm, **paths, parent=chain.content(), beside=beside))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set(), "nothing is under way any more"
            assert chain.names() == set()
            await alive(chain, vm)

    asyncio.run(main())


def test_working_set_is_read_when_it_is_cold(chain: Chain):
    async def main() -> None:
        async with chain.restored() as vm:
            chain.order("SUM  1")
            await console(vm, "SUM  1")
            file = chain.folder / "working-set"
            save_working_set(file, SIZE, await record_working_set(vm))
        ranges = load_working_set(file, SIZE)
        assert 1 << 20 < sum(length for _, length in ranges) < SIZE
        image = chain.guest.memory
        with image.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold = await prefetch(chain.content(), ranges)
        assert cold > 1 << 20
        while await prefetch(chain.content(), ranges):
            await asyncio.sleep(0.01)  # it is being read: the kernel tells nobody when it is done
        assert await prefetch(chain.content(), []) == 0
        assert await prefetch(MemoryMap.whole(chain.folder / "none", SIZE), ranges) == 0
        vmm = await QemuVmm.detect(VmmKind.QEMU_TCG)
        vm = await vmm.prepare(chain.guest.machine, nic=None, run_dir=chain.folder / "run")
        async with killed(vm):
            await restore(vm, state=chain.guest.state, disk=chain.disk, memory=chain.content(), working_set=ranges)
            await vm.resume()
            chain.order("IDLE done")
            await console(vm, "IDLE done")

    asyncio.run(main())
