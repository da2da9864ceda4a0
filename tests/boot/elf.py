"""Small ELF files for tests: kernel modules and kernels."""

from __future__ import annotations

import struct


def module(*strings: str) -> bytes:
    """An ELF-64 with a section `.modinfo` that holds the strings."""
    info = b"".join(s.encode() + b"\0" for s in strings)
    names = b"\0.modinfo\0.shstrtab\0"
    at_info, at_names = 64, 64 + len(info)
    at_table = at_names + len(names)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, at_table, 0, 64, 0, 0, 64, 3, 2
    )  # fmt: skip
    table = bytes(64)
    table += struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, at_info, len(info), 0, 0, 1, 0)
    table += struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    return header + info + names + table


def kernel(*, pvh: bool = True) -> bytes:
    """An ELF-64 with one note: the PVH entry point or another one."""
    note = struct.pack("<III", 4, 4, 18 if pvh else 17) + b"Xen\0" + b"\0\0\0\1"
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )  # fmt: skip
    return header + struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4) + note


def bzimage(release: str, payload: bytes, *, size: int | None = None) -> bytes:
    """A bzImage with the fields that we read. `size` is what the payload's trailer says, if it has one."""
    trailer = b"" if size is None else struct.pack("<I", size)
    setup = bytearray(1024)
    setup[0x1F1] = 1  # one sector of set-up code after the boot sector
    setup[0x202:0x206] = b"HdrS"
    setup[0x20E:0x210] = struct.pack("<H", 0x100)
    setup[0x248:0x250] = struct.pack("<II", 0, len(payload) + len(trailer))
    text = f"{release} (someone) #1 SMP".encode() + b"\0"
    setup[0x300 : 0x300 + len(text)] = text
    return bytes(setup) + payload + trailer
