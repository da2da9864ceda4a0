"""What all tests share: who may run where, and that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.leftovers import CLAIMS, nothing_left_behind


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


@pytest.fixture(scope="session", autouse=True)
def _our_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    CLAIMS.directory(tmp_path_factory.getbasetemp())


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails when a test leaves a VMM, namespace, link, mount, run directory or loop device."""
    with nothing_left_behind():
        yield
