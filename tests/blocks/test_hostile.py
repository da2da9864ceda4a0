"""Hostile layer files: each field broken in turn is refused with its name, and nothing crashes."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv._native.lsmt import Image, Layer, Stack, Writer
from aenv.errors import AenvError, InvalidInputError
from tests.blocks.reader import raw_crc32c

SIZE = 1 << 20
Edit = Callable[[bytearray], None]
NewWritable = Callable[..., tuple[Path, Path]]


def make(path: Path, **options: object) -> bytearray:
    with path.open("wb") as file:
        writer = Writer(file.fileno(), SIZE, uuid="01234567-89ab-cdef-0123-456789abcdef", **options)  # type: ignore[arg-type]
        for i in range(4):
            writer.add(i * 65536, random.Random(i).randbytes(8192))
        writer.add_zeros(5 * 65536, 4096)
        writer.finish()
    return bytearray(path.read_bytes())


def refuse(path: Path, blob: bytes, field: str) -> None:
    path.write_bytes(blob)
    with pytest.raises(InvalidInputError) as caught:
        Layer(path)
    assert caught.value.field == field


def put(offset: int, data: bytes) -> Edit:
    def edit(blob: bytearray) -> None:
        at = offset if offset >= 0 else len(blob) + offset
        blob[at : at + len(data)] = data

    return edit


BLOCK_FIELDS = [
    ("magic0", 0, b"XSMT"),
    ("magic1", 8, b"\0"),
    ("size", 24, struct.pack("<I", 391)),
    ("flags", 28, struct.pack("<I", 0)),
    ("flags", 28, struct.pack("<I", 0x40000007)),
    ("virtual_size", 48, struct.pack("<Q", SIZE + 1)),
    ("virtual_size", 48, struct.pack("<Q", 1 << 60)),
    ("uuid", 56, b"x"),
    ("uuid", 64, b"0"),
    ("uuid", 92, b"0"),
    ("uuid", 60, b"\0"),
    ("parent_uuid", 93, b"0"),
    ("reserved", 130, b"\1"),
    ("version", 132, b"\2"),
    ("sub_version", 133, b"\2"),
    ("user_tag", 200, b"x"),
    ("padding", 390, b"x"),
    ("padding", 4095, b"x"),
]


@pytest.mark.parametrize("part", ["header", "trailer"])
@pytest.mark.parametrize(("field", "offset", "data"), BLOCK_FIELDS)
def test_broken_header_or_trailer(tmp_path: Path, part: str, field: str, offset: int, data: bytes) -> None:
    blob = make(tmp_path / "layer")
    put(offset if part == "header" else offset - 4096, data)(blob)
    refuse(tmp_path / "layer", blob, f"{part}.{field}")


@pytest.mark.parametrize(
    ("field", "offset", "value"),
    [
        ("index_offset", 32, 0),
        ("index_offset", 32, 4095),
        ("index_offset", 32, 4097),
        ("index_offset", 32, 1 << 40),
        ("index_offset", 32, 2**64 - 512),
        ("index_size", 40, 1_000_001),
        ("index_size", 40, 257),
        ("index_size", 40, 2**64 - 1),
        ("index_size", 40, 1 << 60),
    ],
)
def test_index_outside_of_the_file(tmp_path: Path, field: str, offset: int, value: int) -> None:
    blob = make(tmp_path / "layer")
    put(offset - 4096, struct.pack("<Q", value))(blob)
    refuse(tmp_path / "layer", blob, f"trailer.{field}")


def test_committed_layer_with_more_entries_than_allowed(tmp_path: Path) -> None:
    blob = make(tmp_path / "layer")
    entries = struct.pack("<QQ", (1 << 50) - 1, 0) * 1_000_001
    trailer = blob[-4096:]
    index_offset = struct.unpack_from("<Q", trailer, 32)[0]
    trailer[40:48] = struct.pack("<Q", 1_000_001)
    refuse(tmp_path / "layer", bytes(blob[:index_offset]) + entries + trailer, "trailer.index_size")


def word0(offset: int, length: int) -> int:
    return offset | length << 50


@pytest.mark.parametrize(
    ("field", "entry", "words"),
    [
        ("index.length", 0, (word0(0, 0), 8)),
        ("index.offset", 0, (word0((1 << 50) - 2, 16), 8)),
        ("index.offset", 1, (word0(0, 16), 24)),
        ("index.offset", 1, (word0(15, 16), 24)),
        ("index.moffset", 0, (word0(0, 16), 0)),
        ("index.moffset", 0, (word0(0, 16), 7)),
        ("index.moffset", 3, (word0(384, 16), 57)),
        ("index.moffset", 0, (word0(0, 16), (1 << 55) - 1)),
        ("index.moffset", 4, (word0(640, 8), 73 | 1 << 55)),
    ],
)
def test_broken_index_entry(tmp_path: Path, field: str, entry: int, words: tuple[int, int]) -> None:
    blob = make(tmp_path / "layer")
    index_offset = struct.unpack_from("<Q", blob, len(blob) - 4096 + 32)[0]
    put(index_offset + 16 * entry, struct.pack("<QQ", *words))(blob)
    refuse(tmp_path / "layer", blob, field)


def test_tags_and_padding_in_an_index_are_harmless(tmp_path: Path) -> None:
    blob = make(tmp_path / "layer")
    content = Stack([Layer(tmp_path / "layer")]).read(0, SIZE)
    index_offset = struct.unpack_from("<Q", blob, len(blob) - 4096 + 32)[0]
    for i in range(5):
        blob[index_offset + 16 * i + 15] = 0xAB
    (tmp_path / "layer").write_bytes(blob)
    assert Stack([Layer(tmp_path / "layer")]).read(0, SIZE) == content


def with_digest(blob: bytearray, offset: int) -> None:
    """Make the header's checksum right again, so that the broken field itself must be noticed."""
    head = blob[offset : offset + 512]
    blob[offset + 28 : offset + 32] = struct.pack("<I", raw_crc32c(head[:28] + bytes(4) + head[32:]))


ZFILE_FIELDS = [
    ("size", 24, struct.pack("<I", 97)),
    ("flags", 32, struct.pack("<Q", 0x1A)),
    ("flags", 32, struct.pack("<Q", 0x3B)),
    ("flags", 32, struct.pack("<Q", 0x0B)),
    ("flags", 32, struct.pack("<Q", 0x11B)),
    ("index_offset", 40, struct.pack("<Q", 511)),
    ("index_offset", 40, struct.pack("<Q", 1 << 62)),
    ("index_size", 48, struct.pack("<Q", 1)),
    ("index_size", 48, struct.pack("<Q", 1 << 62)),
    ("index_size", 56, struct.pack("<Q", 1 << 50)),
    ("index_crc", 64, b"\xff\xff\xff\xff"),
    ("block_size", 72, struct.pack("<I", 0)),
    ("block_size", 72, struct.pack("<I", 4097)),
    ("block_size", 72, struct.pack("<I", 131072)),
    ("algo", 76, b"\0"),
    ("algo", 76, b"\3"),
    ("use_dict", 78, b"\1"),
    ("dict_size", 84, b"\1"),
    ("verify", 88, b"\2"),
]


@pytest.mark.parametrize(("field", "offset", "data"), ZFILE_FIELDS)
def test_broken_zfile_header(tmp_path: Path, field: str, offset: int, data: bytes) -> None:
    blob = make(tmp_path / "layer", form="lz4")
    put(offset, data)(blob)
    with_digest(blob, 0)
    refuse(tmp_path / "layer", blob, f"zfile.{field}")


@pytest.mark.parametrize(("field", "offset", "data"), ZFILE_FIELDS)
def test_broken_zfile_trailer_when_the_header_is_not_final(
    tmp_path: Path, field: str, offset: int, data: bytes
) -> None:
    blob = make(tmp_path / "layer", form="lz4")
    put(32, struct.pack("<Q", 0x13))(blob)
    put(40, bytes(16))(blob)
    with_digest(blob, 0)
    (tmp_path / "whole").write_bytes(blob)
    assert any(Stack([Layer(tmp_path / "whole")]).read(0, SIZE))
    put(offset - 512, data)(blob)
    with_digest(blob, len(blob) - 512)
    if field == "flags" and data == struct.pack("<Q", 0x1A):
        put(32 - 512, struct.pack("<Q", 0x17))(blob)
        with_digest(blob, len(blob) - 512)
    refuse(tmp_path / "layer", blob, f"zfile.{field}")


@pytest.mark.parametrize(("field", "offset"), [("magic0", 6), ("magic1", 8), ("digest", 28), ("digest", 500)])
def test_broken_zfile_magic_or_digest(tmp_path: Path, field: str, offset: int) -> None:
    blob = make(tmp_path / "layer", form="zstd")
    blob[offset] ^= 0x55
    refuse(tmp_path / "layer", blob, f"zfile.{field}")


@pytest.mark.parametrize(("field", "length"), [("index.length", 0), ("index.length", 4), ("index.length", 1 << 31)])
@pytest.mark.parametrize("form", ["lz4", "zstd"])
def test_broken_jump_table_entry(tmp_path: Path, field: str, length: int, form: str) -> None:
    blob = make(tmp_path / "layer", form=form, block_size=65536)
    index_offset, count = struct.unpack_from("<QQ", blob, 40)
    put(index_offset, struct.pack("<I", length))(blob)
    put(64, struct.pack("<I", raw_crc32c(bytes(blob[index_offset : index_offset + 4 * count]))))(blob)
    with_digest(blob, 0)
    refuse(tmp_path / "layer", blob, f"zfile.{field}")


def test_blocks_that_reach_into_the_jump_table(tmp_path: Path) -> None:
    blob = make(tmp_path / "layer", form="lz4")
    index_offset, count = struct.unpack_from("<QQ", blob, 40)
    last = struct.unpack_from("<I", blob, index_offset + 4 * count - 4)[0]
    put(index_offset + 4 * count - 4, struct.pack("<I", last + 1))(blob)
    put(64, struct.pack("<I", raw_crc32c(bytes(blob[index_offset : index_offset + 4 * count]))))(blob)
    with_digest(blob, 0)
    refuse(tmp_path / "layer", blob, "zfile.index.length")


@pytest.mark.parametrize("form", ["lz4", "zstd"])
def test_damaged_block_is_an_error_and_never_zeros(tmp_path: Path, form: str) -> None:
    blob = make(tmp_path / "layer", form=form)
    first = struct.unpack_from("<I", blob, struct.unpack_from("<Q", blob, 40)[0])[0]
    blob[512 + first + 100] ^= 1
    (tmp_path / "layer").write_bytes(blob)
    layer = Layer(tmp_path / "layer")
    with pytest.raises(InvalidInputError, match=r"zfile\.block\.crc"):
        layer.verify()
    with pytest.raises(AenvError):
        Stack([layer]).read(0, 4096)
    with pytest.raises(AenvError):
        Image(Stack([layer])).read(0, 4096)
    assert Stack([layer]).read(65536, 4096) == random.Random(1).randbytes(8192)[:4096]


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("tar.checksum", put(0, b"X")),
        ("tar.pax.length", lambda b: (put(124, b"00000002000\0")(b), fix_tar(b, 0))[0]),
        ("tar.member.magic", lambda b: (put(1024 + 257, b"xxtar")(b), fix_tar(b, 1024))[0]),
        ("tar.member.checksum", put(1024, b"X")),
        ("tar.pax.record", put(512, b"99")),
        ("tar.pax.size", lambda b: put(512 + bytes(b[512:600]).index(b"=") + 1, b"z")(b)),
        ("tar.size", lambda b: put(512 + bytes(b[512:600]).index(b"=") + 1, b"9")(b)),
    ],
)
def test_broken_tar_wrapper(tmp_path: Path, field: str, edit: Edit) -> None:
    blob = make(tmp_path / "layer", tar=True)
    edit(blob)
    refuse(tmp_path / "layer", blob, field)


def fix_tar(blob: bytearray, offset: int) -> None:
    head = bytes(blob[offset : offset + 512])
    blob[offset + 148 : offset + 156] = b"%06o\0 " % sum(head[:148] + b" " * 8 + head[156:])


def test_tar_with_a_plain_header_only(tmp_path: Path) -> None:
    blob = make(tmp_path / "layer", tar=True)
    plain = bytearray(blob[1024:])
    size = os.path.getsize(tmp_path / "layer") - 1536 - 1024
    plain[124:136] = b"%011o\0" % size
    fix_tar(plain, 0)
    (tmp_path / "other").write_bytes(plain)
    assert Stack([Layer(tmp_path / "other")]).read(0, SIZE) == Stack([Layer(tmp_path / "layer")]).read(0, SIZE)


@pytest.mark.parametrize("options", [{}, {"form": "lz4"}, {"form": "zstd", "tar": True}])
def test_layer_cut_at_any_place_is_refused(tmp_path: Path, options: dict[str, object]) -> None:
    blob = make(tmp_path / "layer", **options)
    cuts = {0, 1, 511, 512, 1023, 4096, 8191, *(random.Random(5).randrange(len(blob) - 1024) for _ in range(100))}
    for cut in sorted(cuts):
        (tmp_path / "cut").write_bytes(blob[:cut])
        with pytest.raises(InvalidInputError):
            Layer(tmp_path / "cut")


@pytest.mark.parametrize("options", [{}, {"form": "lz4"}, {"form": "zstd", "block_size": 65536}, {"tar": True}])
def test_random_damage_never_crashes(tmp_path: Path, options: dict[str, object]) -> None:
    blob = make(tmp_path / "layer", **options)
    generator = random.Random(6)
    for _ in range(300):
        damaged = bytearray(blob)
        for _ in range(generator.randrange(1, 4)):
            at = generator.choice([generator.randrange(len(blob)), -1 - generator.randrange(min(8192, len(blob)))])
            damaged[at] = generator.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            layer = Layer(tmp_path / "damaged")
            layer.verify()
            Stack([layer]).read(0, SIZE)
        except AenvError:
            continue


def test_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(AenvError, match="path"):
        Layer(tmp_path / "missing")
    with pytest.raises(InvalidInputError, match="regular file"):
        Layer(tmp_path)


@pytest.mark.parametrize(
    ("field", "offset", "data"),
    [
        ("index.header.magic0", 0, b"X"),
        ("index.header.flags", 28, b"\3"),
        ("index.header.uuid", 56, b"z"),
        ("index.header.uuid", 56, b"ffffffff"),
        ("index.header.index_offset", 32, b"\1"),
    ],
)
def test_broken_index_header_of_a_writable_layer(
    new_writable: NewWritable, field: str, offset: int, data: bytes
) -> None:
    files = new_writable("top", SIZE)
    blob = bytearray(files[1].read_bytes())
    put(offset, data)(blob)
    files[1].write_bytes(blob)
    for open_it in (lambda: Layer(*files), lambda: Image(None, *files)):
        with pytest.raises(InvalidInputError) as caught:
            open_it()
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("index.length", (word0(8, 0), 8)),
        ("index.offset", (word0((1 << 50) - 2, 9), 8)),
        ("index.moffset", (word0(8, 8), 7)),
        ("index.moffset", (word0(8, 8), 1 << 40)),
    ],
)
def test_broken_entry_of_a_standard_writable_layer(
    vectors: Path, tmp_path: Path, field: str, words: tuple[int, int]
) -> None:
    data, index = tmp_path / "data", tmp_path / "index"
    data.write_bytes((vectors / "layer2.rw.data").read_bytes())
    blob = bytearray((vectors / "layer2.rw.index").read_bytes())
    put(4096 + 16, struct.pack("<QQ", *words))(blob)
    index.write_bytes(blob)
    for open_it in (lambda: Layer(data, index), lambda: Image(None, data, index)):
        with pytest.raises(InvalidInputError) as caught:
            open_it()
        assert caught.value.field == field
    assert index.read_bytes() == blob, "nothing was changed"
