"""POST /files/compose: one file made of several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.envd.files_client import Answer, FilesClient


def compose(files: FilesClient, **body: Any) -> Answer:
    body.setdefault("username", files.user)
    return files.request("POST", "/files/compose", json.dumps(body).encode(), {"Content-Type": "application/json"})


def sources(folder: Path, *contents: bytes) -> list[str]:
    paths = [folder / f"part{i}" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [str(p) for p in paths]


def test_sources_become_one_file(files: FilesClient, tmp_path: Path) -> None:
    contents = [b"one", b"", os.urandom(9 << 20), b"end"]
    answer = compose(files, source_paths=sources(tmp_path, *contents), destination=str(tmp_path / "new/whole"))
    assert answer.status == 200
    assert (answer.json["name"], answer.json["size"]) == ("whole", str(sum(map(len, contents))))
    assert (tmp_path / "new/whole").read_bytes() == b"".join(contents)
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["whole"]


def test_destination_may_be_a_source(files: FilesClient, tmp_path: Path) -> None:
    paths = sources(tmp_path, b"a", b"b")
    assert compose(files, source_paths=paths, destination=paths[0]).status == 200
    assert Path(paths[0]).read_bytes() == b"ab"
    assert os.listdir(tmp_path) == ["part0"]


def test_refused_requests_change_nothing(files: FilesClient, tmp_path: Path) -> None:
    paths = sources(tmp_path, b"a", b"b")
    whole = str(tmp_path / "whole")
    expected: dict[int, list[dict[str, Any]]] = {
        404: [{"source_paths": [*paths, str(tmp_path / "missing")], "destination": whole}],
        401: [{"source_paths": paths, "destination": whole, "username": "no-such-user"}],
        400: [
            {"source_paths": [], "destination": whole},
            {"source_paths": "a", "destination": whole},
            {"source_paths": [1], "destination": whole},
            {"source_paths": [paths[0], paths[0]], "destination": whole},
            {"source_paths": [*paths, str(tmp_path)], "destination": whole},
            {"source_paths": [*paths, "/dev/zero"], "destination": whole},
            {"source_paths": ["/nul\0"], "destination": whole},
            {"source_paths": paths},
            {"source_paths": paths, "destination": 1},
            {"source_paths": paths, "destination": str(tmp_path)},
            {"source_paths": paths, "destination": whole, "username": 5},
        ],
    }
    for status, bodies in expected.items():
        for body in bodies:
            assert compose(files, **body).status == status, body
    assert sorted(os.listdir(tmp_path)) == ["part0", "part1"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"a":1,"a":2}'])
def test_bodies_that_are_no_objects(files: FilesClient, body: bytes) -> None:
    assert files.request("POST", "/files/compose", body).status == 400


def test_huge_bodies(files: FilesClient) -> None:
    assert files.request("POST", "/files/compose", bytes(2 << 20)).status == 413
