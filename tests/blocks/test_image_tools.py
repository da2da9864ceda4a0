"""`aenv image`: inspect, verify, export, import."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aenv._native.lsmt import Layer, Stack
from aenv.cli.image import image_command
from aenv.cli.output import size_text
from aenv.errors import InvalidInputError, NotFoundError
from aenv.storage import image
from tests.blocks.reader import read_layer
from tests.blocks.test_vectors import BOTH, LAYER_1


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(image_command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_export_of_reference_layers_is_right_and_sparse(vectors: Path, tmp_path: Path) -> None:
    written = run("export", vectors / "layer1.tar", vectors / "layer2.zfile-lz4", "-o", tmp_path / "raw")
    assert written["virtual_size"] == (tmp_path / "raw").stat().st_size == 1 << 30
    assert (tmp_path / "raw").stat().st_blocks * 512 < 8 << 20
    assert sha256(tmp_path / "raw") == BOTH


@pytest.mark.parametrize(
    "options", [[], ["--zfile", "lz4"], ["--zfile", "zstd", "--block-size", "65536"], ["--zfile", "lz4", "--tar"]]
)
def test_import_of_an_export_is_the_same_disk(vectors: Path, tmp_path: Path, options: list[str]) -> None:
    run("export", vectors / "layer1.lsmt", "-o", tmp_path / "raw")
    written = run("import", tmp_path / "raw", "-o", tmp_path / "layer", "--tag", "imported", *options)
    assert written["data"] < 3 << 20
    assert written["file_size"] == (tmp_path / "layer").stat().st_size
    run("export", tmp_path / "layer", "-o", tmp_path / "again")
    assert sha256(tmp_path / "again") == LAYER_1
    assert read_layer(tmp_path / "layer").user_tag == "imported"


def test_import_with_parents_stores_the_difference(vectors: Path, tmp_path: Path) -> None:
    run("export", vectors / "layer1.tar", vectors / "layer2.lsmt", "-o", tmp_path / "raw")
    written = run("import", tmp_path / "raw", "-o", tmp_path / "top", "--parent", vectors / "layer1.lsmt")
    assert written["data"] < 2 << 20
    assert Layer(tmp_path / "top").info.parent_uuid == "11111111-2222-3333-4444-555555555555"
    run("export", vectors / "layer1.lsmt", tmp_path / "top", "-o", tmp_path / "again")
    assert sha256(tmp_path / "again") == BOTH


def test_difference_hides_with_zeros_what_became_zero(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(random.Random(1).randbytes(1 << 20))
    image.import_raw(raw, tmp_path / "lower")
    content = bytearray(raw.read_bytes())
    content[8192:20480] = bytes(12288)
    raw.write_bytes(content)
    image.import_raw(raw, tmp_path / "upper", parents=[tmp_path / "lower"])
    assert [(s, n, d) for s, n, d in read_layer(tmp_path / "upper").segments] == [(16, 24, None)]
    assert Stack([Layer(tmp_path / "lower"), Layer(tmp_path / "upper")]).read(0, 1 << 20) == content


@pytest.mark.parametrize("size", [1, 511, 513, 4095, 4097, (1 << 20) + 5000])
def test_raw_file_of_any_size(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "raw").write_bytes(content)
    image.import_raw(tmp_path / "raw", tmp_path / "layer")
    image.export([tmp_path / "layer"], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content.ljust(-(-size // 512) * 512, b"\0")


def test_sparse_and_empty_disks(tmp_path: Path) -> None:
    with (tmp_path / "raw").open("wb") as file:
        file.truncate(10 << 30)
        file.seek(5 << 30)
        file.write(b"x" * 100)
    written = image.import_raw(tmp_path / "raw", tmp_path / "layer")
    assert (written.virtual_size, written.data) == (10 << 30, 4096)
    os.truncate(tmp_path / "raw", 1 << 30)
    assert image.import_raw(tmp_path / "raw", tmp_path / "none").data == 0
    os.truncate(tmp_path / "raw", 0)
    with pytest.raises(InvalidInputError, match="empty"):
        image.import_raw(tmp_path / "raw", tmp_path / "other")


def test_scattered_disk_falls_back_to_coarser_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_ENTRIES", 20)
    content = bytearray(4 << 20)
    for at in range(0, len(content), 16384):
        content[at : at + 4096] = b"x" * 4096
    (tmp_path / "raw").write_bytes(content)
    image.import_raw(tmp_path / "raw", tmp_path / "layer")
    assert len(read_layer(tmp_path / "layer").segments) <= 20
    assert Stack([Layer(tmp_path / "layer")]).read(0, len(content)) == content


def test_inspect_says_what_is_visible_and_who_follows_whom(vectors: Path) -> None:
    lower, upper = run("inspect", vectors / "layer1.lsmt", vectors / "layer2.lsmt")
    assert (lower["follows"], upper["follows"]) == (None, True)
    assert lower["visible"] < lower["data"]
    assert upper["visible"] == upper["data"] == 1310720
    assert upper["info"]["user_tag"] == "layer-two"
    _, other = run("inspect", vectors / "layer1.tar", vectors / "layer2.lsmt")
    assert other["follows"] is False


def test_inspect_finds_equal_content(tmp_path: Path) -> None:
    generator = random.Random(2)
    common = generator.randbytes(10 * 4096)
    for name in ("a", "b", "c"):
        own = generator.randbytes(5 * 4096)
        (tmp_path / "raw").write_bytes(own + common if name != "c" else own)
        image.import_raw(tmp_path / "raw", tmp_path / name)
    found = run("inspect", "--content", tmp_path / "a", tmp_path / "b", tmp_path / "c")["sharing"]
    assert [(Path(p["first"]).name, Path(p["second"]).name, p["blocks"]) for p in found] == [("a", "b", 10)]


def test_verify_gives_the_name_and_finds_damage(vectors: Path, tmp_path: Path) -> None:
    good = run("verify", vectors / "layer1.zfile-lz4")[0]
    assert good["sha256"] == sha256(vectors / "layer1.zfile-lz4")
    blob = bytearray((vectors / "layer1.zfile-lz4").read_bytes())
    blob[100000] ^= 1
    (tmp_path / "broken").write_bytes(blob)
    with pytest.raises(InvalidInputError) as caught:
        image.verify(tmp_path / "broken")
    assert caught.value.field == "zfile.block.crc"


def test_failed_work_leaves_no_file(vectors: Path, tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        image.export([vectors / "layer1.lsmt"], tmp_path / "raw", stop)
    (tmp_path / "disk").write_bytes(b"x" * 4096)
    with pytest.raises(RuntimeError):
        image.import_raw(tmp_path / "disk", tmp_path / "layer", progress=stop)
    with pytest.raises(InvalidInputError, match="form"):
        image.import_raw(tmp_path / "disk", tmp_path / "layer", form="lzma")
    with pytest.raises(NotFoundError, match="output"):
        image.export([vectors / "layer1.lsmt"], tmp_path / "no/raw")
    with pytest.raises(NotFoundError, match="raw"):
        image.import_raw(tmp_path / "none", tmp_path / "layer")
    with pytest.raises(InvalidInputError, match="layers"):
        image.inspect([])
    assert os.listdir(tmp_path) == ["disk"]


def test_size_text() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 150 << 10, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "150 KiB",
        "1.0 TiB",
    ]
