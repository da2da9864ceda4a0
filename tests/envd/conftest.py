"""The agent's binary and processes of it.

`AENV_ENVD_BINARY` names a binary to test; `AENV_ENVD_SANITIZE=1` builds one with AddressSanitizer and
UndefinedBehaviorSanitizer. Without either the binary is linked as `setup.py` does it, where it is not up to date.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.envd.client import Agent
from tests.envd.files_client import FilesClient

ROOT = Path(__file__).parents[2]
LIBRARIES = ["-levent_core", "-lhttp_parser", "-ljansson", "-lnettle", "-lz"]


def build(out: Path, *options: str) -> Path:
    sources = sorted(str(path) for path in (ROOT / "guest/envd").glob("*.c"))
    command = ["cc", "-g", "-std=gnu11", *options, "-o", str(out), *sources, *LIBRARIES]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL if "-static" in options else sys.stderr)
    return out


@pytest.fixture(scope="session")
def sanitized() -> bool:
    """The agent under test checks itself: it is slower and larger than the real one."""
    return os.environ.get("AENV_ENVD_SANITIZE") == "1"


@pytest.fixture(scope="session")
def envd_binary(tmp_path_factory: pytest.TempPathFactory, sanitized: bool) -> Path:
    if given := os.environ.get("AENV_ENVD_BINARY"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("envd")
    if sanitized:
        options = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
        return build(folder / "envd", *options)
    return build(folder / "envd", "-O2", "-static")


@pytest.fixture
def agent(envd_binary: Path, tmp_path: Path) -> Iterator[Agent]:
    """A fresh agent; the test's own address counts as the host's."""
    agent = Agent(envd_binary, stderr=tmp_path / "envd.log")
    yield agent
    agent.stop()


@pytest.fixture(scope="session")
def files(envd_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FilesClient]:
    agent = Agent(envd_binary, stderr=tmp_path_factory.mktemp("files") / "envd.log")
    yield FilesClient(agent.port)
    agent.stop()
