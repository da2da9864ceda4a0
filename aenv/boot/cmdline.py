"""The guest's kernel command line: facts in, one string out."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aenv.errors import InvalidInputError, UnavailableError
from aenv.network import base as network
from aenv.vmm.base import VmmKind

LENGTH_MAX = 2047  # COMMAND_LINE_SIZE of x86 less the NUL
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")
_WORD = re.compile(r"[!-~]{1,255}")  # printable, no blanks


@dataclass(frozen=True, slots=True)
class GuestOptions:
    """What a caller may choose. `init` is the path of the image's own init, to be run beside envd; `rootflags` are
    ext4 mount options; `extra` are more words for the kernel; `verbose` lets the kernel talk on the console."""

    hostname: str | None = None
    dns: Sequence[str] = network.DEFAULT_DNS
    init: str | None = None
    rootflags: str | None = None
    extra: Sequence[str] = field(default=())
    verbose: bool = False


def kernel_cmdline(kind: VmmKind, options: GuestOptions | None = None, *, tsc_khz: int | None = None) -> str:
    """The whole command line for a guest of `kind`.

    `tsc_khz` is the host's TSC frequency; by default it is read from this host when it is needed (TCG).
    Raises InvalidInputError naming the option, UnavailableError when the frequency is needed and unknown.
    """
    options = options or GuestOptions()
    words = [*_kernel_words(options.verbose), *_machine_words(kind, tsc_khz), *_network_words(), *_guest_words(options)]
    for word in options.extra:
        words.append(_checked("extra", word))
    line = " ".join(words)
    if len(line) > LENGTH_MAX:
        raise InvalidInputError("command line", f"{len(line)} bytes, a kernel takes {LENGTH_MAX}")
    return line


def _kernel_words(verbose: bool) -> list[str]:
    return [
        "console=ttyS0",
        *(["loglevel=7"] if verbose else ["quiet", "loglevel=4"]),  # warnings still show: they explain a dead guest
        "panic=-1",  # reset at once, so that the VMM ends and says so
        "8250.nr_uarts=1",
        # A guest stands still between capture and restore: watchdogs would report that as lock-ups.
        "nowatchdog",
        # A page fault under "always" may dirty 2 MiB where the program wanted 4 KiB; each dirty page is captured.
        "transparent_hugepage=madvise",
        "cryptomgr.notests",  # self-tests of ciphers: half a second of every emulated boot
        # RDRAND seeds the pool at boot; envd reseeds it after every restore.
        "random.trust_cpu=on",
    ]


def _machine_words(kind: VmmKind, tsc_khz: int | None) -> list[str]:
    if kind is VmmKind.QEMU_TCG:
        khz = host_tsc_khz() if tsc_khz is None else tsc_khz
        if not 100_000 <= khz <= 20_000_000:
            raise InvalidInputError("tsc_khz", f"{khz} is no frequency of a TSC in kHz")
        return [
            "reboot=t",  # microvm has no keyboard controller: only a triple fault resets it
            # Calibration against the PIT fails on a busy host when instructions are emulated: the guest then hangs.
            f"tsc_early_khz={khz}",
            "tsc=reliable",  # no watchdog against other clock sources, which emulation makes look wrong
            "mitigations=off",  # emulated code does not speculate; the mitigations only cost instructions
            # Translated code is found again by its virtual address: with randomised addresses every program is
            # translated anew each time it runs (a shell command took 120 ms instead of 35 ms). The VM is the isolation.
            "norandmaps",
            # X86_FEATURE_CX16 (word 4, bit 13): QEMU before 8.0 emulates cmpxchg16b with a stale idea of where the flags
            # are, and an interrupt right behind it finds, and restores, garbage in EFLAGS: the kernel's allocator, which
            # uses it all the time, then ends in a double fault. Without the feature it disables interrupts instead.
            "clearcpuid=141",
            "init_on_alloc=0",  # clearing every page twice is costly when instructions are emulated
        ]
    if kind is VmmKind.QEMU_KVM:
        return ["reboot=t"]
    return ["reboot=k", "pci=off"]  # Firecracker: a keyboard controller for the reset and no PCI


def _network_words() -> list[str]:
    return [
        f"aenv.ip4={network.GUEST_ADDRESS}/{network.PREFIX_LENGTH}",
        f"aenv.gw4={network.HOST_ADDRESS}",
        f"aenv.ip6={network.GUEST_ADDRESS6}/{network.PREFIX_LENGTH6}",
        f"aenv.gw6={network.HOST_ADDRESS6}",
        f"aenv.gwmac={network.TAP_MAC}",
    ]


def _guest_words(options: GuestOptions) -> list[str]:
    words = []
    if options.dns:
        for server in options.dns:
            try:
                ipaddress.ip_address(server)
            except ValueError as error:
                raise InvalidInputError("dns", str(error)) from error
        words.append(_checked("dns", "aenv.dns=" + ",".join(options.dns)))
    if options.hostname is not None:
        if not _HOST_NAME.fullmatch(options.hostname):
            raise InvalidInputError("hostname", f"{options.hostname!r} is not a host name")
        words.append(f"aenv.hostname={options.hostname}")
    if options.init is not None:
        if not options.init.startswith("/"):
            raise InvalidInputError("init", f"{options.init!r} is not an absolute path")
        words.append(_checked("init", f"aenv.init={options.init}"))
    if options.rootflags is not None:
        words.append(_checked("rootflags", f"aenv.rootflags={options.rootflags}"))
    return words


def _checked(field_name: str, word: str) -> str:
    # A quote would swallow the words after it, and guest/init takes values of at most 255 bytes.
    if not _WORD.fullmatch(word) or '"' in word:
        raise InvalidInputError(field_name, f"{word!r} is not one word of at most 255 printable characters")
    return word


def host_tsc_khz(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Frequency of this host's time stamp counter in kHz, as QEMU's emulation passes it through to the guest.

    `cpu MHz` is the current clock of the core on bare metal with frequency scaling, but BogoMIPS is twice the TSC
    frequency on x86 (the kernel presets loops_per_jiffy from tsc_khz, arch/x86/kernel/tsc.c), so that is asked first.
    Raises UnavailableError when the file has neither.
    """
    values: dict[str, float] = {}
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        try:
            values.setdefault(key.strip().lower(), float(value))
        except ValueError:
            continue
    if values.get("bogomips", 0) > 0:
        return round(values["bogomips"] * 1000 / 2)
    if values.get("cpu mhz", 0) > 0:
        return round(values["cpu mhz"] * 1000)
    raise UnavailableError(f"{cpuinfo} does not tell the frequency of the time stamp counter")
