"""Layers as files for people: what is in them, are they intact, to a raw disk file and back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aenv._native.lsmt import MAX_ENTRIES, Layer, LayerInfo, Stack, Writer
from aenv.errors import InvalidInputError, NotFoundError

PIECE = 1 << 20  # bytes read at a time
BLOCK = 4096  # unit of zero detection and comparison

Progress = Callable[[int], None]  # gets the bytes done so far


def ignore(done: int) -> None:
    """The progress of nobody."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer. All sizes are bytes. `visible` is what the layers above leave of it in the stack of all that were
    named; `follows` tells whether its parent is the layer below (None: it names no parent, or is the lowest)."""

    path: str
    info: LayerInfo
    file_size: int
    data: int
    zeroed: int
    segments: int
    visible: int
    follows: bool | None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two layers hold `blocks` equal 4 KiB blocks of data (each counted once)."""

    first: str
    second: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Intact:
    """A layer whose every checksum held. `sha256` names the file."""

    path: str
    file_size: int
    virtual_size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Written:
    """What an export or import wrote. `data` are the bytes of content in it."""

    path: str
    virtual_size: int
    file_size: int
    data: int


def _open(paths: Sequence[Path]) -> list[Layer]:
    if not paths:
        raise InvalidInputError("layers", "none given")
    return [Layer(path) for path in paths]


def inspect(paths: Sequence[Path]) -> list[LayerReport]:
    """Describe layers, taken as a stack, lowest first. Raises InvalidInputError naming the field of a broken layer."""
    layers = _open(paths)
    visible = [0] * len(layers)
    for segment in Stack(layers).segments():
        if not segment.zeroed:
            visible[segment.layer] += segment.length
    reports = []
    for i, layer in enumerate(layers):
        segments = list(layer.segments())
        info = layer.info
        parent = info.parent_uuid.strip("0-").lower()
        reports.append(
            LayerReport(
                path=str(paths[i]),
                info=info,
                file_size=paths[i].stat().st_size,
                data=sum(s.length for s in segments if not s.zeroed),
                zeroed=sum(s.length for s in segments if s.zeroed),
                segments=len(segments),
                visible=visible[i],
                follows=info.parent_uuid.lower() == layers[i - 1].info.uuid.lower() if i and parent else None,
            )
        )
    return reports


def _pieces(stack: Stack, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    while begin < end:
        length = min(PIECE, end - begin)
        yield begin, stack.read(begin, length)
        begin += length


def sharing(paths: Sequence[Path], progress: Progress = ignore) -> list[Sharing]:
    """Compare the content of layers pair by pair. Reads them whole; memory: about 100 bytes a block."""
    contents: list[set[bytes]] = []
    done = 0
    for layer in _open(paths):
        found: set[bytes] = set()
        alone = Stack([layer])
        for segment in layer.segments():
            if segment.zeroed:
                continue
            begin = -(-segment.offset // BLOCK) * BLOCK
            end = (segment.offset + segment.length) // BLOCK * BLOCK
            for _, data in _pieces(alone, begin, end):
                found.update(
                    hashlib.blake2b(data[at : at + BLOCK], digest_size=16).digest() for at in range(0, len(data), BLOCK)
                )
                done += len(data)
                progress(done)
        contents.append(found)
    pairs = []
    for i, first in enumerate(contents):
        for k in range(i + 1, len(contents)):
            if blocks := len(first & contents[k]):
                pairs.append(Sharing(str(paths[i]), str(paths[k]), blocks))
    return pairs


def verify(path: Path, progress: Progress = ignore) -> Intact:
    """Check every field and every block's checksum. Raises InvalidInputError naming the first field that is wrong.

    A layer that is not compressed has no checksums of its data: compare its `sha256` with the name it goes by.
    """
    layer = Layer(path)
    layer.verify(progress)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Intact(str(path), path.stat().st_size, layer.info.virtual_size, digest)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], None]]]:
    """A file that gets its name, durably, only if the body says that it is whole."""
    if not path.parent.is_dir():
        raise NotFoundError(f"output: {path.parent} is no directory")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")

    def finished() -> None:
        os.fsync(file.fileno())
        temporary.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    try:
        with temporary.open("xb", buffering=0) as file:
            yield file, finished
    finally:
        temporary.unlink(missing_ok=True)


def content_of(paths: Sequence[Path]) -> int:
    """Bytes that an export of this stack has to read."""
    return sum(segment.length for segment in Stack(_open(paths)).segments() if not segment.zeroed)


def export(paths: Sequence[Path], output: Path, progress: Progress = ignore) -> Written:
    """Write the stack, lowest layer first, as a sparse raw file."""
    stack = Stack(_open(paths))
    size = stack.virtual_size
    data = 0
    with _new_file(output) as (file, finished):
        os.ftruncate(file.fileno(), size)
        for segment in stack.segments():
            if segment.zeroed:
                continue
            for offset, piece in _pieces(stack, segment.offset, min(segment.offset + segment.length, size)):
                for start, end in _data_runs(piece, offset, BLOCK):
                    os.pwrite(file.fileno(), piece[start:end], offset + start)
                data += len(piece)
                progress(data)
        finished()
    return Written(str(output), size, output.stat().st_blocks * 512, data)


def _data_runs(piece: bytes, offset: int, unit: int) -> Iterator[tuple[int, int]]:
    """The parts of `piece` that are not zero, cut at multiples of `unit` of the image."""
    start: int | None = None
    at = 0
    while at < len(piece):
        end = min(len(piece), at + unit - (offset + at) % unit)
        if piece.count(0, at, end) == end - at:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
        at = end
    if start is not None:
        yield start, len(piece)


def _data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the file system has data, in whole blocks."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole follows
            return
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        at = min(-(-end // BLOCK) * BLOCK, size)
        yield begin // BLOCK * BLOCK, at


def import_raw(
    raw: Path,
    output: Path,
    *,
    form: str = "plain",
    block_size: int = 4096,
    tar: bool = False,
    parents: Sequence[Path] = (),
    user_tag: str = "",
    progress: Progress = ignore,
) -> Written:
    """Make a sealed layer of a raw disk file; with `parents` (lowest first) of what differs from their stack.

    Zeros are not stored. `form`: plain, lz4 or zstd. `progress` gets the place in the raw file.
    """
    if not raw.is_file():
        raise NotFoundError(f"raw: {raw} is no file")
    below = Stack(_open(parents)) if parents else None
    parent_uuid = Layer(parents[-1]).info.uuid if parents else ""
    size = -(-raw.stat().st_size // 512) * 512
    if not size:
        raise InvalidInputError("raw", f"{raw} is empty")
    for unit in (BLOCK, 16 * BLOCK, 256 * BLOCK):  # coarser when the file is so scattered that the index overflows
        with _new_file(output) as (file, finished), raw.open("rb", buffering=0) as source:
            writer = Writer(
                file.fileno(), size, form=form, block_size=block_size, tar=tar, uuid=str(uuid.uuid4()),
                parent_uuid=parent_uuid, user_tag=user_tag,
            )  # fmt: skip
            data = _copy(source, writer, size, below, unit, progress)
            if writer.entries > MAX_ENTRIES:
                continue
            file_size = writer.finish()
            finished()
        return Written(str(output), size, file_size, data)
    raise InvalidInputError("raw", f"{raw} needs more than {MAX_ENTRIES} segments")


def _copy(source: IO[bytes], writer: Writer, size: int, below: Stack | None, unit: int, progress: Progress) -> int:
    data = 0
    # With something below, holes matter too: they hide it.
    ranges = _data_ranges(source.fileno(), size) if below is None else iter([(0, size)])
    for begin, end in ranges:
        for offset in range(begin, end, PIECE):
            length = min(PIECE, end - offset)
            piece = os.pread(source.fileno(), length, offset).ljust(length, b"\0")
            if below is None:
                for start, stop in _data_runs(piece, offset, unit):
                    writer.add(offset + start, piece[start:stop])
                    data += stop - start
            else:
                data += _add_difference(writer, offset, piece, below.read(offset, length), unit)
            progress(offset + length)
            if writer.entries > MAX_ENTRIES:
                return data
    return data


def _add_difference(writer: Writer, offset: int, piece: bytes, old: bytes, unit: int) -> int:
    data = 0
    for at in range(0, len(piece), unit):
        new = piece[at : at + unit]
        if new == old[at : at + unit]:
            continue
        if not any(new):
            writer.add_zeros(offset + at, len(new))
        else:
            writer.add(offset + at, new)
            data += len(new)
    return data
