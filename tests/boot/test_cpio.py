"""The archive writer against cpio(1), against itself, and against bad entries."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.boot import cpio
from aenv.errors import InvalidInputError

ENTRIES = [
    cpio.directory("dev"),
    cpio.character_device("dev/console", 5, 1),
    cpio.Entry("dev/vda", stat.S_IFBLK | 0o660, b"", 254, 3),
    cpio.Entry("pipe", stat.S_IFIFO | 0o600),
    cpio.regular("a", b"x"),
    cpio.regular("abc", b"hello", 0o4755),
    cpio.regular("empty", b""),
    cpio.symlink("link", "dev/console"),
    cpio.directory("sticky", 0o1777),
]


def test_cpio_lists_what_was_written() -> None:
    archive = cpio.write_archive(ENTRIES)
    listing = subprocess.run(
        ["cpio", "--list", "--verbose", "--numeric-uid-gid"], input=archive, capture_output=True, check=True
    )
    lines = listing.stdout.decode().splitlines()
    assert [(line.split()[0], line.split()[2:4]) for line in lines] == [
        (mode, ["0", "0"])
        for mode in (
            "drwxr-xr-x", "crw-------", "brw-rw----", "prw-------", "-rw-r--r--", "-rwsr-xr-x", "-rw-r--r--",
            "lrwxrwxrwx", "drwxrwxrwt",
        )
    ]  # fmt: skip
    assert lines[-2].endswith("link -> dev/console")
    assert "5,   1" in lines[1]
    assert "254,   3" in lines[2]
    assert lines[5].split()[4] == "5"


def test_cpio_extracts_what_was_written(tmp_path: Path) -> None:
    entries = [cpio.directory("d"), cpio.regular("d/file", bytes(range(256)) * 33, 0o640), cpio.symlink("d/l", "file")]
    subprocess.run(
        ["cpio", "--extract", "--quiet"], input=cpio.write_archive(entries), check=True, cwd=tmp_path
    )  # fmt: skip
    assert (tmp_path / "d/file").read_bytes() == bytes(range(256)) * 33
    assert stat.S_IMODE((tmp_path / "d/file").stat().st_mode) == 0o640
    assert (tmp_path / "d/l").readlink() == Path("file")


def test_equal_entries_give_equal_bytes() -> None:
    assert cpio.write_archive(ENTRIES) == cpio.write_archive(list(ENTRIES))


def test_round_trip() -> None:
    assert cpio.read_archive(cpio.write_archive(ENTRIES)) == ENTRIES


@given(st.lists(st.tuples(st.integers(1, 40), st.binary(max_size=70)), max_size=12))
def test_every_part_is_aligned(files: list[tuple[int, bytes]]) -> None:
    entries = [cpio.regular(f"{n:03d}" + "n" * size, data) for n, (size, data) in enumerate(files)]
    archive = cpio.write_archive(entries)
    assert len(archive) % 4 == 0
    assert cpio.read_archive(archive) == entries


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (cpio.regular("", b""), "cpio name"),
        (cpio.regular("/abs", b""), "cpio name"),
        (cpio.regular("a/../b", b""), "cpio name"),
        (cpio.regular("a//b", b""), "cpio name"),
        (cpio.regular("./a", b""), "cpio name"),
        (cpio.regular("a\0b", b""), "cpio name"),
        (cpio.regular("TRAILER!!!", b""), "cpio name"),
        (cpio.regular("no/parent", b""), "cpio name"),
        (cpio.regular("n" * 4095, b""), "cpio name"),
        (cpio.regular("dev", b""), "cpio name"),
        (cpio.Entry("x", 0o644), "cpio mode of x"),
        (cpio.Entry("x", 0o170000), "cpio mode of x"),
        (cpio.Entry("x", stat.S_IFREG | 1 << 20), "cpio mode of x"),
        (cpio.Entry("x", stat.S_IFDIR | 0o755, b"data"), "cpio data of x"),
        (cpio.Entry("x", stat.S_IFLNK | 0o777, b""), "cpio data of x"),
        (cpio.Entry("x", stat.S_IFLNK | 0o777, b"a\0b"), "cpio data of x"),
        (cpio.Entry("x", stat.S_IFREG | 0o644, b"", 1, 0), "cpio major of x"),
        (cpio.Entry("x", stat.S_IFCHR | 0o644, b"", 1, -1), "cpio minor of x"),
        (cpio.Entry("x", stat.S_IFCHR | 0o644, b"", 1 << 32, 0), "cpio major of x"),
    ],
)
def test_bad_entries_are_refused_by_name(entry: cpio.Entry, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        cpio.write_archive([cpio.directory("dev"), entry])
    assert caught.value.field == field


def test_every_cut_archive_is_refused() -> None:
    archive = cpio.write_archive([cpio.directory("d"), cpio.regular("d/f", b"12345"), cpio.symlink("l", "d/f")])
    for length in range(len(archive)):
        with pytest.raises(InvalidInputError):
            cpio.read_archive(archive[:length])


@given(st.binary(max_size=300))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        cpio.read_archive(data)


@given(st.data())
def test_a_changed_byte_never_crashes_the_reader(data: st.DataObject) -> None:
    archive = bytearray(cpio.write_archive(ENTRIES))
    archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    try:
        cpio.read_archive(bytes(archive))
    except InvalidInputError:
        return
