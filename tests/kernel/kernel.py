"""A kernel with ublk: a Debian 6.12 cloud kernel, fetched and unpacked but never installed.

The lists of the host are used if they name one (bookworm with its security updates does). Else the packages of trixie
are looked up with a private apt: own sources, lists and cache; the host's mirror, proxy settings and keyring.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from aenv.boot.kernel import Kernel, ensure_kernel
from aenv.boot.modules import ModuleTree
from aenv.errors import NotFoundError, UnavailableError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # bookworm's holds trixie's keys, too
SUITE = "trixie"
DEFAULT_MIRROR = "http://deb.debian.org/debian"

Say = Callable[[str], None]


def has_ublk(kernel: Kernel) -> bool:
    try:
        ModuleTree(kernel.modules_dir).resolve(["ublk_drv"])
    except NotFoundError:
        return False
    return True


def ublk_kernel(cache: Path, say: Say) -> Kernel:
    """Raises UnavailableError if neither the host's lists nor the mirror have one."""
    try:
        kernel = ensure_kernel(cache, say)
    except NotFoundError as error:
        say(str(error))
    else:
        if has_ublk(kernel):
            return kernel
        say(f"{kernel.package} has no ublk")
    folder = cache / SUITE
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("APT_CONFIG")
    os.environ["APT_CONFIG"] = str(private_apt(folder, host_mirror()))
    try:
        subprocess.run(["apt-get", "-q", "update"], check=True, capture_output=True)
        kernel = ensure_kernel(folder, say)
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"the lists of {SUITE} cannot be fetched: {error.stderr.decode()[-300:]}") from error
    finally:
        del os.environ["APT_CONFIG"]
        if before is not None:
            os.environ["APT_CONFIG"] = before
    if not has_ublk(kernel):
        raise UnavailableError(f"{kernel.package} of {SUITE} has no ublk")
    return kernel


def host_mirror(sources: Path = Path("/etc/apt")) -> str:
    """Where this host's apt gets Debian from; security updates lie elsewhere."""
    files = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]
    for file in files:
        text = re.sub(r"^\s*#.*$", "", file.read_text(), flags=re.MULTILINE) if file.is_file() else ""
        for address in re.findall(r"\bhttps?://[^\s\]]+", text):
            if re.search(r"/debian/?$", address):
                return str(address).rstrip("/")
    return DEFAULT_MIRROR


def private_apt(folder: Path, mirror: str) -> Path:
    """An apt.conf with state of its own below `folder`. Settings of the host stay (a proxy, say)."""
    for part in ("state/lists/partial", "cache/archives/partial", "sources.d"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    lines = [f"deb [signed-by={KEYRING}] {mirror} {suite} main" for suite in (SUITE, f"{SUITE}-updates")]
    sources.write_text("\n".join(lines) + "\n")
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": folder / "sources.d",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": folder / "sources.d",
        "Dir::State::lists": folder / "state/lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
    }
    configuration = folder / "apt.conf"
    configuration.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return configuration
