"""`aenv doctor`: what this machine can do, what will be used, and how to get what is missing."""

from __future__ import annotations

import asyncio
import enum
import importlib.resources
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aenv.boot.kernel import prepared_kernel
from aenv.cli.output import json_option, print_json, wants_json
from aenv.config import Config, load
from aenv.daemon import Daemon
from aenv.errors import AenvError, NotFoundError, UnavailableError
from aenv.network.check import check as check_network
from aenv.storage.blocks import control_socket
from aenv.storage.home import Home
from aenv.storage.repository import Repository
from aenv.vmm.base import Vmm, VmmKind
from aenv.vmm.probe import Probe, probe
from aenv.vmm.qemu import QemuVmm
from aenv.vmm.spawn import find_binary
from ublk.client import BlockClient

PYTHONS = ((3, 11), (3, 13))
BUILD_TOOLS = ("mmdebstrap", "mke2fs", "tar", "apt-get", "dpkg-deb")
BUILD_COMMAND = "sudo aenv template build base"
BUILD_MIB = 2500  # of disk: packages, kernel, one template
ROOM_MIB = 10 << 10  # of disk: below this a handful of paused sandboxes fills it
MEMORY_MIB = 1024
ANSWER_SECONDS = 5
RESEND = (6, 9)  # the Linux that sends requests again that a dead server has not answered
UBLK, FUSE = Path("/dev/ublk-control"), Path("/dev/fuse")


class Level(enum.StrEnum):
    OK = "ok"
    INFO = "info"  # nothing to do
    NOTE = "note"  # works, but something is to be done or could be better
    MISSING = "missing"  # sandboxes do not run without it


STYLES = {Level.OK: "green", Level.INFO: "dim", Level.NOTE: "yellow", Level.MISSING: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `hint` says what to do about it."""

    name: str
    level: Level
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    vmm: VmmKind | None
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return all(f.level is not Level.MISSING for f in self.findings)


@click.command("doctor")
@json_option
@click.pass_context
def doctor_command(ctx: click.Context, as_json: bool) -> None:
    """Check what this machine can do and say what is missing, what will be used and why.

    Changes nothing. Exit status 1 when something that sandboxes need is missing.
    """
    config = load({"home": ctx.find_root().obj["home"]})
    report = examine(config)
    if wants_json(as_json):
        print_json(
            {
                "ok": report.ok,
                "vmm": report.vmm,
                "home": str(config.home),
                "findings": [asdict(f) for f in report.findings],
            }
        )
    else:
        _print(report)
    sys.exit(0 if report.ok else 1)


def examine(config: Config) -> Report:
    """Try everything. Blocks for some seconds where KVM hangs."""
    findings = [*_host(), *_guest_programs()]
    vmm, setting = None, config["vmm.kind"]
    try:
        found = asyncio.run(probe())
    except AenvError as error:
        findings.append(Finding("QEMU", Level.MISSING, error.message, error.hint or ""))
    else:
        findings.append(Finding("QEMU", Level.OK, f"version {found.version}"))
        kind = found.kind if setting == "auto" else VmmKind(setting)
        findings += _acceleration(found, kind)
        if not (kind is VmmKind.QEMU_KVM and found.kind is not kind):
            vmm = QemuVmm(kind, version=found.version, binary=find_binary("qemu-system-x86_64"))
    for trial in check_network(config["network.uplink"]):
        findings.append(
            Finding(trial.name, Level.OK if trial.ok else Level.MISSING, trial.detail, "" if trial.ok else trial.hint)
        )
    template = _template(config, vmm)
    built = template.level is Level.OK
    findings += _build_tools(needed=not built)
    findings += [
        _kernel(config, needed=not built),
        template,
        _disk(config, built=built),
        *_blocks(config),
        _daemon(config),
    ]
    return Report(vmm.kind if vmm is not None else None, findings)


def _host() -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding("root", Level.OK, "taps and network namespaces can be made")
    else:
        yield Finding(
            "root", Level.MISSING, "not root: taps and namespaces cannot be made", "sudo aenv doctor, sudo aenv serve"
        )
    version = platform.python_version()
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Finding("Python", Level.OK, version)
    else:
        yield Finding("Python", Level.NOTE, f"{version} is untested", "use Python 3.11 to 3.13")
    uname = os.uname()
    if uname.machine == "x86_64":
        yield Finding("host", Level.INFO, f"{os.cpu_count()} CPUs, Linux {uname.release}")
    else:
        yield Finding("host", Level.MISSING, f"guests are x86_64, this machine is {uname.machine}")
    yield _memory()


def _memory() -> Finding:
    total, free = (_meminfo_mib(name) for name in ("MemTotal", "MemAvailable"))
    detail = f"{free} of {total} MiB available"
    if free >= MEMORY_MIB:
        return Finding("memory", Level.OK, detail)
    return Finding("memory", Level.NOTE, detail, "a sandbox of the base template may use 512 MiB and more")


def _meminfo_mib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) >> 10 if match else 0


def _guest_programs() -> Iterator[Finding]:
    folder = importlib.resources.files("aenv._guest")
    missing = [name for name in ("init", "envd") if not folder.joinpath(name).is_file()]
    if missing:
        yield Finding("guest programs", Level.MISSING, f"not built: {', '.join(missing)}", "make setup")
    else:
        yield Finding("guest programs", Level.OK, "init and envd are built")


def _acceleration(found: Probe, kind: VmmKind) -> Iterator[Finding]:
    """What will run the guests' instructions, and why."""
    reasons = "; ".join(found.reasons)
    advice = "; ".join(found.advice)
    if kind is VmmKind.QEMU_KVM and found.kind is not kind:
        yield Finding("VM monitor", Level.MISSING, f"vmm.kind asks for {kind.value}, but {reasons}", advice)
    elif kind is not found.kind:
        yield Finding("VM monitor", Level.NOTE, f"{kind.value}: vmm.kind asks for it", f"{found.kind.value} would work")
    elif kind is VmmKind.QEMU_KVM:
        yield Finding("VM monitor", Level.OK, f"{kind.value}: {reasons}")
    else:
        yield Finding("VM monitor", Level.NOTE, f"{kind.value}: {reasons}", f"to be faster: {advice}" if advice else "")


def _build_tools(needed: bool) -> Iterator[Finding]:
    for name in BUILD_TOOLS:
        try:
            yield Finding(name, Level.OK, str(find_binary(name)))
        except UnavailableError as error:
            level = Level.MISSING if needed else Level.NOTE
            yield Finding(name, level, "building a template needs it", error.hint or "")


def _kernel(config: Config, needed: bool) -> Finding:
    kernel = prepared_kernel(config.cache)
    if kernel is not None:
        return Finding("guest kernel", Level.OK, f"{kernel.release} in {config.cache / 'kernel'}")
    level = Level.NOTE if needed else Level.INFO
    return Finding("guest kernel", level, "not prepared yet", "the template's build fetches it; or aenv kernel")


def _template(config: Config, vmm: Vmm | None) -> Finding:
    name = "template base"
    try:
        template = Repository(config.home / "templates").find("base")
        if vmm is not None:
            template.manifest.require_vmm(vmm)
        template.manifest.require_boot_files()
    except NotFoundError:
        return Finding(name, Level.NOTE, f"not built yet in {config.home}", BUILD_COMMAND)
    except UnavailableError as error:
        return Finding(name, Level.NOTE, error.message, f"{BUILD_COMMAND} --force")
    except (AenvError, OSError) as error:
        return Finding(name, Level.MISSING, str(error))
    manifest = template.manifest
    return Finding(name, Level.OK, f"{template.id}, {manifest.vcpus} vCPU, {manifest.memory_mib} MiB")


def _disk(config: Config, *, built: bool) -> Finding:
    place = next(p for p in (config.home, *config.home.parents) if p.exists())
    free = shutil.disk_usage(place).free >> 20
    detail = f"{free} MiB free for {config.home}"
    if free < BUILD_MIB and not built:
        return Finding("disk space", Level.MISSING, detail, f"a template needs {BUILD_MIB} MiB; see --home")
    if free < ROOM_MIB:
        return Finding("disk space", Level.NOTE, detail, "a paused sandbox keeps what it has written; see --home")
    return Finding("disk space", Level.OK, detail)


def _blocks(config: Config) -> Iterator[Finding]:
    """Front ends that the block server can have here, and the one it has."""
    if UBLK.exists():
        yield Finding("ublk", Level.OK, f"{UBLK} is there")
    else:
        yield Finding("ublk", Level.INFO, f"no {UBLK}: it takes Linux 6.0 with ublk_drv", "modprobe ublk_drv")
    if not FUSE.exists():
        yield Finding("FUSE", Level.MISSING, f"there is no {FUSE}: memory of sandboxes is a FUSE file", "modprobe fuse")
    elif kernel_at_least(*RESEND):
        yield Finding("FUSE", Level.OK, f"{FUSE} is there; guests only wait when the block server dies")
    else:
        detail = f"{FUSE} is there; a guest is stopped and continued when the block server dies"
        yield Finding("FUSE", Level.OK, f"{detail} (it takes Linux {RESEND[0]}.{RESEND[1]} to only wait)")
    yield asyncio.run(_block_server(control_socket(Home(config.home, config.cache).blocks)))


async def _block_server(path: Path) -> Finding:
    name = "block server"
    if os.geteuid() != 0:
        return Finding(name, Level.INFO, "only root can ask it")
    if not path.exists():
        return Finding(name, Level.INFO, "does not run", "aenv serve starts it")
    try:
        async with asyncio.timeout(ANSWER_SECONDS), await BlockClient.connect(path) as client:
            images = len(await client.list_images())
    except AenvError as error:
        return Finding(name, Level.NOTE, error.message)
    except TimeoutError:
        return Finding(name, Level.NOTE, f"{path} does not answer")
    front_ends = " and ".join(client.server["front_ends"])
    return Finding(name, Level.OK, f"process {client.server['pid']} serves {images} images by {front_ends}")


def kernel_at_least(major: int, minor: int) -> bool:
    """Whether this Linux is as new as that."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (major, minor)


def _daemon(config: Config) -> Finding:
    try:
        running = Daemon.read(config.home)
        os.kill(running.pid, 0)
    except PermissionError:
        return Finding("daemon", Level.INFO, "its record is readable for root only")
    except (OSError, ValueError):
        return Finding("daemon", Level.INFO, "does not run", "sudo aenv serve")
    return Finding("daemon", Level.OK, f"listens on {running.url}")


def _print(report: Report) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("WHAT", no_wrap=True)
    table.add_column("FOUND", ratio=1)
    for finding in report.findings:
        text = Text(finding.detail)
        if finding.hint and finding.level is not Level.OK:
            text.append(f"\n→ {finding.hint}", style="cyan")
        table.add_row(Text(finding.level.value, style=STYLES[finding.level]), Text(finding.name), text)
    console = Console()
    console.print(table)
    if not report.ok:
        console.print("Sandboxes cannot run here yet: see what is missing above.", style="bold red")
    elif report.vmm is not None:
        console.print(f"Sandboxes run here with {report.vmm.value}.", style="bold")
