"""The manifest of a snapshot: what it consists of and what a host must have to restore it.

It is written last and atomically: a snapshot directory counts when its manifest is there.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from aenv.vmm.base import Machine, Vmm, VmmKind

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state"  # device state without RAM
VERSION = 2
SIZE_LIMIT = 1 << 20  # bytes of a manifest; a real one has about 1 kB
MAX_LAYERS = 255

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class SnapshotKind(enum.StrEnum):
    TEMPLATE = "template"  # built
    SNAPSHOT = "snapshot"  # captured from a sandbox


class BootFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kernel or initrd that the guest was booted from: needed again only for a cold boot."""

    path: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> BootFile:
        return cls(str(path.absolute()), file_digest(path))


class Disk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stack of sealed layers, lowest first. `size` is the virtual size in bytes."""

    layers: list[str]
    size: int


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a command in the guest finds: defaults of the template."""

    env: dict[str, str] = {}
    user: str = "user"
    workdir: str | None = None
    start_cmd: str = ""
    ready_cmd: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module. `created` is seconds since 1970. Layers and `state` are names of files in the snapshot's
    directory, which has a (hard) link to every layer it needs: deleting one snapshot never breaks another, and space
    is given back with the last link. `memory` is a stack like the disk's; it is empty, and `state` None, when only the
    file system was kept. `sandbox` is what a snapshot was captured from and `parent` what it holds the changes to."""

    id: str
    build_id: str
    kind: SnapshotKind
    created: float
    vmm_kind: VmmKind
    vmm_version: str
    cpu_model: str
    devices: str
    vcpus: int
    memory_mib: int
    kernel: BootFile
    initrd: BootFile
    cmdline: str
    memory: list[str]
    disk: Disk
    state: str | None = STATE_NAME
    context: Context = Context()
    parent: str | None = None
    sandbox: str | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        for field, problem in self._problems():
            raise InvalidInputError(f"manifest.{field}", problem)

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.version != VERSION:
            yield "version", f"{self.version} is unknown, this program writes {VERSION}"
        for field, name in (
            ("id", self.id),
            ("build_id", self.build_id),
            ("parent", self.parent),
            ("sandbox", self.sandbox),
            ("state", self.state),
        ):
            if name is not None and not _NAME.fullmatch(name):
                yield field, f"{name!r} is not a name"
        for field, layers in (("memory", self.memory), ("disk.layers", self.disk.layers)):
            for number, name in enumerate(layers):
                if not _NAME.fullmatch(name):
                    yield f"{field}[{number}]", f"{name!r} is not a file name"
            if len(set(layers)) != len(layers):
                yield field, "names a layer twice"
            if len(layers) > MAX_LAYERS:
                yield field, f"{len(layers)} layers; a stack has at most {MAX_LAYERS}"
        if not self.disk.layers:
            yield "disk.layers", "is empty"
        if bool(self.memory) != (self.state is not None):
            yield "state", "memory and device state are kept together or not at all"
        if (self.parent is not None) != (self.kind is SnapshotKind.SNAPSHOT):
            yield "parent", "a snapshot has one and a template has none"
        if (self.sandbox is not None) != (self.kind is SnapshotKind.SNAPSHOT):
            yield "sandbox", "a snapshot has one and a template has none"
        if not 1 <= self.vcpus <= 1024:
            yield "vcpus", f"{self.vcpus} is out of range"
        if not 1 <= self.memory_mib <= 1 << 23:
            yield "memory_mib", f"{self.memory_mib} is out of range"
        if self.created < 0:
            yield "created", "is before 1970"
        for field, file in (("kernel", self.kernel), ("initrd", self.initrd)):
            if not file.path.startswith("/") or "\0" in file.path:
                yield f"{field}.path", f"{file.path!r} is not an absolute path"
            if not _DIGEST.fullmatch(file.sha256):
                yield f"{field}.sha256", "is not a SHA-256 in lower-case hex"
        if self.disk.size <= 0 or self.disk.size % 512:
            yield "disk.size", f"{self.disk.size} is not a positive number of sectors"

    @property
    def machine(self) -> Machine:
        return Machine(self.vcpus, self.memory_mib, Path(self.kernel.path), Path(self.initrd.path), self.cmdline)

    def require_vmm(self, vmm: Vmm) -> None:
        """Raise UnavailableError, naming what differs, when `vmm` cannot load this snapshot's device state."""
        for what, needed, present in (
            ("VMM", self.vmm_kind.value, vmm.kind.value),
            ("VMM version", self.vmm_version, vmm.version),
            ("CPU model", self.cpu_model, vmm.cpu_model),
            ("set of devices", self.devices, vmm.devices),
        ):
            if needed != present:
                raise UnavailableError(
                    f"snapshot {self.id} cannot be restored here: its {what} is {needed}, this node has {present}",
                    hint="build the template again on this node",
                )

    def require_boot_files(self) -> None:
        """Raise UnavailableError when the kernel or the initrd is missing or is not the same file any more."""
        for what, file in (("kernel", self.kernel), ("initrd", self.initrd)):
            path = Path(file.path)
            if not path.exists():
                raise UnavailableError(f"snapshot {self.id}: its {what} {path} is gone")
            if file_digest(path) != file.sha256:
                raise UnavailableError(f"snapshot {self.id}: its {what} {path} has changed")

    def save(self, directory: Path) -> None:
        """Write it into `directory`, durably and in one step."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        write_atomically(directory / MANIFEST_NAME, text)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read it from `directory`. Raises NotFoundError, or InvalidInputError naming the wrong field."""
        path = directory / MANIFEST_NAME
        try:
            with path.open("rb") as file:
                text = file.read(SIZE_LIMIT + 1)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no snapshot in {directory}") from error
        if len(text) > SIZE_LIMIT:
            raise InvalidInputError("manifest", f"{path} is larger than {SIZE_LIMIT} bytes")
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what, _, where = str(error).partition(" - at `$")
            raise InvalidInputError("manifest" + where.rstrip("`"), f"{what} (in {path})") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, content: bytes) -> None:
    """After a crash there is the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
