"""The C core under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.blocks.test_hostile import make

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "aenv/_native"


def build(target: Path, sanitizer: str, program: str = "c_exercise.c", parts: Sequence[str] = ("",)) -> Path:
    """`parts`: begins of the names of the files that are needed."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")
    command = [
        compiler, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-DRELEASE_FROM=16384", "-DSHORTEN_FROM=64", "-DDIRECT_FROM=4096",
        f"-I{NATIVE}", "-o", str(target), str(HERE / program),
        *sorted({str(path) for part in parts for path in NATIVE.glob(f"c_lsmt_{part}*.c")}),
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
def test_image_agrees_with_a_flat_model(with_address: Path, tmp_path: Path, seed: int) -> None:
    run(with_address, "model", tmp_path, seed)


@pytest.mark.parametrize("which", ["with_address", "with_thread"])
def test_concurrent_use(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> None:
    run(request.getfixturevalue(which), "threads", tmp_path)


@pytest.mark.parametrize("seed", range(2))
def test_index_agrees_with_a_sorted_array(tmp_path: Path, seed: int) -> None:
    program = build(tmp_path / "index", "address,undefined", "c_index.c", ("index", "merge"))
    run(program, seed)


@pytest.mark.parametrize("options", [{}, {"form": "lz4"}, {"form": "zstd", "block_size": 65536}, {"tar": True}])
def test_damaged_layers(with_address: Path, tmp_path: Path, options: dict[str, object]) -> None:
    blob = make(tmp_path / "whole", **options)
    generator = random.Random(7)
    paths = [tmp_path / "whole"]
    for i in range(300):
        damaged = bytearray(blob)
        for _ in range(generator.randrange(1, 4)):
            at = generator.choice([generator.randrange(len(blob)), -1 - generator.randrange(min(8192, len(blob)))])
            damaged[at] = generator.randrange(256)
        if generator.random() < 0.2:
            del damaged[generator.randrange(len(damaged)) :]
        paths.append(tmp_path / str(i))
        paths[-1].write_bytes(damaged)
    run(with_address, "open", *paths)


def test_reference_layers(with_address: Path, vectors: Path) -> None:
    run(with_address, "open", *(vectors / n for n in ("layer1.tar", "layer1.zfile-zstd64k", "layer2.sealed.data")))
