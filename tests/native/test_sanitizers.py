"""The C of memory capture under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "aenv/_native"
# What reads sealed layers.
READER = ("index", "journal", "layer", "map", "memory", "merge", "scratch", "source", "stack", "util", "view", "zfile")


def build(target: Path, sanitizer: str) -> Path:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")
    command = [
        compiler, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all", "-DPART_BYTES=1048576", f"-I{NATIVE}",
        "-o", str(target), str(HERE / "c_exercise.c"),
        *map(str, sorted(NATIVE.glob("c_memory_*.c"))), *(str(NATIVE / f"c_lsmt_{name}.c") for name in READER),
        "-llz4", "-lzstd", "-lpthread",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def with_address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build") / "exercise", "address,undefined")


@pytest.fixture(scope="module")
def with_thread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build") / "exercise", "thread")


def run(program: Path, *arguments: object) -> None:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_chains_agree_with_a_flat_model(with_address: Path, tmp_path: Path, seed: int) -> None:
    run(with_address, "chain", tmp_path, seed)


def test_workers_do_not_race(with_thread: Path, tmp_path: Path) -> None:
    run(with_thread, "chain", tmp_path, 7)


def test_hostile_parents(with_address: Path, tmp_path: Path) -> None:
    run(with_address, "hostile", tmp_path, 1)
