"""The ELF kernel inside a bzImage.

A guest started from the ELF file skips decompressing itself, which under software emulation costs more than a third
of the boot, and Firecracker takes nothing else. What is lost is the random base address of the kernel, which clones
of one snapshot share anyway.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable

from aenv.boot.modules import decompress_with
from aenv.errors import InvalidInputError

_PVH_NOTE = 18  # XEN_ELFNOTE_PHYS32_ENTRY: the entry point that QEMU uses (Xen public headers, elfnote.h)
_PT_NOTE = 4


def extract_vmlinux(image: bytes, name: str) -> bytes:
    """The ELF file inside the bzImage `image`.

    Layout by the kernel's Documentation/arch/x86/boot.rst: setup_sects at 0x1f1, payload_offset and payload_length at
    0x248; after all but gzip payloads stands the length of the content in four bytes.
    Raises InvalidInputError when the image is broken, UnavailableError when a tool to decompress it is missing.
    """
    if image[0x202:0x206] != b"HdrS" or len(image) < 0x250:
        raise InvalidInputError(name, "the kernel is not a bzImage")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * 512 + offset
    payload = image[start : start + length]
    if len(payload) < length or length < 16:
        raise InvalidInputError(name, "the kernel image is cut")
    content = _decompress(payload, name)
    (size,) = struct.unpack("<I", payload[-4:])
    if size != len(content) or content[:5] != b"\x7fELF\x02":
        raise InvalidInputError(name, "the kernel image does not hold the kernel it says")
    return content


def boots_by_pvh(elf: bytes) -> bool:
    """Does the ELF kernel have the entry point that QEMU's microvm needs?"""
    try:
        (table,) = struct.unpack_from("<Q", elf, 32)
        size, count = struct.unpack_from("<HH", elf, 54)
        for number in range(count):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", elf, table + number * size)
            if kind == _PT_NOTE and _has_note(elf[offset : offset + length], b"Xen\0", _PVH_NOTE):
                return True
    except (struct.error, OverflowError):
        return False
    return False


def _has_note(notes: bytes, owner: bytes, wanted: int) -> bool:
    at = 0
    while at + 12 <= len(notes):
        owner_size, size, kind = struct.unpack_from("<III", notes, at)
        if kind == wanted and notes[at + 12 : at + 12 + owner_size] == owner:
            return True
        at += 12 + owner_size + (-owner_size % 4) + size + (-size % 4)
    return False


def _decompress(payload: bytes, name: str) -> bytes:
    magics: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
        (b"\x1f\x8b", gzip.decompress),
        (b"\xfd7zXZ\0", lzma.decompress),
        (b"\x5d\0\0", lzma.decompress),
        (b"BZh", bz2.decompress),
        (b"\x28\xb5\x2f\xfd", lambda data: decompress_with("zstd", data, name)),
        (b"\x02\x21\x4c\x18", lambda data: decompress_with("lz4", data, name)),
    )
    for magic, function in magics:
        if payload.startswith(magic):
            body = payload if magic == b"\x1f\x8b" else payload[:-4]
            try:
                return function(body)
            except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
                raise InvalidInputError(name, f"the kernel cannot be decompressed: {error}") from error
    raise InvalidInputError(name, f"the kernel is compressed in an unknown way ({payload[:4].hex()})")
