"""The tests of the ublk front end. They run inside a machine with a Debian 6.12 kernel, because neither a CI host nor a
usual workstation has the driver; here each is a test of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kernel.vm import Machine

pytestmark = [pytest.mark.vm]
PATIENCE = 120.0  # seconds for one test


def names() -> list[str]:
    found = []
    for path in sorted((Path(__file__).parent / "inside").glob("*.py")):
        functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        found += [f"{path.stem}.{function}" for function in functions if function.startswith("test_")]
    return found


@pytest.mark.parametrize("name", names())
def test_inside(machine: Machine, name: str) -> None:
    answer = machine.request({"test": name}, PATIENCE)
    assert answer["test"] == name
    assert answer["failure"] is None, f"{answer['failure']}\nconsole:\n{machine.console()}"
