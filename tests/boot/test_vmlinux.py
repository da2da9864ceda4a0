"""The ELF kernel out of a bzImage."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import shutil
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.boot.vmlinux import boots_by_pvh, extract_vmlinux
from aenv.errors import InvalidInputError, UnavailableError
from tests.boot import elf


def _tool(*command: str) -> Callable[[bytes], bytes]:
    return lambda data: subprocess.run(command, input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    "pack",
    [lzma.compress, lambda d: lzma.compress(d, lzma.FORMAT_ALONE), bz2.compress, _tool("zstd", "-qc"),
     _tool("lz4", "-lqc")],
    ids=["xz", "lzma", "bzip2", "zstd", "lz4"],
)  # fmt: skip
def test_extracts(pack: Callable[[bytes], bytes]) -> None:
    kernel = elf.kernel() + bytes(5000)
    assert extract_vmlinux(elf.bzimage("6.12.0", pack(kernel), size=len(kernel)), "k") == kernel


def test_gzip_brings_its_own_trailer() -> None:
    kernel = elf.kernel()
    assert extract_vmlinux(elf.bzimage("6.12.0", gzip.compress(kernel)), "k") == kernel


def test_missing_tool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    image = elf.bzimage("6.12.0", _tool("zstd", "-qc")(elf.kernel()), size=len(elf.kernel()))
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(UnavailableError, match="apt-get install zstd"):
        extract_vmlinux(image, "k")


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\x7fELF",
        elf.bzimage("6.12.0", b""),
        elf.bzimage("6.12.0", b"unknown compression", size=5),
        elf.bzimage("6.12.0", lzma.compress(elf.kernel()), size=len(elf.kernel()) + 1),
        elf.bzimage("6.12.0", lzma.compress(b"no ELF file here"), size=16),
        elf.bzimage("6.12.0", lzma.compress(elf.kernel())[:-9], size=len(elf.kernel())),
        elf.bzimage("6.12.0", lzma.compress(elf.kernel()), size=len(elf.kernel()))[:-8],
        elf.bzimage("6.12.0", b"\x28\xb5\x2f\xfd" + bytes(50), size=50),
    ],
)
def test_broken_images_are_refused_by_name(image: bytes) -> None:
    with pytest.raises(InvalidInputError) as caught:
        extract_vmlinux(image, "linux-image-x")
    assert caught.value.field == "linux-image-x"


def test_pvh_entry_is_found() -> None:
    assert boots_by_pvh(elf.kernel())
    assert not boots_by_pvh(elf.kernel(pvh=False))
    assert not boots_by_pvh(b"")
    assert not boots_by_pvh(elf.kernel()[:80])


@given(st.data())
def test_damaged_kernels_never_crash_the_reader(data: st.DataObject) -> None:
    file = bytearray(elf.kernel())
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    boots_by_pvh(bytes(file[: data.draw(st.integers(0, len(file)))]))


@given(st.data())
def test_damaged_images_are_read_or_refused(data: st.DataObject) -> None:
    file = bytearray(elf.bzimage("6.12.0", lzma.compress(elf.kernel()), size=len(elf.kernel())))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0x1F1, len(file) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidInputError):
        extract_vmlinux(bytes(file), "k")
