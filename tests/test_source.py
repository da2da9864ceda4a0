"""Rules about the source itself: linters, types, who may import whom, who may start a process."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SOURCES = sorted(p for folder in ("aenv", "ublk") for p in (ROOT / folder).rglob("*.py"))

# What each package must not import: what lies above it, or beside it where that would be a circle of ideas.
ABOVE_SANDBOX = ("aenv.api", "aenv.proxy", "aenv.node", "aenv.cli")
FORBIDDEN = {
    "vmm": ("aenv.sandbox", "aenv.snapshot", "aenv.agent", "aenv.http", *ABOVE_SANDBOX),
    "network": ("aenv.sandbox", "aenv.vmm", "aenv.agent", "aenv.http", *ABOVE_SANDBOX),
    "snapshot": ("aenv.sandbox", "aenv.agent", "aenv.http", *ABOVE_SANDBOX),
    "storage": ("aenv.sandbox", "aenv.agent", "aenv.http", *ABOVE_SANDBOX),
    "boot": ("aenv.sandbox", "aenv.agent", "aenv.http", *ABOVE_SANDBOX),
    "observe": ("aenv.sandbox", "aenv.vmm", "aenv.http", *ABOVE_SANDBOX),
    "http": ("aenv.sandbox", "aenv.vmm", "aenv.network", "aenv.storage", *ABOVE_SANDBOX),
    "agent": ("aenv.sandbox", "aenv.vmm", *ABOVE_SANDBOX),
    "sandbox": (*ABOVE_SANDBOX, "aenv.vmm.qemu", "aenv.vmm.qmp"),
    "api": ("aenv.vmm", "aenv.network", "aenv.storage", "aenv.snapshot", "aenv.node", "aenv.cli"),
    "proxy": ("aenv.api", "aenv.node", "aenv.cli"),
}
STARTS_PROCESSES = re.compile(
    r"\b(import subprocess|from subprocess|create_subprocess_\w+"
    r"|os\.(fork|forkpty|posix_spawn\w*|system|popen|spawn\w+))\b"
)


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
@pytest.mark.timeout(300)
def test_linters_have_nothing_to_say(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_downwards(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "aenv" / package).rglob("*.py")
        for name in imports(path)
        if any(name == top or name.startswith(top + ".") for top in FORBIDDEN[package])
    ]
    assert not wrong


def test_one_place_starts_processes() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path != ROOT / "aenv/vmm/spawn.py" and STARTS_PROCESSES.search(path.read_text())
    ]
    assert not wrong


def test_compiled_modules_come_with_types() -> None:
    for path in (ROOT / "aenv/_native").glob("*.pyx"):
        assert path.with_suffix(".pyi").exists(), f"{path.name} has no .pyi"
