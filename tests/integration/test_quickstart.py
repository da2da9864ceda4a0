"""The example that everybody tries first."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT, Daemon, clean_environment

pytestmark = pytest.mark.vm


def test_quickstart_runs_as_it_is(daemon: Daemon) -> None:
    environment = clean_environment(E2B_API_URL=daemon.url, E2B_SANDBOX_URL=daemon.url, E2B_API_KEY=daemon.key)
    done = subprocess.run(
        [sys.executable, ROOT / "examples/quickstart.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("ok") is True
    assert set(result) == {"create_ms", "first_command_ms", "pause_ms", "resume_ms"}
    assert all(value > 0 for value in result.values())
    assert daemon.list() == {}
