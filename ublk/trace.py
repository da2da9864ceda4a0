"""The file in which it is written down which chunks of an image's remote layers are read first.

    magic "AENVTRC1", u32 layers, u32 entries
    for each layer: u32 chunk size, u16 length of its digest, the digest
    for each entry: u16 layer, u48 chunk       in the order of the first reads
    u32 CRC32C of all before

All numbers are little-endian. Chunks are translated when the reader has another chunk size.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv._native.lsmt import crc32c
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError

MAGIC = b"AENVTRC1"
MOST_ENTRIES = 1 << 20
MOST_LAYERS = 255
MOST_BYTES = 16 << 20
_HEAD = struct.Struct("<8sII")
_LAYER = struct.Struct("<IH")


@dataclass(frozen=True)
class Trace:
    layers: tuple[tuple[str, int], ...]  # digest, chunk size
    entries: tuple[tuple[int, int], ...]  # place in `layers`, chunk

    def save(self, path: Path) -> None:
        """Atomically. Raises UnavailableError."""
        parts = [_HEAD.pack(MAGIC, len(self.layers), len(self.entries))]
        for digest, chunk_size in self.layers:
            encoded = digest.encode()
            parts += [_LAYER.pack(chunk_size, len(encoded)), encoded]
        parts += [(layer | chunk << 16).to_bytes(8, "little") for layer, chunk in self.entries]
        body = b"".join(parts)
        draft = path.with_name(f".{path.name}.draft")
        try:
            draft.write_bytes(body + crc32c(body, 0xFFFFFFFF).to_bytes(4, "little"))
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise UnavailableError(f"trace {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Raises NotFoundError, and InvalidInputError naming what is wrong."""
        try:
            with path.open("rb") as file:
                body = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise NotFoundError(f"trace {path}: {error.strerror}") from error
        if len(body) > MOST_BYTES:
            raise InvalidInputError("trace.file", f"more than {MOST_BYTES} bytes")
        return cls.parse(body)

    @classmethod
    def parse(cls, body: bytes) -> Trace:
        if len(body) < _HEAD.size + 4 or body[:8] != MAGIC:
            raise InvalidInputError("trace.magic", "not a trace")
        if crc32c(body[:-4], 0xFFFFFFFF) != int.from_bytes(body[-4:], "little"):
            raise InvalidInputError("trace.crc", "the checksum does not hold")
        _, layer_count, entry_count = _HEAD.unpack_from(body)
        if not 1 <= layer_count <= MOST_LAYERS:
            raise InvalidInputError("trace.layers", f"{layer_count} layers")
        if entry_count > MOST_ENTRIES:
            raise InvalidInputError("trace.entries", f"{entry_count} are more than {MOST_ENTRIES}")
        at, end, layers = _HEAD.size, len(body) - 4, []
        for _ in range(layer_count):
            if end - at < _LAYER.size:
                raise InvalidInputError("trace.layers", "the file ends inside them")
            chunk_size, length = _LAYER.unpack_from(body, at)
            digest = body[at + _LAYER.size : min(end, at + _LAYER.size + length)]
            at += _LAYER.size + length
            if at > end or not digest.isascii() or not chunk_size:
                raise InvalidInputError("trace.layers", "a digest or a chunk size is wrong")
            layers.append((digest.decode(), chunk_size))
        if end - at != 8 * entry_count:
            raise InvalidInputError("trace.entries", f"{end - at} bytes for {entry_count} entries")
        words = struct.unpack_from(f"<{entry_count}Q", body, at)
        entries = tuple((word & 0xFFFF, word >> 16) for word in words)
        if any(layer >= layer_count for layer, _ in entries):
            raise InvalidInputError("trace.entries", "one is of a layer that is not named")
        return cls(tuple(layers), entries)

    def chunks_of(self, digest: str, chunk_size: int) -> list[tuple[int, int]]:
        """Pairs of a place in the trace and a chunk of that size, for one layer."""
        found = []
        seen: set[int] = set()
        numbers = {number for number, layer in enumerate(self.layers) if layer[0] == digest}
        for place, (layer, chunk) in enumerate(self.entries):
            if layer not in numbers:
                continue
            size = self.layers[layer][1]
            for number in range(chunk * size // chunk_size, ((chunk + 1) * size - 1) // chunk_size + 1):
                if number not in seen:
                    seen.add(number)
                    found.append((place, number))
        return found


def runs(trace: Trace, layers: Sequence[tuple[str, int]]) -> list[tuple[int, list[int]]]:
    """The chunks to prefetch for these layers (digest, chunk size), in the order of the trace: pairs of a place in
    `layers` and chunks of that layer that follow each other."""
    every = sorted(
        (place, at, chunk)
        for at, (digest, chunk_size) in enumerate(layers)
        for place, chunk in trace.chunks_of(digest, chunk_size)
    )
    found: list[tuple[int, list[int]]] = []
    for _, at, chunk in every:
        if not found or found[-1][0] != at:
            found.append((at, []))
        found[-1][1].append(chunk)
    return found
