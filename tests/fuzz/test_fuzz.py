"""Each fuzz target runs its corpus, and then some seconds on its own. AENV_FUZZ_SECONDS says how many (5)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.fuzz import targets

SECONDS = int(os.environ.get("AENV_FUZZ_SECONDS", "5"))
PROBLEM = targets.missing()
pytestmark = [
    pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or ""),
    pytest.mark.timeout(300 + 4 * SECONDS),
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return targets.build(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", targets.TARGETS)
def test_corpus_and_some_seconds(programs: dict[str, Path], tmp_path: Path, name: str) -> None:
    corpus = list((targets.HERE / "corpus" / name).iterdir())
    done = targets.run(name, programs[name], tmp_path / "found", SECONDS)
    faults = {path.name: path.read_bytes()[:4096] for path in (tmp_path / "found").glob("fault-*")}
    assert done.returncode == 0, f"{done.stderr[-6000:]}\ninputs to keep as corpus/{name}/fault-...: {faults}"
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    assert executed is not None
    assert int(executed[1]) > len(corpus) > 0


def test_target_tells_a_fault(tmp_path: Path) -> None:
    """What the runs above rely on: a sanitizer's finding ends the target with an error and leaves the input."""
    source = tmp_path / "fuzz_broken.c"
    source.write_text(
        '#include "fuzz.h"\n'
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)\n"
        "{\n"
        "\tstruct input input = {data, size};\n"
        "\tchar *piece = take_piece(&input, &size);\n"
        "\tvolatile char behind = piece[size];\n"
        "\tfree(piece);\n"
        "\treturn behind & 0;\n"
        "}\n"
    )
    program = targets.link(tmp_path / "fuzz_broken", [targets.compile_one(source, tmp_path / "fuzz_broken.o")])
    done = targets.run("broken", program, tmp_path / "found", 5)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert list((tmp_path / "found").glob("fault-*"))
