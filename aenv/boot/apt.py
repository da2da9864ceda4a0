"""The distribution's packages, fetched and unpacked but never installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from aenv.errors import NotFoundError, UnavailableError
from aenv.vmm.spawn import exit_reason, run_sync

Progress = Callable[[str], None]
TIMEOUT = 1800  # seconds; a kernel package over a slow line
_TOOLS = ("apt-cache", "apt-get", "dpkg", "dpkg-deb")


class Apt:
    """apt and dpkg of the host. All methods raise UnavailableError with the tool's own last words."""

    def __init__(self, progress: Progress) -> None:
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise UnavailableError(
                f"there is no {missing[0]} on this host", hint="a kernel is fetched with apt: use Debian or Ubuntu"
            )
        self._progress = progress
        self._updated = False

    def architecture(self) -> str:
        return self._run("dpkg", "--print-architecture").strip()

    def names(self, pattern: str) -> list[str]:
        """Names of the packages that match the regular expression. Runs `apt-get update` when apt knows none at
        all, which is how a fresh container image looks."""
        found = self._search(pattern)
        if not found and not self._updated and not self._search("^apt$"):
            self.update()
            found = self._search(pattern)
        return found

    def _search(self, pattern: str) -> list[str]:
        lines = self._run("apt-cache", "search", "--names-only", pattern).splitlines()
        return [line.split()[0] for line in lines if line.strip()]

    def update(self) -> None:
        self._progress("updating the package lists")
        self._updated = True
        self._run("apt-get", "update", "-q", hint="the package mirror has to be reachable; run it as root")

    def download(self, package: str, folder: Path) -> Path:
        """Fetch one package into the empty directory `folder`; apt verifies its checksum. The lists may name a
        version that the mirror has dropped: then they are updated once."""
        self._progress(f"downloading {package}")
        try:
            self._download(package, folder)
        except UnavailableError:
            if self._updated:
                raise
            self.update()
            self._download(package, folder)
        found = sorted(folder.glob("*.deb"))
        if len(found) != 1:
            raise NotFoundError(f"apt downloaded no file for {package}")
        return found[0]

    def _download(self, package: str, folder: Path) -> None:
        # As root apt downloads as the user _apt, who cannot write here; it then warns and goes on as root.
        self._run(
            "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package, cwd=folder,
            hint="the package mirror has to be reachable",
        )  # fmt: skip

    def unpack(self, deb: Path, folder: Path) -> None:
        self._run("dpkg-deb", "--extract", str(deb), str(folder))

    def version(self, deb: Path) -> str:
        return self._run("dpkg-deb", "--field", str(deb), "Version").strip()

    def _run(self, *command: str, cwd: Path | None = None, hint: str | None = None) -> str:
        environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        result = run_sync(command, cwd=cwd, env=environment, timeout=TIMEOUT, check=False)
        if result.status == 0:
            return result.stdout.decode(errors="replace")
        said = result.stderr.decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip() and not line.startswith("W:")]
        reason = lines[-1].strip() if lines else exit_reason(result.status)
        if "No space left on device" in said:
            hint = "free some disk space"
        raise UnavailableError(f"{' '.join(command[:3])} failed: {reason}", hint=hint)
