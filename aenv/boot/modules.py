"""Kernel modules of an unpacked kernel package: which files are needed for a wish list, in the order of loading.

A package that was only unpacked has no modules.dep (depmod writes that at installation), so the dependencies are
read from the modules themselves: the ELF section `.modinfo` holds NUL-separated `key=value` strings, among them
`depends=a,b`. `modules.builtin` names what the kernel has inside.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from aenv.vmm.spawn import run_sync

SUFFIXES = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")


@dataclass(frozen=True, slots=True)
class Module:
    """A loadable module: its name with underscores, and the uncompressed ELF file."""

    name: str
    data: bytes


class ModuleTree:
    """The directory `/lib/modules/RELEASE` of one kernel package."""

    def __init__(self, root: Path) -> None:
        """Raises NotFoundError when `root` is not such a directory."""
        if not (root / "kernel").is_dir():
            raise NotFoundError(f"{root} holds no kernel modules")
        self._files = {_name(p): p for p in sorted((root / "kernel").rglob("*.ko*")) if _name(p)}
        builtin = root / "modules.builtin"
        lines = builtin.read_text().split() if builtin.exists() else []
        self._builtin = {_name(Path(line)) for line in lines}

    def resolve(self, names: Iterable[str]) -> list[Module]:
        """The modules and all that they depend on, each after its dependencies, without those built in.

        Raises NotFoundError for a name that the kernel does not have, InvalidInputError for a broken module file.
        """
        done: dict[str, Module] = {}
        for name in names:
            self._visit(normal(name), done, ())
        return list(done.values())

    def _visit(self, name: str, done: dict[str, Module], above: tuple[str, ...]) -> None:
        if name in done or (name in self._builtin and name not in self._files):
            return
        if name in above:
            raise InvalidInputError(f"module {name}", f"depends on itself by {' → '.join(above)}")
        if name not in self._files:
            wanted = f" (needed by {above[-1]})" if above else ""
            raise NotFoundError(f"this kernel has no module {name}{wanted}")
        data = decompress(self._files[name])
        for needed in depends(data, name):
            self._visit(needed, done, (*above, name))
        done[name] = Module(name, data)


def normal(name: str) -> str:
    """`virtio-net` and `virtio_net` are the same module."""
    return name.replace("-", "_")


def _name(path: Path) -> str:
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return normal(path.name.removesuffix(suffix))
    return ""


def decompress(path: Path) -> bytes:
    """The ELF file inside `.ko`, `.ko.xz`, `.ko.gz` or `.ko.zst`. Python 3.11 has no zstd, so that one needs the
    `zstd` tool. Raises InvalidInputError when the file is broken, UnavailableError without the tool."""
    data = path.read_bytes()
    try:
        if path.name.endswith(".xz"):
            return lzma.decompress(data)
        if path.name.endswith(".gz"):
            return gzip.decompress(data)
    except (lzma.LZMAError, OSError, EOFError) as error:
        raise InvalidInputError(f"module {path.name}", f"cannot be decompressed: {error}") from error
    if path.name.endswith(".zst"):
        return decompress_with("zstd", data, f"module {path.name}")
    return data


def decompress_with(tool: str, data: bytes, what: str) -> bytes:
    """Decompress with the `zstd` or `lz4` tool. Raises UnavailableError without it, InvalidInputError naming `what`
    when the data are broken."""
    if shutil.which(tool) is None:
        raise UnavailableError(f"{what} is {tool}-compressed and there is no {tool}", hint=f"apt-get install {tool}")
    result = run_sync([tool, "-dcq"], input=data, check=False)
    if result.status != 0:
        reason = result.stderr.decode(errors="replace").strip()
        raise InvalidInputError(what, f"cannot be decompressed: {reason}")
    return result.stdout


def depends(elf: bytes, name: str) -> list[str]:
    """The names that the module says it depends on. Raises InvalidInputError for what is no 64-bit ELF module."""
    found: list[str] = []
    for item in modinfo(elf, name):
        key, _, value = item.partition(b"=")
        if key == b"depends":
            try:
                found += [normal(part) for part in value.decode("ascii").split(",") if part]
            except UnicodeDecodeError as error:
                raise InvalidInputError(f"module {name}", "depends= is not ASCII") from error
    return found


def modinfo(elf: bytes, name: str) -> list[bytes]:
    """The strings of the section `.modinfo` (ELF-64, little endian: System V gABI, "Sections")."""
    broken = InvalidInputError(f"module {name}", "is not a 64-bit ELF kernel module")
    if elf[:6] != b"\x7fELF\x02\x01" or len(elf) < 64:
        raise broken
    try:
        (table,) = struct.unpack_from("<Q", elf, 40)
        size, count, names_at = struct.unpack_from("<HHH", elf, 58)
        if size < 64 or names_at >= count:
            raise broken
        sections = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    except (struct.error, OverflowError) as error:  # an offset beyond the file, or beyond the address space
        raise broken from error
    names = _content(elf, sections[names_at])
    for section in sections:
        at = section[0]
        if names[at : at + 9] == b".modinfo\0":
            return [item for item in _content(elf, section).split(b"\0") if item]
    raise broken


def _content(elf: bytes, section: tuple[int, ...]) -> bytes:
    offset, length = section[4], section[5]
    return elf[offset : offset + length]
