"""POST /files: raw and form uploads, compression, metadata, and that nothing half-done is ever visible."""

from __future__ import annotations

import gzip
import json
import os
import pwd
import re
import select
import stat
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envd.files_client import BOUNDARY, FORM, FilesClient, form, part

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entries(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory in which no temporary file may be left at the end."""
    yield tmp_path
    left = [name for _, _, names in os.walk(tmp_path) for name in names if name.startswith(".envd-")]
    assert left == []


def test_raw_upload(files: FilesClient, folder: Path) -> None:
    path = folder / "file.bin"
    answer = files.post(str(path), b"content")
    assert answer.status == 200
    assert answer.json == [{"path": str(path), "name": "file.bin", "type": "file"}]
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_paths_relative_to_the_home(files: FilesClient, folder: Path) -> None:
    home = pwd.getpwnam(files.user).pw_dir
    for name in ("relative", "~"):
        path = os.path.relpath(folder / "f", home)
        answer = files.post(f"~/{path}" if name == "~" else path, name.encode())
        assert (answer.status, answer.json[0]["path"]) == (200, str(folder / "f"))
        assert (folder / "f").read_text() == name


def test_empty_upload(files: FilesClient, folder: Path) -> None:
    assert files.post(str(folder / "empty"), b"").status == 200
    assert files.post(str(folder / "empty-chunked"), []).status == 200
    assert (folder / "empty").read_bytes() == (folder / "empty-chunked").read_bytes() == b""


def test_parents_are_made(files: FilesClient, folder: Path) -> None:
    assert files.post(str(folder / "a/b/c.txt"), b"x").status == 200
    assert stat.S_IMODE((folder / "a").stat().st_mode) == stat.S_IMODE((folder / "a/b").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["š" * 127, "x" * 255, "with space & + % #.txt", "new\nline", "-rf", ".hidden"])
def test_odd_names(files: FilesClient, folder: Path, name: str) -> None:
    answer = files.post(str(folder / name), name.encode())
    assert (answer.status, answer.json[0]["name"]) == (200, name)
    assert (folder / name).read_text() == name


def test_overwriting_replaces_the_content_and_keeps_the_mode(files: FilesClient, folder: Path) -> None:
    path = folder / "script.sh"
    path.write_bytes(b"a long first version")
    path.chmod(0o750)
    assert files.post(str(path), b"short").status == 200
    assert path.read_bytes() == b"short"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_a_reader_of_the_old_file_keeps_it(files: FilesClient, folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        files.post(str(path), b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


def test_symbolic_links_are_followed(files: FilesClient, folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real/target")
    (folder / "second").symlink_to(folder / "link")
    for content in (b"created through a dangling link", b"replaced through links"):
        assert files.post(str(folder / "second"), content).status == 200
        assert (folder / "real/target").read_bytes() == content
    assert (folder / "link").is_symlink()
    assert (folder / "second").is_symlink()


def test_loop_of_links(files: FilesClient, folder: Path) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert files.post(str(folder / "a"), b"x").status == 400
    assert entries(folder) == ["a", "b"]


def test_targets_that_are_no_files(files: FilesClient, folder: Path) -> None:
    (folder / "file").write_bytes(b"kept")
    os.mkfifo(folder / "pipe")
    assert files.post(str(folder), b"x").json["message"] == f"path '{folder}' is a directory"
    assert files.post(str(folder / "pipe"), b"x").status == 400
    assert files.post(str(folder / "file/below"), b"x").status == 400
    assert files.post("/dev/null", b"x").status == 400
    assert files.post(str(folder / ("x" * 256)), b"x").status == 400
    assert files.request("POST", "/files?path=a%00b", b"x", {"Content-Type": "application/octet-stream"}).status == 400
    assert entries(folder) == ["file", "pipe"]
    assert (folder / "file").read_bytes() == b"kept"


def test_unknown_user_and_missing_path(files: FilesClient, folder: Path) -> None:
    assert files.as_user("no-such-user").post(str(folder / "x"), b"x").status == 401
    assert files.post(None, b"x").status == 400
    assert entries(folder) == []


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/json", "", "multipart/form-data", "multipart/mixed; boundary=x"]
)
def test_other_content_types(files: FilesClient, folder: Path, kind: str) -> None:
    assert files.post(str(folder / "x"), b"x", {"Content-Type": kind}).status == 400
    assert entries(folder) == []


def test_files_of_the_kernel_are_written_in_place(files: FilesClient) -> None:
    """A directory of /proc takes no temporary file."""
    before = files.get("/proc/self/comm").body
    assert files.post("/proc/self/comm", b"renamed").status == 200
    assert files.get("/proc/self/comm").body == b"renamed\n"
    files.post("/proc/self/comm", before.strip())


# Cut bodies


def cut(files: FilesClient, path: Path, headers: str, body: bytes) -> None:
    """Sends the beginning of a body and hangs up; returns when the agent has noticed."""
    request = f"POST {files.target(str(path))} HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode()
    with files.raw(request + body) as connection:
        connection.shutdown(1)
        while connection.recv(65536):
            pass


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Content-Type: application/octet-stream\r\nContent-Length: 100000", b"x" * 70000),
        ("Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked", b"5\r\nhello\r\n"),
        ("Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked", b"5\r\nhello\r\nZZ\r\n"),
        (f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: 100000", part("ignored", b"x" * 70000)),
        (
            "Content-Type: application/octet-stream\r\nContent-Encoding: gzip\r\nContent-Length: 100000",
            gzip.compress(os.urandom(50000)),
        ),
    ],
)
def test_cut_bodies_leave_no_half_file(files: FilesClient, folder: Path, headers: str, body: bytes) -> None:
    cut(files, folder / "new", headers, body)
    (folder / "old").write_bytes(b"old content")
    cut(files, folder / "old", headers, body)
    assert entries(folder) == ["old"]
    assert (folder / "old").read_bytes() == b"old content"


def test_a_file_is_invisible_until_its_body_is_whole(files: FilesClient, folder: Path) -> None:
    request = f"POST {files.target(str(folder / 'f'))} HTTP/1.1\r\nHost: x\r\n"
    request += "Content-Type: application/octet-stream\r\nContent-Length: 10\r\n\r\n"
    with files.raw(request.encode() + b"01234") as connection:
        while not entries(folder):
            select.select([], [], [], 0.01)
        assert not (folder / "f").exists()
        assert files.call("ListDir", path=str(folder)).get("entries", []) == []
        connection.sendall(b"56789")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert (folder / "f").read_bytes() == b"0123456789"


# Compression


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 3_000_000])
def test_gzip_bodies(files: FilesClient, folder: Path, size: int) -> None:
    content = os.urandom(size // 2) + bytes(size - size // 2)
    answer = files.post(str(folder / "f"), gzip.compress(content), {"Content-Encoding": "gzip"})
    assert answer.status == 200
    assert (folder / "f").read_bytes() == content


@settings(RELAXED, max_examples=40)
@given(data=st.data(), contents=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_gzip_members_cut_anywhere(
    files: FilesClient, folder: Path, data: st.DataObject, contents: list[bytes]
) -> None:
    body = b"".join(gzip.compress(c) for c in contents)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert files.post(str(folder / "f"), pieces, {"Content-Encoding": "gzip"}).status == 200
    assert (folder / "f").read_bytes() == b"".join(contents)


def test_highly_compressed_bodies_pass_in_turns(files: FilesClient, folder: Path) -> None:
    """1 MiB of the wire is 1 GiB of the guest's disk at worst: the agent must not hold it, nor stop for it."""
    size = 64 << 20
    body = gzip.compress(bytes(size), 9)
    assert len(body) < 70_000
    assert files.post(str(folder / "f"), body, {"Content-Encoding": "gzip"}).status == 200
    assert (folder / "f").stat().st_size == size
    assert files.post(str(folder / "f"), [body[:-1], body[-1:]], {"Content-Encoding": "gzip"}).status == 200
    assert (folder / "f").stat().st_size == size


def test_other_clients_are_served_during_a_long_decompression(files: FilesClient, folder: Path) -> None:
    """Each piece that the agent takes from its socket holds 64 MiB."""
    size = 200 << 20
    body = gzip.compress(bytes(size), 9)
    request = (
        f"POST {files.target(str(folder / 'f'))} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
    )
    request += f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    with files.raw(request.encode() + body) as connection:
        for _ in range(10):
            assert files.request("GET", "/health").status == 204
            assert not select.select([connection], [], [], 0)[0]
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert (folder / "f").stat().st_size == size


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not gzip at all",
        gzip.compress(b"x" * 1000)[:-1],
        gzip.compress(b"x" * 1000)[:5],
        gzip.compress(b"x" * 1000) + b"trailing",
        gzip.compress(b"x" * 1000)[:-8] + bytes(8),
        zlib.compress(b"x" * 1000),
    ],
)
def test_damaged_gzip(files: FilesClient, folder: Path, body: bytes) -> None:
    assert files.post(str(folder / "f"), body, {"Content-Encoding": "gzip"}).status == 400
    assert entries(folder) == []


def test_other_codings(files: FilesClient, folder: Path) -> None:
    assert files.post(str(folder / "f"), b"x", {"Content-Encoding": "br"}).status == 400
    assert files.post(str(folder / "f"), b"x", {"Content-Encoding": "identity"}).status == 200
    compressed = gzip.compress(form(part(str(folder / "g"), b"in a form")))
    assert files.post(None, compressed, FORM | {"Content-Encoding": "gzip"}).status == 200
    assert (folder / "g").read_bytes() == b"in a form"


# Forms


def test_form_with_several_files(files: FilesClient, folder: Path) -> None:
    paths = [folder / "one", folder / "sub/two", folder / "three"]
    body = form(*(part(str(p), p.name.encode()) for p in paths), part("x", b"ignored", field="other"))
    answer = files.post(None, body, FORM)
    assert answer.json == [{"path": str(p), "name": p.name, "type": "file"} for p in paths]
    assert [p.read_bytes() for p in paths] == [b"one", b"two", b"three"]
    assert entries(folder) == ["one", "sub", "three"]


def test_path_of_the_query_wins(files: FilesClient, folder: Path) -> None:
    assert files.post(str(folder / "here"), form(part(str(folder / "there"), b"x")), FORM).status == 200
    assert entries(folder) == ["here"]


def test_same_path_twice(files: FilesClient, folder: Path) -> None:
    (folder / "f").write_bytes(b"before")
    body = form(part(str(folder / "f"), b"1"), part(str(folder / "g"), b"2"), part(str(folder / "f"), b"3"))
    assert files.post(None, body, FORM).status == 400
    assert entries(folder) == ["f"]
    assert (folder / "f").read_bytes() == b"before"


def disposition(value: str, content: bytes = b"x") -> bytes:
    head = f"--{BOUNDARY}\r\nContent-Type: text/plain\r\ncontent-DISPOSITION: {value}\r\n\r\n"
    return head.encode() + content + b"\r\n"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('form-data; name="file"; filename="{}"', "plain"),
        ("form-data; name=file; filename={}", "token"),
        ('form-data; filename="{}"; name="file"', "order"),
        ('form-data; name="file"; filename="bad"; filename*=UTF-8\'\'{}', "žluťoučký"),
        ('form-data; name="file"; filename="{}"', "utf-8 žluťoučký"),
        ('form-data; name="file"; filename="{}"', "semi;colon=1"),
        ('form-data; name="file"; filename="{}"', 'quo"te'),
        ('form-data; name="file"; filename="{}"', "back\\slash"),
    ],
)
def test_forms_of_content_disposition(files: FilesClient, folder: Path, template: str, name: str) -> None:
    path = str(folder / name)
    sent = quote(path) if "UTF-8''" in template else path.replace("\\", "\\\\").replace('"', '\\"')
    answer = files.post(None, form(disposition(template.format(sent))), FORM)
    assert (answer.status, answer.json[0]["name"]) == (200, name)
    assert entries(folder) == [name]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary",
        form(),
        form(part("ignored", b"x", field="other")),
        form(disposition('form-data; name="file"')),
        form(disposition('form-data; name="file"; filename=""')),
        form(disposition('form-data; name="file"; filename="unterminated')),
        form(disposition("form-data; name=file; filename=a\0b")),
        part("{folder}/cut", b"x"),
        part("{folder}/cut", b"x") + b"--",
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=file; filename={{folder}}/x\r\n".encode(),
        f"--{BOUNDARY} junk\r\n\r\n".encode() + form(part("{folder}/x", b"x")),
        f"--{BOUNDARY}\r\nX: {'y' * 20000}\r\n\r\n".encode() + form(part("{folder}/x", b"x")),
    ],
)
def test_malformed_forms(files: FilesClient, folder: Path, body: bytes) -> None:
    answer = files.post(None, body.replace(b"{folder}", os.fsencode(folder)), FORM)
    assert (answer.status, answer.json["code"]) == (400, 400)
    assert entries(folder) == []


def test_a_bad_part_after_good_ones_undoes_them(files: FilesClient, folder: Path) -> None:
    body = form(part(str(folder / "good"), b"x"), part(str(folder / ("x" * 300)), b"x"))
    assert files.post(None, body, FORM).status == 400
    assert not (folder / "good").exists()


DELIMITER = f"\r\n--{BOUNDARY}".encode()
CONTENT = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"-", b"--", DELIMITER, DELIMITER[:-1], DELIMITER[2:], b"x", b" ", b"\0"])
    | st.binary(max_size=20),
    max_size=12,
).map(b"".join)


def holds_boundary(content: bytes) -> bool:
    """Contents that no form with this boundary can carry."""
    return re.search(re.escape(DELIMITER) + rb"(--|[ \t]|\r\n)", b"\r\n" + content + DELIMITER) is not None


@settings(RELAXED, max_examples=150)
@given(data=st.data(), contents=st.lists(CONTENT.filter(lambda c: not holds_boundary(c)), min_size=1, max_size=3))
def test_forms_cut_anywhere(files: FilesClient, folder: Path, data: st.DataObject, contents: list[bytes]) -> None:
    body = form(*(part(str(folder / f"f{i}"), content) for i, content in enumerate(contents)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    answer = files.post(None, pieces, FORM)
    assert answer.status == 200, answer.body
    assert [(folder / f"f{i}").read_bytes() for i in range(len(contents))] == contents


def test_form_cut_at_every_byte(files: FilesClient, folder: Path) -> None:
    content = b"\r\n--\r\r\n" + DELIMITER + b"-" + DELIMITER + b"\r" + DELIMITER + b"x\r"
    body = b"preamble\r\n" + form(part(str(folder / "f"), content), part(str(folder / "g"), b"")) + b"epilogue"
    for pieces in [[body[:i], body[i:]] for i in range(1, len(body))] + [[bytes([c]) for c in body]]:
        answer = files.post(None, pieces, FORM)
        assert answer.status == 200, (pieces[0], answer.body)
        assert (folder / "f").read_bytes() == content
        assert (folder / "g").read_bytes() == b""
        (folder / "f").unlink()


# Metadata


def metadata_of(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


def test_metadata_is_stored_and_replaced(files: FilesClient, folder: Path) -> None:
    path = folder / "f"
    answer = files.post(str(path), b"1", {"X-Metadata-Author": "Some One", "x-metadata-b": ""})
    assert answer.json[0]["metadata"] == {"author": "Some One", "b": ""}
    os.setxattr(path, "user.other", b"not ours")
    assert metadata_of(path) == {"user.e2b.author": b"Some One", "user.e2b.b": b"", "user.other": b"not ours"}
    files.post(str(path), b"2", {"X-Metadata-C": "3"})
    assert metadata_of(path)["user.e2b.c"] == b"3"
    assert "user.e2b.author" not in metadata_of(path)
    assert "metadata" not in files.post(str(path), b"4").json[0]
    assert [name for name in metadata_of(path) if name.startswith("user.e2b.")] == []


def test_every_file_of_a_form_gets_the_metadata(files: FilesClient, folder: Path) -> None:
    body = form(part(str(folder / "a"), b"1"), part(str(folder / "b"), b"2"))
    answer = files.post(None, body, FORM | {"X-Metadata-K": "v"})
    assert [file["metadata"] for file in answer.json] == [{"k": "v"}] * 2
    assert metadata_of(folder / "a") == metadata_of(folder / "b") == {"user.e2b.k": b"v"}


def test_first_of_repeated_headers_counts(files: FilesClient, folder: Path) -> None:
    request = (
        f"POST {files.target(str(folder / 'f'))} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
    )
    request += "X-Metadata-K: first\r\nx-metadata-k: second\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"
    with files.raw(request.encode()) as connection, connection.makefile("rb") as stream:
        assert json.loads(stream.read().partition(b"\r\n\r\n")[2])[0]["metadata"] == {"k": "first"}


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({"X-Metadata-" + "k" * 246: "v"}, True),
        ({"X-Metadata-" + "k" * 247: "v"}, False),
        ({"X-Metadata-": "v"}, False),
        ({"X-Metadata-k": "caf\xe9"}, False),
        ({"X-Metadata-k": "tab\there"}, False),
        ({"X-Metadata-k": "del\x7f"}, False),
        ({"X-Metadata-k": "v" * (4096 - 9 - 1 + 1)}, False),
        ({f"X-Metadata-{i}": "v" * 1000 for i in range(5)}, False),
    ],
)
def test_limits_of_metadata(files: FilesClient, folder: Path, headers: dict[str, str], accepted: bool) -> None:
    answer = files.post(str(folder / "f"), b"x", headers)
    assert answer.status == (200 if accepted else 400), answer.body
    assert entries(folder) == (["f"] if accepted else [])


# Owners, full disks, mount points


@pytest.mark.root
def test_owner_of_files_and_new_directories(files: FilesClient, tmp_path: Path) -> None:
    nobody = files.as_user("nobody")
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_bytes(b"of root")
    assert nobody.post(str(tmp_path / "there/new/deep/f"), b"x").status == 200
    assert nobody.post(str(tmp_path / "file"), b"x").status == 200
    owners = {str(p.relative_to(tmp_path)): p.owner() for p in tmp_path.rglob("*")}
    assert owners == {
        "there": "root",
        "there/new": "nobody",
        "there/new/deep": "nobody",
        "there/new/deep/f": "nobody",
        "file": "nobody",
    }


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "mounted"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=50", "tmpfs", where], check=True)
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.root
def test_full_disk(files: FilesClient, mounted: Path) -> None:
    (mounted / "old").write_bytes(b"old")
    bodies: list[tuple[bytes | list[bytes], dict[str, str]]] = [
        (bytes(3 << 20), {}),  # refused by its length
        ([bytes(1 << 16)] * 48, {}),  # found out by writing
        (gzip.compress(bytes(3 << 20)), {"Content-Encoding": "gzip"}),
        (form(part(str(mounted / "old"), bytes(3 << 20))), FORM),
    ]
    for body, headers in bodies:
        answer = files.post(str(mounted / "old"), body, headers)
        assert (answer.status, answer.json["code"]) == (507, 507)
        assert entries(mounted) == ["old"]
        assert (mounted / "old").read_bytes() == b"old"
    assert files.post(str(mounted / "old"), b"it still works").status == 200


@pytest.mark.root
def test_mount_point_is_filled(files: FilesClient, tmp_path: Path) -> None:
    """A bind-mounted file cannot be replaced by rename."""
    (tmp_path / "source").write_bytes(b"a long old content")
    (tmp_path / "point").touch()
    subprocess.run(["mount", "--bind", tmp_path / "source", tmp_path / "point"], check=True)
    try:
        assert files.post(str(tmp_path / "point"), b"new").status == 200
        assert (tmp_path / "source").read_bytes() == b"new"
    finally:
        subprocess.run(["umount", tmp_path / "point"], check=True)
    assert entries(tmp_path) == ["point", "source"]
