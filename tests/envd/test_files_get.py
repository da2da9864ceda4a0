"""GET /files: contents, headers, ranges, conditions, codings, and what is refused."""

from __future__ import annotations

import gzip
import os
import socket
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.files_client import FilesClient

SIZE = 1000
CONTENT = bytes(i % 251 for i in range(SIZE))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.bin"
    path.write_bytes(CONTENT)
    return path


def test_whole_file(files: FilesClient, sample: Path) -> None:
    answer = files.get(str(sample))
    assert (answer.status, answer.body) == (200, CONTENT)
    assert answer.headers["content-length"] == str(SIZE)
    assert answer.headers["content-disposition"] == 'inline; filename="sample.bin"'
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["last-modified"] == formatdate(int(sample.stat().st_mtime), usegmt=True)
    assert "content-encoding" not in answer.headers


def test_head_has_no_body(files: FilesClient, sample: Path) -> None:
    answer = files.get(str(sample), method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(SIZE)


@pytest.mark.parametrize("coding", ["identity", "gzip", "gzip, deflate", "gzip, identity;q=0"])
def test_empty_file_has_length_zero(files: FilesClient, tmp_path: Path, coding: str) -> None:
    (tmp_path / "empty.txt").touch()
    answer = files.get(str(tmp_path / "empty.txt"), Accept_Encoding=coding, Range="bytes=0-9")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text/plain; charset=utf-8"),
        ("a.HTML", "text/html; charset=utf-8"),
        ("a.json", "application/json"),
        ("a.png", "image/png"),
        ("archive.tar.gz", "application/gzip"),
        ("noextension", "text/plain; charset=utf-8"),
    ],
)
def test_content_type(files: FilesClient, tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).write_text("text")
    assert files.get(str(tmp_path / name)).headers["content-type"] == expected


def test_unknown_binary_is_octet_stream(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\x7fELF\x00\x01")
    assert files.get(str(tmp_path / "data")).headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("name", "disposition"),
    [
        ('quo"te\\.txt', 'inline; filename="quo\\"te\\\\.txt"'),
        ("žluťoučký 🐎.txt", "inline; filename*=utf-8''%C5%BElu%C5%A5ou%C4%8Dk%C3%BD%20%F0%9F%90%8E.txt"),
        ("line\r\nbreak: x", "inline; filename*=utf-8''line%0D%0Abreak%3A%20x"),
    ],
)
def test_disposition_of_odd_names(files: FilesClient, tmp_path: Path, name: str, disposition: str) -> None:
    (tmp_path / name).write_text("x")
    answer = files.get(str(tmp_path / name))
    assert (answer.status, answer.body) == (200, b"x")
    assert answer.headers["content-disposition"] == disposition
    assert "break" not in answer.headers


def test_name_of_255_bytes_that_are_not_utf8(files: FilesClient, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/" + b"\xff" * 255
    Path(os.fsdecode(path)).write_bytes(b"odd")
    answer = files.get(path)
    assert (answer.status, answer.body) == (200, b"odd")


def model_of_range(first: int | None, last: int | None) -> bytes | None:
    """What a `bytes=first-last` of CONTENT gives; None: unsatisfiable."""
    if first is None:
        return CONTENT[-last:] if last else None
    if first >= SIZE or (last is not None and last < first):
        return None
    return CONTENT[first:] if last is None else CONTENT[first : last + 1]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.none() | st.integers(0, SIZE + 5) | st.integers(0, 2**63),
    last=st.none() | st.integers(0, SIZE + 5) | st.integers(0, 2**63),
)
def test_single_ranges_match_the_model(files: FilesClient, sample: Path, first: int | None, last: int | None) -> None:
    text = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    answer = files.get(str(sample), Range=text, Accept_Encoding="gzip, deflate")
    expected = model_of_range(first, last)
    if expected is None:
        assert answer.status == 416
        assert answer.headers["content-range"] == f"bytes */{SIZE}"
        return
    start = SIZE - len(expected) if first is None else first
    assert (answer.status, answer.body) == (206, expected)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{SIZE}"


@pytest.mark.parametrize(
    "text", ["bytes=", "bytes=a-b", "bytes=1", "bytes=--1", "bytes=1-2x", f"bytes={2**64}-", "bytes=5-4"]
)
def test_malformed_ranges_are_unsatisfiable(files: FilesClient, sample: Path, text: str) -> None:
    assert files.get(str(sample), Range=text).status == 416


@pytest.mark.parametrize("text", ["bytes=0-1,5-6", "lines=1-2", "bytes"])
def test_ranges_that_are_ignored(files: FilesClient, sample: Path, text: str) -> None:
    answer = files.get(str(sample), Range=text)
    assert (answer.status, answer.body) == (200, CONTENT)


def test_conditions(files: FilesClient, sample: Path) -> None:
    os.utime(sample, (time.time(), 1_700_000_000.5))
    same, older = formatdate(1_700_000_000, usegmt=True), formatdate(1_600_000_000, usegmt=True)
    assert files.get(str(sample), If_Modified_Since=same).status == 304
    assert files.get(str(sample), If_Modified_Since=older).status == 200
    assert files.get(str(sample), If_Modified_Since="yesterday").status == 200
    assert files.get(str(sample), If_Modified_Since=same, If_None_Match='"x"').status == 200
    assert files.get(str(sample), If_Unmodified_Since=older).status == 412
    assert files.get(str(sample), If_Unmodified_Since=same).status == 200
    assert files.get(str(sample), Range="bytes=0-0", If_Range=same).status == 206
    assert files.get(str(sample), Range="bytes=0-0", If_Range=older).status == 200
    assert files.get(str(sample), Range="bytes=0-0", If_Range='"tag"').status == 200


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        (None, None),
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("GZIP;q=0.1", "gzip"),
        ("gzip, deflate", "gzip"),
        ("gzip, deflate, br, zstd", "gzip"),
        ("*", "gzip"),
        ("br", None),
        ("identity", None),
        ("gzip;q=0", None),
        ("gzip;q=0.0, deflate", None),
        ("identity, gzip;q=0.5", None),
        ("identity;q=0.5, gzip", "gzip"),
        ("identity;q=0, gzip;q=0.1", "gzip"),
        ("gzip, *;q=0", "gzip"),
        ("", None),
    ],
)
def test_negotiation_of_gzip(files: FilesClient, tmp_path: Path, accept: str | None, coding: str | None) -> None:
    text = b"all work and no play\n" * 1000
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    headers = {} if accept is None else {"Accept_Encoding": accept}
    if accept is None:
        # http.client adds its own header otherwise
        connection = files.raw(
            f"GET {files.target(str(path))} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        with connection, connection.makefile("rb") as stream:
            assert stream.read().endswith(text)
        return
    answer = files.get(str(path), **headers)
    assert answer.headers.get("content-encoding") == coding
    assert answer.headers["vary"] == "Accept-Encoding"
    assert (gzip.decompress(answer.body) if coding else answer.body) == text


@pytest.mark.parametrize(
    "accept", ["identity;q=0", "*;q=0", "br, *;q=0", "identity;q=0, gzip;q=0", "deflate, identity;q=0"]
)
def test_no_acceptable_coding(files: FilesClient, sample: Path, accept: str) -> None:
    answer = files.get(str(sample), Accept_Encoding=accept)
    assert (answer.status, answer.json["code"]) == (406, 406)


def test_big_files_are_compressed_only_on_request(files: FilesClient, tmp_path: Path) -> None:
    text = os.urandom(64) * 65536
    (tmp_path / "big.txt").write_bytes(text)
    assert files.get(str(tmp_path / "big.txt"), Accept_Encoding="gzip, deflate").body == text
    answer = files.get(str(tmp_path / "big.txt"), Accept_Encoding="gzip")
    assert gzip.decompress(answer.body) == text


def test_many_slow_readers_of_a_compressed_file(files: FilesClient, tmp_path: Path) -> None:
    """Readers that take nothing neither stop the agent nor make it keep the body."""
    (tmp_path / "noise.txt").write_bytes(os.urandom(8 << 20))
    request = f"GET {files.target(str(tmp_path / 'noise.txt'))} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"
    readers = [files.raw(request.encode()) for _ in range(20)]
    assert files.get(str(tmp_path / "noise.txt"), Accept_Encoding="identity").status == 200
    for reader in readers:
        reader.close()


def test_directory(files: FilesClient, tmp_path: Path) -> None:
    answer = files.get(str(tmp_path))
    assert (answer.status, answer.json) == (400, {"code": 400, "message": f"path '{tmp_path}' is a directory"})


@pytest.mark.parametrize("below", ["missing", "missing/deeper", "sample.bin/below"])
def test_missing_file(files: FilesClient, sample: Path, below: str) -> None:
    path = f"{sample.parent}/{below}"
    answer = files.get(path)
    assert (answer.status, answer.json) == (404, {"code": 404, "message": f"path '{path}' does not exist"})


def test_unknown_user(files: FilesClient, sample: Path) -> None:
    answer = files.as_user("no-such-user").get(str(sample))
    assert (answer.status, answer.json["code"]) == (401, 401)
    assert answer.json["message"].startswith("error looking up user 'no-such-user'")


def test_dangling_link_and_loop(files: FilesClient, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    assert files.get(str(tmp_path / "dangling")).status == 404
    assert files.get(str(tmp_path / "loop")).status == 400


@pytest.mark.parametrize("query", ["path=%00", "path=/etc%00/passwd", "path=%zz", "path=%e"])
def test_nul_and_malformed_escapes(files: FilesClient, query: str) -> None:
    answer = files.request("GET", f"/files?{query}&username={files.user}")
    assert (answer.status, answer.json["code"]) == (400, 400)


@pytest.mark.parametrize("path", ["/" + "x" * 256, "/x" * 2048, "~other/file"])
def test_impossible_paths(files: FilesClient, path: str) -> None:
    assert files.get(path).status == 400


def test_special_files_are_refused_at_once(files: FilesClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "pipe", tmp_path / "socket", "/dev/zero", "/dev/null"):
        answer = files.get(str(path))
        assert (answer.status, answer.json["message"]) == (400, f"path '{path}' is not a regular file")
    listener.close()


def test_files_of_the_kernel(files: FilesClient) -> None:
    version = files.get("/proc/version")
    assert (version.status, version.body) == (200, Path("/proc/version").read_bytes())
    assert version.headers["content-length"] == str(len(version.body))
    assert files.get("/proc/kallsyms").body.count(b"\n") > 1000  # several pieces, length unknown
    page = files.get("/sys/kernel/mm/transparent_hugepage/enabled")  # says it has 4096 bytes
    assert page.body == Path("/sys/kernel/mm/transparent_hugepage/enabled").read_bytes()


def test_file_that_is_truncated_during_the_download_ends_the_connection(files: FilesClient, tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(32 << 20))
    with files.raw(f"GET {files.target(str(path))} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as connection:
        received = len(connection.recv(4096))
        os.truncate(path, 0)
        while piece := connection.recv(1 << 20):
            received += len(piece)
    assert received < 32 << 20
    assert files.get(str(path)).status == 200
