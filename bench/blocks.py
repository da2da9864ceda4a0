"""The block server: its engine against `pread`, its FUSE files against a raw file, and the costs of its bookkeeping.

Every figure with a rival is taken in alternating rounds with it, in the same run, on the same data in the same state of
the page cache. `-n` is the number of rounds; each round takes some seconds.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aenv._native.lsmt import (
    Image,
    Layer,
    Stack,
    Writer,
    create_writable,
    load_nanoseconds,
    lookup_nanoseconds,
    time_faults,
    time_reads,
)  # fmt: skip
from aenv.config import Config
from aenv.errors import UnavailableError
from bench.blocks_remote import remote
from bench.facts import host_facts
from ublk.fuse import Mount

SIZE = 256 << 20  # of the image that the engine reads
DISK = 128 << 20  # of the disks that fio works on
READS = 20000  # of each reader in a round
TURNS = 100  # of all readers in a round: what disturbs one disturbs the others as well
PATTERNS = {
    "seq1m": ["--bs=1M", "--iodepth=8"],
    "seq128k": ["--bs=128k", "--iodepth=32"],
    "rand4k-qd1": ["--bs=4k", "--iodepth=1"],
    "rand4k-qd64": ["--bs=4k", "--iodepth=64"],
}

Rows = list[dict[str, Any]]
Say = Callable[[str], None]


async def run(config: Config, n: int, say: Say) -> dict[str, Any]:
    """Runs in the foreground: nothing else of this process may take the CPU meanwhile."""
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        folder = Path(name)
        for layers in (1, 64):
            say(f"engine, {layers} layers")
            rows += engine(folder, layers, n)
        say("index, opening, restack, memory")
        rows += bookkeeping(folder, n)
        say("remote layers")
        rows += remote(folder, n)
        if os.geteuid() != 0:
            raise UnavailableError("the FUSE part needs root")
        mount = Mount(make(folder / "mount"), folder / "mount.record")
        mount.serve()
        try:
            say("FUSE disks")
            rows += disks(folder, mount, n, say)
            say("page faults of memory images")
            rows += faults(folder, mount, n)
        finally:
            mount.close()
    return {"host": host_facts(), "rows": rows}


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def result(bench: str, values: list[float], **labels: object) -> dict[str, Any]:
    """A row of latencies; `values` in microseconds."""
    values.sort()
    return {
        "bench": bench,
        **labels,
        "iops": round(1e6 / statistics.fmean(values)),
        "p50_us": round(values[len(values) // 2], 2),
        "p99_us": round(values[len(values) * 99 // 100], 2),
    }


def striped_layers(folder: Path, count: int) -> list[Path]:
    """Layers that share the image in stripes of 64 KiB, in a random order, so that a merged index has no long runs."""
    generator = random.Random(1)
    stripes = list(range(SIZE >> 16))
    generator.shuffle(stripes)
    paths = []
    for i in range(count):
        path = folder / f"stripes-{count}-{i}"
        with path.open("wb") as file:
            writer = Writer(file.fileno(), SIZE)
            for stripe in sorted(stripes[i::count]):
                writer.add(stripe << 16, generator.randbytes(1 << 16))
            writer.finish()
        paths.append(path)
    return paths


def engine(folder: Path, count: int, rounds: int) -> Rows:
    """Random 4 KiB reads through the merged index, and of a raw file of the same content, both in the page cache."""
    stack = Stack([Layer(path) for path in striped_layers(folder, count)])
    raw = folder / "raw"
    with raw.open("wb") as file:
        for offset in range(0, SIZE, 1 << 20):
            file.write(stack.read(offset, 1 << 20))
    data, index = folder / f"top-{count}", folder / f"top-{count}.index"
    create_writable(data, index, SIZE, uuid=str(uuid.uuid4()))
    images = {"engine": Image(stack), "engine+writable": Image(stack, data, index)}
    fd = os.open(raw, os.O_RDONLY)
    readers = [("raw", None), *images.items()]
    generator = random.Random(count)
    times: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    try:
        for number in range(TURNS * (rounds + 1)):
            turn = {}
            for name, image in generator.sample(readers, len(readers)):
                seed = generator.getrandbits(63)  # none reads what another has brought into the processor's cache
                turn[name] = [t / 1000 for t in time_reads(image, fd, SIZE, 4096, READS // TURNS, seed)]
            if number < TURNS:
                continue  # these warm the caches
            for name, found in turn.items():
                times[name] += found
                ratios[name].append(statistics.fmean(turn["raw"]) / statistics.fmean(found))
    finally:
        os.close(fd)
        for image in images.values():
            image.close()
    rows = []
    for name, values in times.items():
        ratio = round(statistics.median(ratios[name]), 3)
        rows.append(result("engine", values, layers=count, pattern="rand4k", of=name, rival="raw", ratio=ratio))
    return rows


def median(measure: Callable[[], float], rounds: int) -> float:
    return statistics.median(measure() for _ in range(rounds))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def lookups(count: int) -> Rows:
    """Searches, each depending on the one before, in turn with loads from as much memory: these are their floor."""
    rounds = 200_000
    rows: Rows = []
    for scattered in (False, True):
        found = []
        for number in range(5):
            ns, size = lookup_nanoseconds(count, rounds, number, scattered=scattered)
            found.append((ns, size, load_nanoseconds(int(size * count), rounds, number)))
        ns, size, floor = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append({
            "bench": "lookup", "segments": count, "of": "64 layers, scattered" if scattered else "1 layer",
            "ns": round(ns, 1), "load_ns": round(floor, 1), "bytes_each": round(size, 1),
        })  # fmt: skip
    return rows


def bookkeeping(folder: Path, rounds: int) -> Rows:
    rows = [row for count in (1000, 100_000, 1_000_000, 6_000_000) for row in lookups(count)]
    paths = [folder / f"stripes-64-{i}" for i in range(32)]

    def open_cold() -> float:
        began = time.perf_counter()
        Stack([Layer(path) for path in paths])
        return (time.perf_counter() - began) * 1000

    known = Stack([Layer(path) for path in paths])

    def open_known() -> float:
        began = time.perf_counter()
        Image(known).close()
        return (time.perf_counter() - began) * 1000

    rows.append(
        {"bench": "open", "layers": 32, "of": "index read and merged", "ms": round(median(open_cold, rounds), 3)}
    )
    rows.append({"bench": "open", "layers": 32, "of": "index known", "ms": round(median(open_known, rounds), 4)})
    for segments in (100, 10_000, 100_000):
        rows.append(restack(folder, segments))
    rows.append(idle_device(folder, known))
    return rows


def restack(folder: Path, segments: int) -> dict[str, Any]:
    """The time in which no request of the image is served, and the time until the layer is durable."""
    pairs = [(folder / f"r{i}-{segments}", folder / f"r{i}-{segments}.index") for i in range(2)]
    for pair in pairs:
        create_writable(*pair, 16 << 30, uuid=str(uuid.uuid4()))
    image = Image(None, *pairs[0])
    for i in range(segments):
        image.write(i * 8192, b"x" * 512)
    image.flush()
    began = time.perf_counter()
    sealing = image.restack(*pairs[1])
    swapped = time.perf_counter()
    sealing.finish()
    ended = time.perf_counter()
    image.close()
    return {
        "bench": "restack", "segments": segments, "ms": round((swapped - began) * 1000, 3),
        "durable_ms": round((ended - began) * 1000, 2),
    }  # fmt: skip


def idle_device(folder: Path, stack: Stack) -> dict[str, Any]:
    pairs = [(folder / f"idle{i}", folder / f"idle{i}.index") for i in range(200)]
    for pair in pairs:
        create_writable(*pair, SIZE, uuid=str(uuid.uuid4()))
    before = resident()
    images = [Image(stack, *pair) for pair in pairs]
    used = resident() - before
    for image in images:
        image.close()
    return {"bench": "memory", "of": "idle writable image", "bytes": used // len(pairs)}


def fio(path: Path, pattern: str, direction: str) -> dict[str, Any]:
    """One second of direct I/O."""
    kind = ("rand" if pattern.startswith("rand") else "") + direction
    command = [
        "fio", "--name=x", f"--filename={path}", f"--rw={kind}", "--direct=1", "--ioengine=io_uring", "--time_based",
        "--runtime=1", f"--size={DISK}", "--output-format=json", "--randseed=1", *PATTERNS[pattern],
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)["jobs"][0][direction]
    return found


def disks(folder: Path, mount: Mount, rounds: int, say: Say) -> Rows:
    raw = folder / "raw-disk"
    raw.write_bytes(random.Random(2).randbytes(DISK))
    files = {"raw": raw}
    images = []
    # `direct` is how writable images are served. `cached` is here to show why: its pages would be in memory twice.
    for name, cached in (("direct", False), ("cached", True)):
        pair = folder / name, folder / f"{name}.index"
        create_writable(*pair, DISK, uuid=str(uuid.uuid4()))
        image = Image(None, *pair)
        for offset in range(0, DISK, 1 << 20):
            image.write(offset, raw.read_bytes()[offset : offset + (1 << 20)])
        image.flush()
        mount.add(name, image, cached=cached)
        images.append(image)
        files[name] = Path(mount.directory) / name
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for number in range(min(rounds, 5)):
        for direction in ("read", "write"):
            for pattern in PATTERNS:
                for name, path in files.items():
                    found[pattern, direction, name].append(fio(path, pattern, direction))
        say(f"round {number + 1} of {min(rounds, 5)}")
    rows = []
    for (pattern, direction, name), runs in found.items():
        iops = statistics.median(r["iops"] for r in runs)
        rival = statistics.median(r["iops"] for r in found[pattern, direction, "raw"])
        percentile = [
            statistics.median(r["clat_ns"]["percentile"][p] for r in runs) for p in ("50.000000", "99.000000")
        ]
        rows.append({
            "bench": "fuse", "pattern": pattern, "direction": direction, "of": name, "iops": round(iops),
            "rival": "raw", "ratio": round(iops / rival, 3), "p50_us": round(percentile[0] / 1000, 1),
            "p99_us": round(percentile[1] / 1000, 1),
        })  # fmt: skip
    for name, image in zip(("direct", "cached"), images, strict=True):
        mount.remove(name)
        image.close()
    return rows


def faults(folder: Path, mount: Mount, rounds: int) -> Rows:
    """First touch of pages through MAP_PRIVATE: `cold` from the layer's file, `warm` from the page cache."""
    raw = folder / "raw"
    layers = {form: folder / f"memory-{form}" for form in ("plain", "lz4")}
    content = raw.read_bytes()
    for form, path in layers.items():
        with path.open("wb") as file:
            writer = Writer(file.fileno(), SIZE, form=form)
            writer.add(0, content)
            writer.finish()
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(min(rounds, 5)):
        for name in ("raw", *layers):
            path = raw
            if name != "raw":
                image = Image(Stack([Layer(layers[name])]), direct=True)
                mount.add(f"{name}-{number}", image, cached=True)
                path = Path(mount.directory) / f"{name}-{number}"
            fd = os.open(path, os.O_RDWR)
            if name == "raw":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for state in ("cold", "warm"):
                region = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
                region.madvise(mmap.MADV_RANDOM if state == "cold" else mmap.MADV_NORMAL)
                times[name, state] += [t / 1000 for t in time_faults(region, 2000, number)]
                region.close()
            os.close(fd)
            if name != "raw":
                mount.remove(f"{name}-{number}")
                image.close()
    return [
        result("fault", values, of=name, cache=state, rival="raw") for (name, state), values in sorted(times.items())
    ]
