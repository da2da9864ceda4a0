"""What all tests share: who may run where, and that nothing is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

LEAK_PATIENCE = 10.0  # seconds that the kernel may take to finish what a test has ended


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = pytest.mark.skip(reason="needs root (make test uses sudo)")
    for item in items:
        if item.get_closest_marker("vm") is not None:
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.timeout(300))
        if item.get_closest_marker("root") is not None:
            item.fixturenames.insert(0, "no_leaks")  # type: ignore[attr-defined]  # first, so that it ends last
            if os.geteuid() != 0:
                item.add_marker(root)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipping is never silent: the share of it is said."""
    skipped = len(terminalreporter.stats.get("skipped", []))
    ran = sum(len(terminalreporter.stats.get(k, [])) for k in ("passed", "failed", "error"))
    total = skipped + ran
    if total:
        terminalreporter.write_line(f"not run here: {skipped} of {total} tests ({100 * skipped / total:.1f} %)")


@dataclass(frozen=True)
class Leftovers:
    """Things of ours that exist outside any process of the test."""

    vmms: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    mounts: frozenset[str]
    run_directories: frozenset[str]
    loop_devices: frozenset[str]

    @classmethod
    def look(cls) -> Leftovers:
        return cls(
            vmms=frozenset(_vmm_processes()),
            namespaces=_names("/run/netns"),
            links=_names("/sys/class/net"),
            mounts=frozenset(
                line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if "aenv" in line
            ),
            run_directories=frozenset(str(p) for p in Path("/run/aenv").glob("*/vm-*")),
            loop_devices=frozenset(p.parent.name for p in Path("/sys/block").glob("loop*/loop")),
        )

    def beyond(self, before: Leftovers) -> dict[str, frozenset[str]]:
        more = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        return {name: found for name, found in more.items() if found}


def _names(directory: str) -> frozenset[str]:
    path = Path(directory)
    return frozenset(os.listdir(path)) if path.is_dir() else frozenset()


def _vmm_processes() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = os.readlink(entry / "exe")
            except OSError:
                continue  # a kernel thread, or it has just ended
            if "qemu-system" in name or name.endswith("/aenv-blockd"):
                yield f"{entry.name} {name}"


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails when a test leaves a VMM, namespace, link, mount, run directory or loop device."""
    before = Leftovers.look()
    yield
    deadline = time.monotonic() + LEAK_PATIENCE
    while found := Leftovers.look().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: { {k: sorted(v) for k, v in found.items()} }")
        time.sleep(0.05)  # processes and namespaces end in the kernel's own time; nothing tells us
