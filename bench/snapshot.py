"""Snapshot and pause of a sandbox by how much memory it has written, and what the same costs with QEMU alone.

All is done through the operations that serve users, in this process, on one guest of 2 GiB. `frozen_ms` is how long the
guest's vCPUs stood still: from the call that stopped them until the one that let them go on had returned (of a pause:
until the capture was whole). `total_ms` is until the operation has answered: a snapshot is durable and listed then, a
pause in the page cache. Dirty pages are random bytes that a program writes to /dev/shm in the guest; before each sample
the same memory is written anew, so that a sample is what an incremental snapshot of that working set costs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aenv.config import Config
from aenv.node import Node
from aenv.sandbox.service import CreateOptions
from aenv.snapshot.capture import CaptureStats
from aenv.storage.repository import Template
from bench.facts import figures, host_facts, percentile, ratio
from bench.guest import Guest, compiled_writer
from bench.rival import Rival
from bench.templates import of_size, started, with_settings
from bench.timeline import Phases, Timeline

Say = Callable[[str], None]
Rows = list[dict[str, Any]]
Sample = dict[str, float]

MEMORY_MIB = 2048  # of the guest
SHM_MIB = 1280
SWEEP = {0: 1, 8: 1, 64: 1, 256: 5, 1024: 10}  # dirty MiB → which part of the samples is taken
RIVAL_PART = 5  # the rivals get fewer, because each takes a second
DISK_MIB = 1024
CHAIN = 10  # captures of one sandbox, one after another
CHAIN_MIB = 8
PHASE_MIB = 8
COPY = 256 << 20
PAGE_CACHE_FILES = 8  # of COPY bytes each
TIMEOUT = 24 * 3600
SETTLE = 0.15  # seconds between two samples: pools fill, what was written ages


async def run(config: Config, n: int, say: Say) -> dict[str, Any]:
    """`n` samples of the small sizes, fewer of the large ones; each row says how many."""
    facts = host_facts()
    async with of_size(config, MEMORY_MIB, say) as name:
        async with started(with_settings(config, vmm__pool=1, vmm__parked=0)) as node:
            with Timeline() as timeline:
                bench = _Bench(node, node.repository.find(name), timeline, await compiled_writer(), say)
                rows = await bench.rows(n)
    facts |= {
        "vmm": f"{node.vmm.kind.value} {node.vmm.version}",
        "guest_memory_mib": MEMORY_MIB,
        "vcpus": bench.template.manifest.vcpus,
        "load_after": round(os.getloadavg()[0], 2),
    }
    return {"host": facts, "rows": rows}


class _Bench:
    def __init__(self, node: Node, template: Template, timeline: Timeline, writer: bytes, say: Say) -> None:
        self.node = node
        self.template = template
        self.timeline = timeline
        self.writer = writer
        self.say = say

    async def rows(self, n: int) -> Rows:
        copy = memory_speed(min(n, 10))
        rows: Rows = [figures("memcpy", [{"mib_per_s": speed} for speed in copy], mib=COPY >> 20)]
        rows.append(
            figures("page-cache", [await asyncio.to_thread(page_cache_speed, self.node.home.root)], mib=COPY >> 20)
        )
        speed = percentile(copy, 50)
        for mib, part in SWEEP.items():
            rows += await self._sweep(mib, max(1, n // part), speed)
        rows += await self._after_disk_writes(max(1, n // 10))
        rows += await self._chain(max(1, n // 10))
        rows += await self._phases(max(2, n // 5))
        return rows

    async def _sandbox(self) -> tuple[str, Guest]:
        made = await self.node.manager.create(CreateOptions(template=self.template.id, timeout=TIMEOUT))
        guest = await Guest.of(self.node, made.id)
        await guest.install(self.writer, SHM_MIB)
        return made.id, guest

    # Sweep

    async def _sweep(self, mib: int, count: int, speed: float) -> Rows:
        """Ours and the rivals in turn, each on a guest of its own with the same program and the same pages."""
        sandbox, guest = await self._sandbox()
        ours: dict[str, list[Sample]] = {"snapshot": [], "pause": [], "resume": []}
        theirs: dict[str, list[Sample]] = {"migrate": [], "-incoming": [], "savevm": [], "loadvm": []}
        async with Rival.start(self.node, self.template) as rival:
            other = Guest.behind(rival.guest)
            await other.install(self.writer, SHM_MIB)
            for who in (guest, other):
                await who.dirty_memory(mib)
            await self._snapshot(sandbox)  # the first one has all that happened since the start in it
            for number in range(count):
                await guest.dirty_memory(mib)
                ours["snapshot"].append(await self._snapshot(sandbox))
                await guest.dirty_memory(mib)
                paused, resumed = await self._pause(sandbox)
                ours["pause"].append(paused)
                ours["resume"].append(resumed)
                if number % RIVAL_PART == 0:
                    await other.dirty_memory(mib)
                    await _rivals(rival, theirs)
                self.say(f"{mib} MiB dirty: {number + 1} of {count}")
        await self.node.manager.kill(sandbox)
        rows = [figures(bench, samples, dirty_mib=mib) for bench, samples in ours.items()]
        for row in rows[:2]:
            # Of the pages that were stored, by the thread that collects them. With little the fixed costs decide.
            row["of_memcpy"] = round(row["mib_per_s"]["p50"] / speed, 3)
        rows += [figures("rival", samples, of=of, dirty_mib=mib) for of, samples in theirs.items()]
        return rows + _ratios(mib, ours, theirs)

    async def _snapshot(self, sandbox: str) -> Sample:
        await asyncio.sleep(SETTLE)
        pid = await self._pid(sandbox)
        self.timeline.clear()
        began = time.perf_counter()
        made = await self.node.manager.snapshot(sandbox)
        total = time.perf_counter() - began
        sample = self._capture_of(pid, self.timeline.frozen(pid), total)
        await self.node.manager.delete_template(made.id)
        return sample

    async def _pause(self, sandbox: str) -> tuple[Sample, Sample]:
        """A pause, and the resume of it."""
        await asyncio.sleep(SETTLE)
        pid = await self._pid(sandbox)
        self.timeline.clear()
        began = time.perf_counter()
        await self.node.manager.pause(sandbox)
        total = time.perf_counter() - began
        stop, capture = self.timeline.of("QemuVm.pause", pid)[-1], self.timeline.of("Machines.capture")[-1]
        paused = self._capture_of(pid, capture.end - stop.begin, total)
        await self._settled(sandbox)
        self.timeline.clear()
        began = time.perf_counter()
        await self.node.manager.connect(sandbox, TIMEOUT)
        agent = time.perf_counter() - began
        runs = self.timeline.of("QemuVm.resume")[0].end - began
        return paused, {"a_ms": runs * 1000, "b_ms": agent * 1000}

    async def _settled(self, sandbox: str) -> None:
        """What a pause leaves to be done has been done, and a process waits for the resume."""
        machines, shape = self.node.machines, self.template.machine
        while self.node.manager._sandboxes[sandbox].former is not None or not machines._prepared.count(shape):
            await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLE)

    async def _pid(self, sandbox: str) -> int:
        _, running = await self.node.manager.reach(sandbox)
        return running.vm.pid

    def _capture_of(self, pid: int, frozen: float, total: float) -> Sample:
        stats: CaptureStats = self.timeline.of("Machines.capture")[-1].result.stats
        stored = stats.stored_pages / 256
        return {
            "frozen_ms": frozen * 1000,
            "total_ms": total * 1000,
            "stored_mib": stored,
            "mib_per_s": stored / stats.memory_s,
            "stop_ms": stats.pause_s * 1000,
            "state_ms": stats.state_s * 1000,
            "memory_ms": stats.memory_s * 1000,
            "disk_ms": stats.beside_s * 1000,
            "dirty_pages": float(stats.dirty_pages),
            "equal_pages": float(stats.equal_pages),
        }

    # Disk writes, chains, phases

    async def _after_disk_writes(self, count: int) -> Rows:
        """The same snapshot with and without a gibibyte of fresh writes to the disk before it."""
        sandbox, guest = await self._sandbox()
        samples: dict[int, list[Sample]] = {0: [], DISK_MIB: []}
        await guest.dirty_disk(DISK_MIB)
        await self._snapshot(sandbox)
        for number in range(count):
            for mib, taken in samples.items():
                if mib:
                    await guest.dirty_disk(mib)
                await guest.dirty_memory(CHAIN_MIB)
                taken.append(await self._snapshot(sandbox))
            self.say(f"{DISK_MIB} MiB written to the disk: {number + 1} of {count}")
        await self.node.manager.kill(sandbox)
        return [figures("snapshot", s, dirty_mib=CHAIN_MIB, disk_mib=mib) for mib, s in samples.items()]

    async def _chain(self, count: int) -> Rows:
        """Captures number 1 to 10 of a sandbox that writes the same few pages before each."""
        samples: list[list[Sample]] = [[] for _ in range(CHAIN)]
        for number in range(count):
            sandbox, guest = await self._sandbox()
            for of_number in samples:
                await guest.dirty_memory(CHAIN_MIB)
                of_number.append(await self._snapshot(sandbox))
            await self.node.manager.kill(sandbox)
            self.say(f"chain of {CHAIN} captures: {number + 1} of {count}")
        rows = []
        for number, of_number in enumerate(samples, 1):
            shown = [
                {
                    "stored_pages": s["stored_mib"] * 256,
                    "dirty_pages": s["dirty_pages"],
                    "frozen_ms": s["frozen_ms"],
                    "total_ms": s["total_ms"],
                }
                for s in of_number
            ]
            rows.append(figures("capture", shown, number=number, working_set_mib=CHAIN_MIB))
        return rows

    async def _phases(self, count: int) -> Rows:
        """Where the time goes, with the CPU time of each process: measured apart, for looking costs time."""
        sandbox, guest = await self._sandbox()
        snapshot, pause, resume = Phases("snapshot"), Phases("pause"), Phases("resume")
        manager, timeline = self.node.manager, self.timeline
        machine = [await self._pid(sandbox)]
        timeline.processes = lambda: {"daemon": [os.getpid()], "vmm": machine, "blocks": self._blocks()}
        for number in range(count):
            machine[0] = await self._pid(sandbox)
            await guest.dirty_memory(PHASE_MIB)
            await asyncio.sleep(SETTLE)
            timeline.clear()
            began = time.perf_counter()
            made = await manager.snapshot(sandbox)
            snapshot.add(timeline.spans, began)
            await manager.delete_template(made.id)
            await guest.dirty_memory(PHASE_MIB)
            await asyncio.sleep(SETTLE)
            timeline.clear()
            began = time.perf_counter()
            await manager.pause(sandbox)
            pause.add(timeline.spans, began)
            await self._settled(sandbox)
            waiting = self.node.machines._prepared._ready[self.template.machine][0]
            machine[0] = waiting.vm.pid
            timeline.clear()
            began = time.perf_counter()
            await manager.connect(sandbox, TIMEOUT)
            resume.add(timeline.spans, began)
            self.say(f"phases: {number + 1} of {count}")
        timeline.processes = None
        await manager.kill(sandbox)
        return [*snapshot.rows(), *pause.rows(), *resume.rows()]

    def _blocks(self) -> Sequence[int]:
        pid = self.node.machines._disks._blocks.pid
        return [] if pid is None else [pid]


async def _rivals(rival: Rival, samples: dict[str, list[Sample]]) -> None:
    saved = await rival.migrate()
    disk = await rival.overlay()
    began = time.perf_counter()
    guest = await rival.incoming(disk)
    try:
        await guest.vm.resume()
        samples["-incoming"].append({"a_ms": (time.perf_counter() - began) * 1000})
    finally:
        await rival.end(guest)
    disk.unlink()
    saved += await rival.go_on()
    samples["migrate"].append({"frozen_ms": saved * 1000, "stored_mib": rival.stored / (1 << 20)})
    samples["savevm"].append({"frozen_ms": await rival.save() * 1000})
    samples["loadvm"].append({"a_ms": await rival.load() * 1000})


def _ratios(mib: int, ours: dict[str, list[Sample]], theirs: dict[str, list[Sample]]) -> Rows:
    def median(samples: list[Sample], name: str) -> float:
        return percentile([sample[name] for sample in samples], 50)

    rows = []
    for rival in ("migrate", "savevm"):
        for figure in ("frozen_ms", "total_ms"):
            mine = median(ours["snapshot"], figure)
            rows.append(ratio(f"snapshot {figure}", mine, rival, median(theirs[rival], "frozen_ms")))
    for rival in ("-incoming", "loadvm"):
        rows.append(ratio("resume end A", median(ours["resume"], "a_ms"), rival, median(theirs[rival], "a_ms")))
    return [{**row, "dirty_mib": mib} for row in rows]


def memory_speed(n: int) -> list[float]:
    """MiB/s of `memcpy` between two buffers that are mapped and larger than any cache."""
    source, target = (ctypes.create_string_buffer(COPY) for _ in range(2))
    ctypes.memset(source, 1, COPY)
    speeds = []
    for _ in range(n + 1):
        began = time.perf_counter()
        ctypes.memmove(target, source, COPY)
        speeds.append((COPY >> 20) / (time.perf_counter() - began))
    return speeds[1:]  # the first one also maps the target


def page_cache_speed(folder: Path) -> Sample:
    """MiB/s of plain writes to new files: the slowest of many, for which a host that lends memory page by page has to
    find it first, and the slowest of as many once more, when those have been deleted."""
    chunk = os.urandom(1 << 20)

    def write(path: Path) -> float:
        began = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            for _ in range(COPY >> 20):
                file.write(chunk)
        return (COPY >> 20) / (time.perf_counter() - began)

    speeds = []
    for _ in range(2):
        files = [folder / f".page-cache-{number}" for number in range(PAGE_CACHE_FILES)]
        try:
            speeds.append(min(write(file) for file in files))
        finally:
            for file in files:
                file.unlink(missing_ok=True)
    return {"new_mib_per_s": speeds[0], "again_mib_per_s": speeds[1]}
