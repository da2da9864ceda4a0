"""Archives in the newc format of cpio: what the kernel unpacks as an initramfs.

The format is that of the kernel's `Documentation/driver-api/early-userspace/buffer-format.rst`: per entry a header of
110 ASCII bytes (magic 070701 and 13 numbers of eight hex digits), the name with its NUL, padding to four bytes, the
data, padding to four bytes; the entry TRAILER!!! ends the archive. Equal entries give equal bytes: no times, no
inode numbers of the host, owner root.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

from aenv.errors import InvalidInputError

MAGIC = b"070701"
TRAILER = "TRAILER!!!"
HEADER_SIZE = 110
NAME_MAX = 4095  # PATH_MAX of the kernel's unpacker, with the NUL
DATA_MAX = 0xFFFFFFFF
_TYPES = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. `mode` holds the type and the permission bits; `data` is content or the target of a symbolic link;
    `major` and `minor` number a device node."""

    name: str
    mode: int
    data: bytes = b""
    major: int = 0
    minor: int = 0


def directory(name: str, permissions: int = 0o755) -> Entry:
    return Entry(name, stat.S_IFDIR | permissions)


def regular(name: str, data: bytes, permissions: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | permissions, data)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def character_device(name: str, major: int, minor: int, permissions: int = 0o600) -> Entry:
    return Entry(name, stat.S_IFCHR | permissions, b"", major, minor)


def write_archive(entries: Iterable[Entry]) -> bytes:
    """The archive with the entries in the order given; a directory has to stand before what is in it, because the
    kernel makes no parents. Raises InvalidInputError naming the entry."""
    parts: list[bytes] = []
    made: set[str] = set()
    for number, entry in enumerate(entries, start=1):
        _check(entry, made)
        made.add(entry.name)
        parts.append(_encode(entry, number))
    parts.append(_encode(Entry(TRAILER, 0), 0))
    return b"".join(parts)


def _check(entry: Entry, made: set[str]) -> None:
    name = entry.name
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise InvalidInputError("cpio name", f"{name!r} is not a clean relative path")
    if name == TRAILER:
        raise InvalidInputError("cpio name", f"{name!r} would end the archive")
    if len(name.encode()) >= NAME_MAX:
        raise InvalidInputError("cpio name", f"{name[:40]!r}… is longer than {NAME_MAX - 1} bytes")
    if name in made:
        raise InvalidInputError("cpio name", f"{name!r} is there twice")
    parent = "/".join(parts[:-1])
    if parent and parent not in made:
        raise InvalidInputError("cpio name", f"{name!r} comes before its directory {parent!r}")
    kind = stat.S_IFMT(entry.mode)
    if kind not in _TYPES or not 0 <= entry.mode <= 0xFFFF:
        raise InvalidInputError(f"cpio mode of {name}", f"{entry.mode:#o} has no known file type")
    if len(entry.data) > DATA_MAX:
        raise InvalidInputError(f"cpio data of {name}", "larger than 4 GiB")
    if entry.data and kind not in (stat.S_IFREG, stat.S_IFLNK):
        raise InvalidInputError(f"cpio data of {name}", "only files and symbolic links have data")
    if kind == stat.S_IFLNK and (not entry.data or b"\0" in entry.data or len(entry.data) >= NAME_MAX):
        raise InvalidInputError(f"cpio data of {name}", "not the target of a symbolic link")
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    for field, value in (("major", entry.major), ("minor", entry.minor)):
        if not 0 <= value <= 0xFFFFFFFF or (value and not device):
            raise InvalidInputError(f"cpio {field} of {name}", f"{value} does not fit")


def _encode(entry: Entry, inode: int) -> bytes:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (
        inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, entry.major, entry.minor, len(name), 0,
    )  # fmt: skip
    header = MAGIC + b"".join(b"%08X" % n for n in numbers)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def read_archive(archive: bytes) -> list[Entry]:
    """The entries of an archive that has one file per entry (no hard links). Raises InvalidInputError with the byte
    offset where the archive is wrong or cut."""
    entries: list[Entry] = []
    offset = 0
    while True:
        entry, offset = _decode(archive, offset)
        if entry.name == TRAILER:
            return entries
        entries.append(entry)


def _decode(archive: bytes, offset: int) -> tuple[Entry, int]:
    header = archive[offset : offset + HEADER_SIZE]
    if len(header) < HEADER_SIZE or header[:6] != MAGIC:
        raise InvalidInputError("cpio header", f"no newc header at byte {offset}")
    try:
        numbers = [int(header[i : i + 8].decode("ascii"), 16) for i in range(6, HEADER_SIZE, 8)]
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInputError("cpio header", f"bad number in the header at byte {offset}") from error
    mode, size, major, minor, name_size = numbers[1], numbers[6], numbers[9], numbers[10], numbers[11]
    at_name = offset + HEADER_SIZE
    at_data = at_name + name_size + (-(HEADER_SIZE + name_size) % 4)
    end = at_data + size + (-size % 4)
    name = archive[at_name : at_name + name_size]
    if end > len(archive) or not 0 < name_size <= NAME_MAX or name[-1:] != b"\0" or b"\0" in name[:-1]:
        raise InvalidInputError("cpio header", f"the entry at byte {offset} is cut or has a bad name")
    try:
        text = name[:-1].decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError("cpio name", f"not UTF-8 at byte {offset}") from error
    return Entry(text, mode, archive[at_data : at_data + size], major, minor), end
