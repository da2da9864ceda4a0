"""Power loss: any part of what was not synced may be on disk, page by page, and any other may not."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pytest

from aenv._native.lsmt import Image
from tests.blocks.test_sanitizers import HERE, NATIVE

BLOCKS, BLOCK, PAGE = 64, 4096, 4096
SMALL = [
    "-DRELEASE_FROM=16384",
    "-DSHORTEN_FROM=64",
    "-DDIRECT_FROM=4096",
]  # so that space is used again, and the index rewritten, often


class Kind(IntEnum):
    PWRITE, SYNC, TRUNCATE, RENAME, UNLINK, WRITE_BEGIN, WRITE_END, FLUSH_END, CREATED = range(9)


@dataclass(frozen=True)
class Event:
    kind: Kind
    file: int
    offset: int
    data: bytes


@dataclass
class File:
    """What is surely on disk, and what may be."""

    stable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        for offset, data in self.pending:
            put(self.stable, offset, data)
        self.pending.clear()

    def after_loss(self, generator: random.Random) -> bytearray:
        """Each page of each write reached the disk or did not; a later one implies nothing about an earlier one."""
        found = bytearray(self.stable)
        likely = generator.choice([0.1, 0.5, 0.9])
        lost = {offset // PAGE for offset, _ in self.pending if generator.random() > likely}
        for offset, data in self.pending:
            at = offset
            while at < offset + len(data):
                end = min((at // PAGE + 1) * PAGE, offset + len(data))
                if at // PAGE not in lost or generator.random() < 0.2:
                    put(found, at, data[at - offset : end - offset])
                at = end
        return found


def put(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def events(path: Path) -> Iterator[Event]:
    blob = path.read_bytes()
    at = 0
    while at < len(blob):
        kind, _, file, offset, length = struct.unpack_from("<IIQQQ", blob, at)
        at += 32
        yield Event(Kind(kind), file, offset, blob[at : at + length])
        at += length


@dataclass
class World:
    """The disk, and what the image promised."""

    files: dict[int, File] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    allowed: list[set[int]] = field(default_factory=lambda: [{0} for _ in range(BLOCKS)])
    current: list[int] = field(default_factory=lambda: [0] * BLOCKS)

    def play(self, event: Event) -> None:
        file = self.files.setdefault(event.file, File()) if event.kind <= Kind.UNLINK else File()
        match event.kind:
            case Kind.PWRITE:
                file.pending.append((event.offset, event.data))
            case Kind.SYNC:
                file.sync()
            case Kind.TRUNCATE:
                file.sync()
                del file.stable[event.offset :]
                put(file.stable, event.offset, b"")
            case Kind.RENAME | Kind.CREATED:
                self.names[Path(event.data.decode()).name] = event.file
            case Kind.WRITE_BEGIN:
                self.allowed[event.file].add(event.offset)
            case Kind.WRITE_END:
                self.current[event.file] = event.offset
            case Kind.FLUSH_END:
                self.allowed = [{value} for value in self.current]

    def check_after_loss(self, folder: Path, generator: random.Random) -> None:
        folder.mkdir(exist_ok=True)
        for name, file in self.names.items():
            (folder / name).write_bytes(self.files[file].after_loss(generator))
        image = Image(None, folder / "data", folder / "index")
        for number, allowed in enumerate(self.allowed):
            found = image.read(number * BLOCK, BLOCK)
            value = int.from_bytes(found[:4], "little")
            assert value in allowed, f"block {number}"
            assert found == found[:4] * (BLOCK // 4), "no write shows half"
        image.close()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("build") / "power"
    wraps = [f"-Wl,--wrap={name}" for name in ("pwrite", "fdatasync", "ftruncate", "rename")]
    command = [
        "cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", *SMALL,
        f"-I{NATIVE}", "-o", str(target), str(HERE / "c_power.c"), *map(str, sorted(NATIVE.glob("c_lsmt_*.c"))),
        "-llz4", "-lzstd", "-lpthread", *wraps,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return target


@pytest.mark.parametrize("seed", range(3))
def test_flushed_writes_survive_power_loss_at_any_time(program: Path, tmp_path: Path, seed: int) -> None:
    (tmp_path / "run").mkdir()
    trace = tmp_path / "trace"
    done = subprocess.run([program, tmp_path / "run", trace, str(seed)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 250 * BLOCK, "space is used again"
    generator = random.Random(seed)
    world = World()
    rewritten = flushed = 0
    for event in events(trace):
        world.play(event)
        rewritten += event.kind == Kind.RENAME
        flushed += event.kind == Kind.FLUSH_END  # before the first nobody was promised a layer
        if flushed and len(world.names) == 2 and generator.random() < 0.05:
            world.check_after_loss(tmp_path / "after", generator)
    assert rewritten, "the index file was rewritten"
