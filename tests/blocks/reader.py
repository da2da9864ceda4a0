"""A second reader of overlaybd layers, in plain Python, that shares no code with the one under test."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

CRC_TABLE = []
for _i in range(256):
    for _ in range(8):
        _i = _i >> 1 ^ (0x82F63B78 if _i & 1 else 0)
    CRC_TABLE.append(_i)


def raw_crc32c(data: bytes, crc: int = 0) -> int:
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc


def lz4_block(data: bytes) -> bytes:
    """Decode one block of the LZ4 block format."""
    out = bytearray()
    at = 0
    while at < len(data):
        token = data[at]
        at += 1
        literals = token >> 4
        if literals == 15:
            while True:
                literals += data[at]
                at += 1
                if data[at - 1] != 255:
                    break
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        distance = data[at] | data[at + 1] << 8
        at += 2
        length = (token & 15) + 4
        if token & 15 == 15:
            while True:
                length += data[at]
                at += 1
                if data[at - 1] != 255:
                    break
        assert 0 < distance <= len(out)
        for _ in range(length):
            out.append(out[-distance])
    return bytes(out)


def untar(blob: bytes) -> bytes:
    if blob[257:262] != b"ustar":
        return blob
    assert blob[156:157] == b"x"
    assert blob[:14] == b"overlaybd.pax\0"
    length, _, rest = blob[512:1024].rstrip(b"\0").partition(b" ")
    assert len(blob[512:1024].rstrip(b"\0")) == int(length)
    size = int(rest.removeprefix(b"size=").removesuffix(b"\n"))
    assert blob[1024:1039] == b"overlaybd.commit"[:15]
    for block in (blob[:512], blob[1024:1536]):
        assert int(block[148:154], 8) == sum(block[:148] + b" " * 8 + block[156:])
    assert len(blob) == 1536 + -(-size // 512) * 512 + 1024
    assert not any(blob[1536 + size :])
    return blob[1536 : 1536 + size]


def unzfile(blob: bytes) -> bytes:
    if blob[:6] != b"ZFile\0":
        return blob
    for head, flags in ((blob[:512], 0x1B), (blob[-512:], 0x16)):
        size, digest, found = struct.unpack_from("<IIQ", head, 24)
        assert (size, found) == (96, flags)
        assert raw_crc32c(head[:28] + bytes(4) + head[32:]) == digest
    index_offset, blocks, original, index_crc, _, block_size = struct.unpack_from("<QQQIII", blob, 40)
    algo, verify = blob[76], blob[88]
    table = blob[index_offset : index_offset + 4 * blocks]
    assert raw_crc32c(table) == index_crc
    assert index_offset + 4 * blocks + 512 == len(blob)
    at = 512
    packed = []
    for (length,) in struct.iter_unpack("<I", table):
        body = blob[at : at + length - 4 * verify]
        if verify:
            assert raw_crc32c(body, 100007) == struct.unpack_from("<I", blob, at + length - 4)[0]
        packed.append(body)
        at += length
    assert at == index_offset
    if algo == 1:
        plain = [lz4_block(body) for body in packed]
        assert all(len(block) == block_size for block in plain[:-1])
        out = b"".join(plain)
    else:
        out = subprocess.run(["zstd", "-dcq"], input=b"".join(packed), capture_output=True, check=True).stdout
    assert len(out) == original
    return out


@dataclass
class Layer:
    """A parsed sealed layer: `segments` are (sector, sectors, data or None)."""

    virtual_size: int
    uuid: str
    parent_uuid: str
    user_tag: str
    segments: list[tuple[int, int, bytes | None]]

    def lay_over(self, image: bytearray) -> None:
        for sector, sectors, data in self.segments:
            image[sector * 512 : (sector + sectors) * 512] = bytes(sectors * 512) if data is None else data


def read_layer(path: Path) -> Layer:
    """Parse a sealed layer as section 1 of the format's description says, checking every rule on the way."""
    blob = unzfile(untar(path.read_bytes()))
    head, tail = blob[:4096], blob[-4096:]
    magic = bytes.fromhex("4c534d54000102006 57e63d29444084ca2d2c8ec4fcfae8a".replace(" ", ""))
    assert head[:24] == tail[:24] == magic
    assert struct.unpack_from("<II", head, 24)[1] & 3 == 3
    assert struct.unpack_from("<II", tail, 24) == (390, 6)
    index_offset, count, virtual_size = struct.unpack_from("<QQQ", tail, 32)
    assert count <= 1_000_000
    assert index_offset + 16 * count <= len(blob) - 4096
    segments = []
    end = 0
    for i in range(count):
        word0, word1 = struct.unpack_from("<QQ", blob, index_offset + 16 * i)
        sector, sectors = word0 & (1 << 50) - 1, word0 >> 50
        moffset, zeroed = word1 & (1 << 55) - 1, word1 >> 55 & 1
        if sector == (1 << 50) - 1:
            continue
        assert sectors > 0
        assert sector >= end, "sorted and disjoint"
        end = sector + sectors
        assert moffset >= 8
        assert moffset + (0 if zeroed else sectors) <= index_offset // 512
        segments.append((sector, sectors, None if zeroed else blob[moffset * 512 : (moffset + sectors) * 512]))
    text = [tail[a:b].split(b"\0")[0].decode() for a, b in ((56, 93), (93, 130), (134, 390))]
    return Layer(virtual_size, text[0], text[1], text[2], segments)
