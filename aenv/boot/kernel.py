"""The guest's kernel: the distribution's own cloud kernel package, unpacked below the home directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aenv.boot.apt import Apt, Progress
from aenv.boot.lock import build_lock
from aenv.boot.vmlinux import boots_by_pvh, extract_vmlinux
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError

# In order of preference: a name pattern and the series it stands for. Debian's cloud kernels leave out drivers of
# real hardware; Ubuntu has -kvm in some releases and -generic in all, with the modules in a package of their own.
_DEBIAN = (r"^linux-image-6\.12\.[0-9].*-cloud-{arch}$", r"^linux-image-6\.1\.[0-9].*-cloud-{arch}$")
_UBUNTU = (r"^linux-image-[0-9].*-[0-9]+-(kvm|generic)$",)
_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+~_-]{2,80}")
_NEEDED_BYTES = 400 << 20  # a package of 60 MB, its content, the ELF kernel, and some air


@dataclass(frozen=True, slots=True)
class Kernel:
    """A prepared kernel. `vmlinuz` is a bzImage; `modules_dir` is its /lib/modules/RELEASE; `vmlinux` is the ELF file
    inside the bzImage, or None where this host cannot decompress it or it has no entry point for QEMU."""

    vmlinuz: Path
    modules_dir: Path
    release: str
    package: str
    vmlinux: Path | None = None

    @property
    def boot_image(self) -> Path:
        """What a VMM should start: the ELF file, which boots faster, else the bzImage."""
        return self.vmlinux or self.vmlinuz


def ensure_kernel(home: Path, progress: Progress) -> Kernel:
    """Find the kernel below `home/kernel`, or fetch the newest one that the package lists offer.

    The first kernel stays: templates remember its path, and snapshots hold a running copy of it. Takes a lock, so
    that two callers do the work once. Raises UnavailableError (no apt, no network, no space) with a hint,
    NotFoundError when the distribution has no fitting package, InvalidInputError when a package is not what it
    should be.
    """
    folder = home / "kernel"
    with build_lock(folder, ".fetch-*"):
        found = prepared_kernel(home)
        if found is not None:
            return found
        _check_space(folder)
        return _fetch(folder, Apt(progress), progress)


def prepared_kernel(home: Path) -> Kernel | None:
    """The kernel that an earlier run has prepared, if it is still whole."""
    folder = home / "kernel"
    try:
        record = json.loads((folder / "current.json").read_text())
        release, package = record["release"], record["package"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or a damaged record: fetching again repairs it
    if not isinstance(release, str) or not isinstance(package, str) or not _RELEASE.fullmatch(release):
        return None
    kernel = _kernel(folder / release, release, package)
    return kernel if kernel.vmlinuz.is_file() and (kernel.modules_dir / "kernel").is_dir() else None


def _kernel(folder: Path, release: str, package: str) -> Kernel:
    vmlinux = folder / "vmlinux"
    return Kernel(folder / "vmlinuz", folder / "modules", release, package, vmlinux if vmlinux.is_file() else None)


def choose(names: list[str]) -> str | None:
    """The newest of kernel package names, by the numbers in them; of equal ones `-kvm` before `-generic`."""
    fitting = [n for n in names if not n.endswith("-unsigned") and "-dbg" not in n]
    return max(fitting, key=lambda n: (_numbers(n), n.endswith("-kvm"), n), default=None)


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", re.sub(r"-cloud-.*$|-kvm$|-generic$", "", name))]


def _find_package(apt: Apt) -> tuple[str, list[str]]:
    """The image package and what has to be unpacked with it."""
    architecture = apt.architecture()
    if architecture != "amd64":
        raise UnavailableError(f"guests run on amd64 hosts only, this one is {architecture}")
    for pattern in _DEBIAN:
        package = choose(apt.names(pattern.format(arch=architecture)))
        if package:
            return package, [package]
    for pattern in _UBUNTU:
        package = choose(apt.names(pattern))
        if package:
            return package, [package, package.replace("linux-image-", "linux-modules-", 1)]
    raise NotFoundError(
        "the package lists offer no fitting kernel",
        hint="Debian needs a linux-image-6.12 or 6.1 cloud package, Ubuntu a linux-image -kvm or -generic one",
    )


def _fetch(folder: Path, apt: Apt, progress: Progress) -> Kernel:
    image, packages = _find_package(apt)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
        work = Path(name)
        tree = work / "tree"
        version = ""
        for number, package in enumerate(packages):
            download = work / str(number)
            download.mkdir()
            deb = apt.download(package, download)
            progress(f"unpacking {package}")
            apt.unpack(deb, tree)
            version = version or apt.version(deb)
        release = _arrange(tree, work / "ready", image, progress)
        target = folder / release
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work / "ready", target)
    _write_record(folder / "current.json", {"release": release, "package": image, "version": version})
    progress(f"kernel {release} is ready")
    return _kernel(target, release, image)


def _arrange(tree: Path, ready: Path, package: str, progress: Progress) -> str:
    """Take kernel and modules out of the unpacked package. Returns the release of the kernel."""
    images = sorted((tree / "boot").glob("vmlinuz-*"))
    homes = [p for base in ("lib", "usr/lib") for p in sorted((tree / base / "modules").glob("*")) if p.is_dir()]
    homes = [p for p in homes if (p / "kernel").is_dir()]
    if len(images) != 1 or len(homes) != 1:
        raise InvalidInputError(package, f"holds {len(images)} kernels and {len(homes)} module trees, not one each")
    release = image_release(images[0].read_bytes(), package)
    if release != homes[0].name:
        raise InvalidInputError(package, f"kernel {release} and modules {homes[0].name} do not belong together")
    ready.mkdir()
    try:
        elf = extract_vmlinux(images[0].read_bytes(), package)
    except UnavailableError as error:
        progress(f"{error}; the bzImage will do, its boot takes longer")
    else:
        if boots_by_pvh(elf):
            (ready / "vmlinux").write_bytes(elf)
    shutil.move(images[0], ready / "vmlinuz")
    shutil.move(homes[0], ready / "modules")
    return release


def image_release(image: bytes, name: str) -> str:
    """The release inside a bzImage (kernel Documentation/arch/x86/boot.rst: `HdrS` at 0x202, the offset of the
    version string less 0x200 at 0x20e). Raises InvalidInputError when it is none."""
    if image[0x202:0x206] != b"HdrS":
        raise InvalidInputError(name, "the kernel is not a bzImage")
    (offset,) = struct.unpack_from("<H", image, 0x20E)
    text = image[offset + 0x200 : offset + 0x200 + 256].split(b"\0")[0].split(b" ")[0].decode("ascii", "replace")
    if not _RELEASE.fullmatch(text):
        raise InvalidInputError(name, f"the kernel calls itself {text!r}")
    return text


def _write_record(path: Path, record: dict[str, str]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".current-")
    with os.fdopen(handle, "w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise UnavailableError(
            f"{folder} has {free >> 20} MiB free, a kernel needs {_NEEDED_BYTES >> 20} MiB",
            hint="free some disk space or choose another home",
        )
