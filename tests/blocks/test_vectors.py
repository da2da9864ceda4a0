"""Layers made by the reference tools read to the bit."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from aenv._native.lsmt import Layer, Stack, crc32c
from tests.blocks.reader import raw_crc32c

LAYER_1 = "8df26803caf3c33a833ae2d63fbb94a2fb9ed34f29ecd03782003c1f9afe694a"
BOTH = "5a646fc9e6edff489ab0e9a263f643fc37ea713a6c668b43670e68eb51b6d70d"


def digest(stack: Stack) -> str:
    found = hashlib.sha256()
    for offset in range(0, stack.virtual_size, 1 << 22):
        found.update(stack.read(offset, 1 << 22))
    return found.hexdigest()


@pytest.mark.parametrize("name", ["layer1.lsmt", "layer1.zfile-lz4", "layer1.zfile-zstd64k", "layer1.tar"])
def test_sealed_layer_has_the_reference_digest(vectors: Path, name: str) -> None:
    assert digest(Stack([Layer(vectors / name)])) == LAYER_1


def test_writable_layer_has_the_reference_digest(vectors: Path) -> None:
    assert digest(Stack([Layer(vectors / "layer1.rw.data", vectors / "layer1.rw.index")])) == LAYER_1


@pytest.mark.parametrize("name", ["layer2.lsmt", "layer2.sealed.data", "layer2.zfile-lz4"])
def test_stack_has_the_reference_digest(vectors: Path, name: str) -> None:
    assert digest(Stack([Layer(vectors / "layer1.tar"), Layer(vectors / name)])) == BOTH


def test_pushed_writable_layer_and_merged_layer_have_the_reference_digest(vectors: Path) -> None:
    upper = Layer(vectors / "layer2.rw.data", vectors / "layer2.rw.index")
    assert digest(Stack([Layer(vectors / "layer1.lsmt")]).push(upper)) == BOTH
    assert digest(Stack([Layer(vectors / "merged.zfile")])) == BOTH


def test_header_fields_of_a_committed_layer(vectors: Path) -> None:
    info = Layer(vectors / "layer2.lsmt").info
    assert info.kind == "lsmt"
    assert info.virtual_size == 1 << 30
    assert info.uuid == "22222222-2222-3333-4444-555555555555"
    assert info.parent_uuid == "11111111-2222-3333-4444-555555555555"
    assert info.user_tag == "layer-two"
    assert Layer(vectors / "layer1.tar").info.kind == "tar+zfile"


def test_verify_reads_every_block(vectors: Path) -> None:
    done: list[int] = []
    Layer(vectors / "layer1.zfile-lz4").verify(done.append)
    assert done == sorted(done)
    assert done[-1] > 2_000_000


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4079, 4080, 4081, 4096, 8160, 12345])
def test_crc_agrees_with_the_slow_one(length: int) -> None:
    data = bytes(i * 7 + (i >> 8) & 255 for i in range(length))
    for seed in (0, 100007, 0xFFFFFFFF):
        assert crc32c(data, seed) == raw_crc32c(data, seed)


def test_crc_is_the_known_one() -> None:
    inverted = 0xFFFFFFFF
    assert crc32c(b"123456789", inverted) ^ inverted == 0xE3069283
    assert struct.unpack("<I", struct.pack("<I", crc32c(bytes(32), inverted) ^ inverted))[0] == 0x8A9136AA
