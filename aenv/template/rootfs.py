"""The root file system of the template `base`: the host's distribution, made with mmdebstrap, as an ext4 image.

Two steps, so that another disk size costs seconds: a tar of the tree, kept under a name that tells what is in it, and
the image made from it with `mke2fs -d`, which needs no mount.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aenv.boot.lock import build_lock
from aenv.errors import InvalidInputError, UnavailableError
from aenv.vmm.spawn import start

Progress = Callable[[str], None]

PACKAGES = (
    "bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "iputils-ping", "less", "nano", "netbase",
    "openssh-client", "passwd", "procps", "python-is-python3", "python3", "python3-pip", "sudo", "tzdata", "unzip",
    "xz-utils",
)  # fmt: skip
USER = "user"
USER_ID = 1000
DISK_MIB_DEFAULT = 2048
_RECIPE = 2  # raise it when _customise makes something else of the same packages
# Every command of a sandbox runs in a login shell. Debian's own file starts two programs each time (id, run-parts),
# which takes longer than the shell itself where instructions are emulated. This one starts none.
_PROFILE = """\
# /etc/profile: read by login shells.
if [ "${EUID:-$(id -u)}" -eq 0 ]; then
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
    PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games
fi
export PATH
if [ -n "${PS1-}" ]; then
    if [ -n "${BASH-}" ] && [ "$BASH" != /bin/sh ]; then
        [ ! -r /etc/bash.bashrc ] || . /etc/bash.bashrc
    elif [ "${EUID:-$(id -u)}" -eq 0 ]; then
        PS1='# '
    else
        PS1='$ '
    fi
fi
for file in /etc/profile.d/*.sh; do
    [ ! -r "$file" ] || . "$file"
done
unset file
"""
_DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
)
_TOOLS = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "tar": "tar", "chroot": "coreutils"}
_NEEDED_MIB = 1500  # tree, tar and image of about 400 MB each, and what mmdebstrap downloads


@dataclass(frozen=True, slots=True)
class Distribution:
    """Where the packages come from. `sources` are lines for sources.list; empty means mmdebstrap's own mirror."""

    name: str
    suite: str
    sources: tuple[str, ...]


def build_rootfs(dest_image: Path, work: Path, progress: Progress, *, disk_mib: int = DISK_MIB_DEFAULT) -> None:
    """Make the ext4 image `dest_image` of `disk_mib` MiB (sparse). Needs root, and the package mirror the first time.

    `work` keeps the tar of the tree for the next time. The image appears whole or not at all.
    Raises InvalidInputError for a size out of range, UnavailableError when a tool, root, space or the mirror is
    missing.
    """
    if not 512 <= disk_mib <= 16 << 20:
        raise InvalidInputError("disk_mib", f"expected 512 to {16 << 20}, got {disk_mib}")
    _check_host(work)
    with build_lock(work, ".build-*"), tempfile.TemporaryDirectory(dir=work, prefix=".build-") as name:
        archive = ensure_archive(work, host_distribution(), progress)
        progress(f"making an ext4 image of {disk_mib} MiB")
        tree = Path(name) / "tree"
        tree.mkdir()
        _run(["tar", "--extract", "--numeric-owner", "--preserve-permissions", "--xattrs", "--xattrs-include=*",
              "--file", str(archive), "--directory", str(tree)])  # fmt: skip
        make_image(tree, dest_image, disk_mib)
    progress("the root file system is ready")


def make_image(tree: Path, dest_image: Path, disk_mib: int) -> None:
    """An ext4 image of the directory `tree`, with owners, modes and extended attributes. Written beside the
    destination and renamed."""
    dest_image.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=dest_image.parent, prefix=".rootfs-")
    try:
        os.ftruncate(handle, disk_mib << 20)
        _run([
            "mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", str(tree),
            "-b", "4096",  # the page size: what a layer stores
            "-m", "0",  # no blocks kept for root: everybody in a sandbox may become root
            "-i", "8192",  # twice the usual number of inodes: package trees of scripting languages are small files
            "-J", "size=16",  # MiB; a journal goes round and round, and all of it ends up in the sandbox's layer
            # Everything initialised here, where zeros are holes: the kernel's ext4lazyinit would write them as data.
            "-E", "lazy_itable_init=0,lazy_journal_init=0",
            name,
        ])  # fmt: skip
        os.fsync(handle)
        os.chmod(name, 0o644)
        os.replace(name, dest_image)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(handle)


def ensure_archive(work: Path, distribution: Distribution, progress: Progress) -> Path:
    """The tar of the tree, made when it is not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    archive = work / f"rootfs-{distribution.suite}-{_digest(distribution)}.tar"
    if archive.exists():
        progress("found the packages of an earlier build")
        return archive
    with tempfile.TemporaryDirectory(dir=work, prefix=".build-") as name:
        tree = Path(name) / "tree"
        _bootstrap(tree, distribution, progress)
        progress("adding the user and settings")
        _customise(tree)
        half = Path(name) / "rootfs.tar"
        _run(["tar", "--create", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--sort=name", "--sparse",
              "--file", str(half), "--directory", str(tree), "."])  # fmt: skip
        os.replace(half, archive)
    return archive


def _digest(distribution: Distribution) -> str:
    recipe = [_RECIPE, asdict(distribution), PACKAGES, _DPKG_OPTIONS]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def host_distribution(os_release: Path = Path("/etc/os-release")) -> Distribution:
    """Debian or Ubuntu of the host with the host's own mirrors; Debian stable on any other host."""
    facts = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release.read_text(), flags=re.MULTILINE))
    name, suite = facts.get("ID", ""), facts.get("VERSION_CODENAME", "")
    if name not in ("debian", "ubuntu") or not re.fullmatch(r"[a-z]{1,32}", suite):
        return Distribution("debian", "stable", ())
    targets = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)",
                    "Created-By: Packages"])  # fmt: skip
    return Distribution(name, suite, source_lines(targets.splitlines(), name, suite))


def source_lines(targets: Sequence[str], name: str, suite: str) -> tuple[str, ...]:
    """Lines for sources.list out of apt's index targets `URI|RELEASE|COMPONENT`: those of the distribution
    itself, not those of other vendors (mmdebstrap finds the keyring). None when the main archive is not among them."""
    suites = (suite, f"{suite}-updates", f"{suite}-security")
    components = {"debian": ("main",), "ubuntu": ("main", "universe")}[name]
    lines: list[str] = []
    for target in sorted(set(targets), key=lambda t: (t.split("|")[1:2], t)):
        fields = target.split("|")
        if len(fields) != 3 or fields[1] not in suites or fields[2] not in components:
            continue
        uri, release, component = fields
        if re.fullmatch(r"[a-z+]+:[!-~]+", uri):
            lines.append(f"deb {uri.rstrip('/')} {release} {component}")
    return tuple(lines) if any(f" {suite} main" in line for line in lines) else ()


def _bootstrap(tree: Path, distribution: Distribution, progress: Progress) -> None:
    progress(f"fetching and unpacking {distribution.name} {distribution.suite}")
    command = [
        "mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        '--aptopt=Apt::Install-Recommends "false"', *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        distribution.suite, str(tree),
    ]  # fmt: skip
    if distribution.sources:
        command.append("-")  # the lines come by standard input
    _run(command, give="\n".join(distribution.sources) + "\n", progress=progress)


def _customise(tree: Path) -> None:
    """What makes a sandbox of a plain system. Only plain files below `tree` and programs chrooted into it."""
    _run(["chroot", str(tree), "useradd", "--create-home", "--shell", "/bin/bash", "--uid", str(USER_ID),
          "--user-group", USER])  # fmt: skip
    _put(tree / "etc/sudoers.d/user", f"{USER} ALL=(ALL:ALL) NOPASSWD:ALL\n", 0o440)
    _put(tree / "etc/profile", _PROFILE)
    _put(tree / "etc/profile.d/locale.sh", "export LANG=${LANG:-C.UTF-8}\n")
    _put(tree / "etc/default/locale", "LANG=C.UTF-8\n")
    # Debian's pip refuses to install beside apt's packages; in a sandbox that is what people want.
    _put(tree / "etc/pip.conf", "[global]\nbreak-system-packages = true\n")
    _put(tree / "etc/apt/apt.conf.d/90sandbox", 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n')
    _put(tree / "etc/machine-id", "")  # set anew in every sandbox
    # These came from the host; guest/init writes them at boot.
    for name in ("etc/resolv.conf", "etc/hostname"):
        (tree / name).unlink(missing_ok=True)
    for folder in ("var/cache/apt", "var/lib/apt/lists", "var/log/apt", "var/cache/debconf"):
        _empty(tree / folder)
    for name in ("var/log/dpkg.log", "var/log/alternatives.log", "var/log/bootstrap.log"):
        (tree / name).unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "lock":
            path.unlink()


def _put(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _check_host(work: Path) -> None:
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise UnavailableError(f"there is no {tool} on this host", hint=f"apt-get install {package}")
    if os.geteuid() != 0:
        raise UnavailableError("a root file system is made as root: files in it belong to many users", hint="use sudo")
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free >> 20
    if free < _NEEDED_MIB:
        raise UnavailableError(f"{work} has {free} MiB free, we need {_NEEDED_MIB}", hint="free some disk space")


def _run(command: Sequence[str], *, give: str = "", progress: Progress | None = None) -> str:
    """Run a tool, hand each line that it says on standard error to `progress`, return its output. Raises
    UnavailableError with its last words."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    environment |= {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    last: deque[str] = deque(maxlen=5)
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as output:
        given.write(give)
        given.seek(0)
        reader, writer = os.pipe()
        with open(reader, encoding="utf-8", errors="replace") as lines:
            try:
                pid, pidfd = start(
                    command, fds={0: given.fileno(), 1: output.fileno(), 2: writer}, env=environment, no_new_privs=False
                )
            finally:
                os.close(writer)
            try:
                for line in lines:
                    if line.strip():
                        last.append(line.strip())
                        if progress is not None and line.startswith("I: "):
                            progress(line[3:].strip())
            except BaseException:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)  # mmdebstrap unmounts what it has mounted
                raise
            finally:
                result = os.waitid(os.P_PID, pid, os.WEXITED)
                os.close(pidfd)
        if result is not None and (result.si_code, result.si_status) == (os.CLD_EXITED, 0):
            output.seek(0)
            return output.read()
    words = " / ".join(last) or "it did not say why"
    hint = "free some disk space" if "No space left" in words else None
    raise UnavailableError(f"{command[0]} failed: {words}", hint=hint)
