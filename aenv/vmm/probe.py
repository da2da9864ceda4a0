"""What can this host run? Found out by trying: a file /dev/kvm proves nothing.

On a host that is itself a paravirtual machine KVM may be there and emulate every instruction of a stock kernel, which
then never boots. So a small program (probe_rom.S) is run in a virtual machine, and must come to its end in time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import msgspec

from aenv.errors import UnavailableError
from aenv.vmm.base import Vmm, VmmKind
from aenv.vmm.qemu import QemuVmm
from aenv.vmm.spawn import run

CACHE_NAME = "probe.json"
KVM = Path("/dev/kvm")
TIMEOUT = 3.0  # seconds; hardware needs 0.1, starting QEMU included
KVM_GET_API_VERSION = 0xAE00  # linux/kvm.h; the answer has been 12 since Linux 2.6.22
API_VERSION = 12
# The program writes 42 to isa-debug-exit, which ends QEMU with twice that and one.
SUCCESS = 42 << 1 | 1

PROGRAM = bytes.fromhex(
    "fa2e660f0116d0000f20c00c010f22c066ea18000f00080066b810008ed88ec08ed0bc00800000bf0010000031c0b9000c00"
    "00fcf3abc7050010000003200000c7050020000003300000c7050030000083000000b8001000000f22d80f20e00c200f22e0"
    "b9800000c00f32660d00010f300f20c00d000000800f22c0ea83000f001800bb80f0fa02ffcb75fcb9e8030000890c250090"
    "00000f013c2500900000e2ef31c00fa2b82a000000e7f4f4ebfd0000000000000000ffff0000009bcf00ffff00000093cf00"
    "ffff0000009baf001f00b0000f00"
)
ROM_SIZE = 64 << 10
RESET_VECTOR = 0xFFF0


class Probe(msgspec.Struct, frozen=True):
    """The best kind of VMM this host can run, why, and what a person can do to get a faster one."""

    kind: VmmKind
    version: str
    reasons: list[str]
    advice: list[str]


class _Cached(msgspec.Struct):
    key: str
    probe: Probe


def rom() -> bytes:
    """The firmware image: the program, and a jump to it where the processor starts."""
    image = bytearray(ROM_SIZE)
    image[: len(PROGRAM)] = PROGRAM
    image[RESET_VECTOR : RESET_VECTOR + 3] = b"\xe9" + (-(RESET_VECTOR + 3) & 0xFFFF).to_bytes(2, "little")
    return bytes(image)


async def probe(cache: Path | None = None, *, kvm: Path = KVM) -> Probe:
    """Try what this host can run. With a directory `cache` the result is kept for this boot and this QEMU.

    Raises UnavailableError when there is no QEMU.
    """
    emulation = await QemuVmm.detect(VmmKind.QEMU_TCG)
    key = _cache_key(emulation.version, kvm)
    file = None if cache is None else cache / CACHE_NAME
    if file is not None and (known := _read_cache(file, key)) is not None:
        return known
    problem = await _try_kvm(QemuVmm(VmmKind.QEMU_KVM, version=emulation.version, binary=emulation.binary), kvm)
    if problem is None:
        found = Probe(VmmKind.QEMU_KVM, emulation.version, ["a virtual machine with KVM ran a test program"], [])
    else:
        reason, advice = problem
        reasons = [reason, "software emulation (TCG) needs nothing of the host and works everywhere"]
        found = Probe(VmmKind.QEMU_TCG, emulation.version, reasons, [advice])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(_Cached(key, found)))
        temporary.rename(file)
    return found


async def select_vmm(setting: str, cache: Path | None = None) -> Vmm:
    """The VMM for the setting `vmm.kind`: `auto`, `qemu-kvm` or `qemu-tcg`.

    Raises UnavailableError with reason and advice when this host cannot run it.
    """
    if setting == VmmKind.QEMU_TCG:
        return await QemuVmm.detect(VmmKind.QEMU_TCG)
    found = await probe(cache)
    if setting not in ("auto", found.kind):
        raise UnavailableError(
            f"{setting} does not work here: {found.reasons[0]}", hint="; ".join(found.advice) or None
        )
    return await QemuVmm.detect(found.kind)


async def _try_kvm(vmm: QemuVmm, kvm: Path) -> tuple[str, str] | None:
    """None when KVM works, else the reason in words and what to do about it."""
    problem = _open_kvm(kvm)
    if problem is not None:
        return problem
    image = os.memfd_create("probe-rom")
    try:
        os.write(image, rom())
        command = [
            str(vmm.binary),
            "-M", "microvm,acpi=off", "-accel", "kvm", "-cpu", vmm.cpu_model, "-m", "16M",
            "-nodefaults", "-no-user-config", "-display", "none",
            "-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-bios", f"/proc/self/fd/{image}",
        ]  # fmt: skip
        done = await run(command, fds={image: image}, timeout=TIMEOUT, check=False)
    except UnavailableError as error:
        if "did not end" not in error.message:
            return f"{kvm} is there, but {error.message}", "see what the message says"
        return (
            f"{kvm} is there, but a test program did not end within {TIMEOUT:g} s: KVM emulates the guest here",
            "run on a host with hardware virtualisation (vmx or svm in /proc/cpuinfo): bare metal, or a virtual "
            "machine of a type that offers nested virtualisation",
        )
    finally:
        os.close(image)
    if done.status == SUCCESS:
        return _check_group(kvm)
    said = re.sub(r"\s+", " ", done.stderr.decode(errors="replace")).strip()[-300:]
    return (
        f"{kvm} is there, but a virtual machine with it fails (status {done.status}): {said or 'no message'}",
        "run on a host with hardware virtualisation (vmx or svm in /proc/cpuinfo)",
    )


def _check_group(kvm: Path) -> tuple[str, str] | None:
    """Machines run as users of their own, in the group of the device."""
    mode = kvm.stat().st_mode
    if os.geteuid() != 0 or mode & 0o060 == 0o060 or mode & 0o006 == 0o006:
        return None
    return f"{kvm} works, but only for root: machines do not run as root", f"chgrp kvm {kvm} && chmod 660 {kvm}"


def _open_kvm(kvm: Path) -> tuple[str, str] | None:
    try:
        fd = os.open(kvm, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
            return (
                f"there is no {kvm}",
                "switch virtualisation on in the firmware (or nested virtualisation in the host of this machine) and "
                "load the module kvm_intel or kvm_amd",
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return f"{kvm} may not be opened by this user", "run as root, or join the group kvm"
        return f"{kvm} cannot be opened: {error.strerror}", "look into the kernel log"
    try:
        version = fcntl.ioctl(fd, KVM_GET_API_VERSION, 0)
    except OSError as error:
        return f"{kvm} does not answer: {error.strerror}", "check that it is the device 10:232"
    finally:
        os.close(fd)
    if version != API_VERSION:
        return f"{kvm} speaks version {version}, not {API_VERSION}", "use a kernel with the stable KVM interface"
    return None


def _cache_key(version: str, kvm: Path) -> str:
    """Changes with everything the result depends on."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        status = kvm.stat()
        device = f"{status.st_rdev} {status.st_mode} {status.st_gid}"
    except OSError:
        device = "none"
    return f"{boot} {os.uname().release} {version} {os.geteuid()} {kvm} {device}"


def _read_cache(file: Path, key: str) -> Probe | None:
    """None when there is none, or it is not for this host as it is now, or it is damaged: it is only a cache."""
    try:
        cached = msgspec.json.decode(file.read_bytes(), type=_Cached)
    except (OSError, msgspec.DecodeError):
        return None
    return cached.probe if cached.key == key else None
