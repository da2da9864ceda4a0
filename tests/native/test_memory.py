"""Memory capture against a model: a child process with a private mapping that is written at random."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv._native import memory
from aenv._native.lsmt import Layer, Stack
from aenv.vmm.spawn import reap, start

PAGE = mmap.PAGESIZE
PAGES = 700  # more than two batches
SIZE = PAGES * PAGE
UUID = "11111111-2222-3333-4444-555555555555"
MAGIC = bytes.fromhex("4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a")

# Maps a file privately, and writes pages as told: {"map": path} or {"write": {page: byte}}. Answers a line each time.
CHILD = """
import json, mmap, sys
m = None
for line in sys.stdin:
    order = json.loads(line)
    if "map" in order:
        if m: m.close()
        with open(order["map"], "r+b") as f:
            m = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE)
    for page, byte in order.get("write", {}).items():
        at = int(page) * 4096
        m[at:at + 4096] = bytes([byte]) * 4096
    if order.get("read"):
        for at in range(0, len(m), 4096): m[at]
    print("ok", flush=True)
"""


class Child:
    def __init__(self) -> None:
        in_r, in_w = os.pipe()
        out_r, out_w = os.pipe()
        self.pid, self.pidfd = start([sys.executable, "-c", CHILD], fds={0: in_r, 1: out_w, 2: 2})
        os.close(in_r)
        os.close(out_w)
        self._in, self._out = os.fdopen(in_w, "w"), os.fdopen(out_r)

    def __call__(self, **order: object) -> None:
        self._in.write(json.dumps(order) + "\n")
        self._in.flush()
        assert self._out.readline() == "ok\n"

    def regions(self, path: Path) -> list[memory.Region]:
        found = []
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            span, _, offset, *_ = line.split()
            if line.endswith(f" {path}"):
                begin, end = (int(x, 16) for x in span.split("-"))
                found.append((begin, int(offset, 16), end - begin))
        assert sum(r[2] for r in found) == SIZE
        return found

    def read(self, path: Path) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as mem:
            parts = []
            for address, _, length in self.regions(path):
                mem.seek(address)
                parts.append(mem.read(length))
            return b"".join(parts)

    def end(self) -> None:
        self._in.close()
        self._out.close()
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


def capture(pid: int, regions: list[memory.Region], size: int, parent: int, out: int, **options: object):
    """With the whole file `parent` as parent; -1: with zeros."""
    extents = b"" if parent < 0 else struct.pack("=QQIIQ", 0, size, 0, 0, 0)
    return memory.capture(pid, regions, size, [] if parent < 0 else [parent], extents, out, **options)  # type: ignore[arg-type]


def page(byte: int) -> bytes:
    return bytes([byte]) * PAGE


def new_file(path: Path, content: bytes = b"") -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    os.write(fd, content)
    return fd


def independent_read(layer: bytes, below: bytes) -> bytes:
    """A second reader of the format, written from its description."""
    header, trailer = layer[:4096], layer[-4096:]
    for block, flags in ((header, 7), (trailer, 6)):
        assert block[:24] == MAGIC
        assert struct.unpack_from("<II", block, 24) == (390, flags)
        assert block[56:93] == UUID.encode() + b"\0"
        assert block[132:134] == b"\1\1"
        assert block[390:] == bytes(4096 - 390)
    assert struct.unpack_from("<QQ", header, 32) == (0, 0)
    index_offset, count, virtual_size = struct.unpack_from("<QQQ", trailer, 32)
    assert virtual_size == len(below)
    assert index_offset + count * 16 + 4096 == len(layer)
    assert index_offset % 4096 == 0
    assert count % 256 == 0
    memory_now, previous = bytearray(below), 0
    for at in range(index_offset, index_offset + count * 16, 16):
        first, second = struct.unpack_from("<QQ", layer, at)
        offset, length = first & (1 << 50) - 1, first >> 50
        mapped, zero = second & (1 << 55) - 1, second >> 55 & 1
        if offset == (1 << 50) - 1:
            assert length == mapped == 0
            continue
        assert offset >= previous
        previous = offset + length
        assert mapped >= 8
        assert mapped + (0 if zero else length) <= index_offset // 512
        data = bytes(length * 512) if zero else layer[mapped * 512 : (mapped + length) * 512]
        memory_now[offset * 512 : (offset + length) * 512] = data
    return bytes(memory_now)


CONTENT = st.dictionaries(st.integers(0, PAGES - 1), st.sampled_from([0, 1, 2, 255]), max_size=40)
RUNS = st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, 300), st.sampled_from([0, 1, 7])), max_size=4)


@given(parent=CONTENT, writes=CONTENT, runs=RUNS, ioctl=st.booleans(), threads=st.integers(1, 4), blank=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_capture_is_the_model(child, tmp_path, parent, writes, runs, ioctl, threads, blank):
    """Image + layer = what the process saw, by three ways of reading it; nothing superfluous is stored."""
    image = bytearray(SIZE)
    if not blank:
        for number, byte in parent.items():
            image[number * PAGE : (number + 1) * PAGE] = page(byte)
    for first, count, byte in runs:
        writes = writes | dict.fromkeys(range(first, min(first + count, PAGES)), byte)
    model = bytearray(image)
    for number, byte in writes.items():
        model[number * PAGE : (number + 1) * PAGE] = page(byte)

    base, layer = tmp_path / "base", tmp_path / "layer"
    fds = [new_file(base, bytes(image)), new_file(layer), new_file(tmp_path / "flat")]
    try:
        child(map=str(base), write=writes, read=True)
        regions = child.regions(base)
        stats = capture(
            child.pid, regions, SIZE, -1 if blank else fds[0], fds[1], threads=threads, uuid=UUID, scan_by_ioctl=ioctl
        )[0]
        assert stats["dirty_pages"] == len(writes)
        changed = [n for n in writes if model[n * PAGE : (n + 1) * PAGE] != image[n * PAGE : (n + 1) * PAGE]]
        zeroed = [n for n in changed if writes[n] == 0]
        assert stats["zero_pages"] == len(zeroed)
        assert stats["stored_pages"] == len(changed) - len(zeroed)
        assert stats["equal_pages"] == len(writes) - len(changed)
        assert stats["file_bytes"] == os.fstat(fds[1]).st_size

        assert independent_read(layer.read_bytes(), bytes(image)) == model
        found = memory.segments(fds[1], SIZE)
        assert len(found) == stats["segments"]
        assert sum(length for _, length, _ in found) == len(changed) * PAGE

        if blank:
            stack = Stack([Layer(layer)])
            assert stack.read(0, SIZE) == model, "the disk layers' reader sees the same"
        memory.write_image([fds[1]], SIZE, fds[0], fds[2])
        assert (tmp_path / "flat").read_bytes() == model

        child(map=str(base))
        assert memory.apply(fds[1], child.pid, child.regions(base), SIZE, threads=threads) == len(changed)
        assert child.read(base) == model
        assert base.read_bytes() == image, "the shared image is never changed"
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("ioctl", [True, False])
@pytest.mark.parametrize("runs", [511, 512, 513, 600, 1023, 1024, 1025, 3000])
def test_many_scattered_pages_are_captured_once_each(tmp_path, runs, ioctl):
    """Linux 6.18 repeats regions when its buffer of 512 is full in the middle of a PAGEMAP_SCAN."""
    size = 8192 * PAGE
    dice = random.Random(runs)
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(size)
        for at in range(0, size, 7 * PAGE):
            os.pwrite(file.fileno(), b"\1" * PAGE, at)
    with image.open("r+b") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
        address = next(
            int(line.split("-")[0], 16)
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(f" {image}")
        )
        for at in range(0, size, 3 * PAGE):
            mapping[at]  # some pages of the file are present and not written
        dirty = set()
        for _ in range(runs):
            first, count = dice.randrange(8192), dice.choice([1, 1, 1, 2, 3, 10])
            for page in range(first, min(8192, first + count)):
                mapping[page * PAGE : (page + 1) * PAGE] = b"\2" * PAGE
                dirty.add(page)
        with (tmp_path / "layer").open("w+b") as layer:
            stats = capture(
                os.getpid(), [(address, 0, size)], size, file.fileno(), layer.fileno(), threads=2, scan_by_ioctl=ioctl
            )[0]
            pages = [
                page
                for offset, length, _ in memory.segments(layer.fileno(), size)
                for page in range(offset // PAGE, (offset + length) // PAGE)
            ]
    assert sorted(dirty) == pages
    assert stats["dirty_pages"] == stats["stored_pages"] == len(dirty)


def test_delta_of_a_delta_is_cumulative(child, tmp_path):
    """Pages that came from an applied layer count as dirty: the second layer needs only the first image."""
    base = tmp_path / "base"
    fds = [new_file(base, page(9) * PAGES), new_file(tmp_path / "one"), new_file(tmp_path / "two")]
    try:
        child(map=str(base), write={3: 1, 4: 0, 5: 2})
        capture(child.pid, child.regions(base), SIZE, fds[0], fds[1])
        child(map=str(base))
        memory.apply(fds[1], child.pid, child.regions(base), SIZE)
        child(write={5: 9, 600: 7})
        capture(child.pid, child.regions(base), SIZE, fds[0], fds[2], uuid=UUID)
        model = bytearray(page(9) * PAGES)
        for number, byte in {3: 1, 4: 0, 600: 7}.items():
            model[number * PAGE : (number + 1) * PAGE] = page(byte)
        assert independent_read((tmp_path / "two").read_bytes(), page(9) * PAGES) == model
    finally:
        for fd in fds:
            os.close(fd)


def test_image_of_zeros_is_sparse(tmp_path):
    fds = [new_file(tmp_path / "parent"), new_file(tmp_path / "flat", b"old content")]
    try:
        os.ftruncate(fds[0], SIZE)
        os.pwrite(fds[0], page(0), 5 * PAGE)
        os.pwrite(fds[0], page(1), 9 * PAGE)
        memory.write_image([], SIZE, fds[0], fds[1])
        assert os.fstat(fds[1]).st_size == SIZE
        assert os.fstat(fds[1]).st_blocks * 512 <= 16 * PAGE
        assert os.pread(fds[1], PAGE, 9 * PAGE) == page(1)
    finally:
        for fd in fds:
            os.close(fd)


def sealed_layer(entries: list[tuple[int, int, int, int]], data_pages: int = 4) -> bytearray:
    """A layer whose index holds (offset, length, moffset, zero), in sectors."""
    block = bytearray(4096)
    block[:24] = MAGIC
    struct.pack_into("<II", block, 24, 390, 7)
    struct.pack_into("<Q", block, 48, SIZE)
    block[132:134] = b"\1\1"
    trailer = bytearray(block)
    index_offset = 4096 + data_pages * PAGE
    struct.pack_into("<IQQ", trailer, 28, 6, index_offset, len(entries))
    index = b"".join(struct.pack("<QQ", o | n << 50, m | z << 55) for o, n, m, z in entries)
    return block + page(0xEE) * data_pages + index + trailer


GOOD = [(0, 8, 8, 0), (16, 16, 16, 0), ((1 << 50) - 1, 0, 0, 0), (64, 8, 40, 1)]


def patched(offset: int, data: bytes, *, from_end: bool = False) -> bytes:
    layer = sealed_layer(GOOD)
    at = len(layer) - 4096 + offset if from_end else offset
    layer[at : at + len(data)] = data
    return bytes(layer)


HOSTILE = {
    "size": (b"", "size"),
    "size-one-block": (bytes(4096), "size"),
    "header-magic": (patched(3, b"X"), "header.magic"),
    "header-flags": (patched(28, b"\0"), "header.flags"),
    "header-version": (patched(132, b"\2"), "header.version"),
    "trailer-magic": (patched(9, b"X", from_end=True), "trailer.magic"),
    "trailer-unsealed": (patched(28, b"\2", from_end=True), "trailer.flags"),
    "trailer-is-header": (patched(28, b"\7", from_end=True), "trailer.flags"),
    "virtual-size": (patched(48, struct.pack("<Q", SIZE + PAGE), from_end=True), "trailer.virtual_size"),
    "index-count": (patched(40, struct.pack("<Q", 1_000_001), from_end=True), "trailer.index_size"),
    "index-count-huge": (patched(40, struct.pack("<Q", 2**60), from_end=True), "trailer.index_size"),
    "index-count-long": (patched(40, struct.pack("<Q", 6), from_end=True), "trailer.index_offset"),
    "index-in-header": (patched(32, struct.pack("<Q", 512), from_end=True), "trailer.index_offset"),
    "index-odd": (patched(32, struct.pack("<Q", 4097), from_end=True), "trailer.index_offset"),
    "index-far": (patched(32, struct.pack("<Q", 2**63), from_end=True), "trailer.index_offset"),
    "overlap": (sealed_layer([(0, 16, 8, 0), (8, 8, 24, 0)]), r"index\[1\].offset"),
    "disorder": (sealed_layer([(8, 8, 8, 0), (0, 8, 16, 0)]), r"index\[1\].offset"),
    "beyond-memory": (sealed_layer([(PAGES * 8 - 8, 16, 8, 0)]), r"index\[0\].offset"),
    "far-beyond-memory": (sealed_layer([((1 << 50) - 8, 8, 8, 0)]), r"index\[0\].offset"),
    "part-of-page": (sealed_layer([(0, 4, 8, 0)]), r"index\[0\]: not"),
    "within-page": (sealed_layer([(4, 8, 8, 0)]), r"index\[0\]: not"),
    "empty-entry": (sealed_layer([(0, 0, 8, 0)]), r"index\[0\]: not"),
    "data-in-header": (sealed_layer([(0, 8, 0, 0)]), r"index\[0\].moffset"),
    "data-in-index": (sealed_layer([(0, 8, 33, 0)]), r"index\[0\].moffset"),
    "zeros-beyond-data": (sealed_layer([(0, 8, 41, 1)]), r"index\[0\].moffset"),
    "data-huge": (sealed_layer([(0, 8, (1 << 55) - 1, 0)]), r"index\[0\].moffset"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layer_is_refused_and_changes_nothing(child, tmp_path, name):
    content, field = HOSTILE[name]
    base = tmp_path / "base"
    fds = [new_file(base, page(5) * PAGES), new_file(tmp_path / "layer", bytes(content)), new_file(tmp_path / "out")]
    try:
        child(map=str(base))
        regions = child.regions(base)
        with pytest.raises(memory.LayerError, match=f"^{field}"):
            memory.segments(fds[1], SIZE)
        with pytest.raises(memory.LayerError, match=f"^{field}"):
            memory.apply(fds[1], child.pid, regions, SIZE)
        with pytest.raises(memory.LayerError, match=f"^{field}"):
            memory.write_image([fds[1]], SIZE, -1, fds[2])
        assert child.read(base) == page(5) * PAGES
    finally:
        for fd in fds:
            os.close(fd)


@given(st.lists(st.tuples(st.integers(0, 4096 + 4 * PAGE + 64 + 4095), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_refused_or_stays_inside_the_memory(tmp_path, damage):
    layer = sealed_layer(GOOD)
    for at, byte in damage:
        layer[at] = byte
    fd = new_file(tmp_path / "layer", bytes(layer))
    try:
        found = memory.segments(fd, SIZE)
    except memory.LayerError:
        return
    finally:
        os.close(fd)
    for offset, length, mapped in found:
        assert 0 <= offset < offset + length <= SIZE
        assert mapped is None or 4096 <= mapped < mapped + length <= len(layer) - 4096


def test_layer_in_the_format_of_others_is_accepted(tmp_path):
    """Unpadded index, padding entries in the middle, junk in the tags."""
    layer = sealed_layer(GOOD)
    layer[4096 + 4 * PAGE + 15] = 0x55
    fd = new_file(tmp_path / "layer", bytes(layer))
    try:
        assert memory.segments(fd, SIZE) == [(0, PAGE, 4096), (8192, 8192, 8192), (32768, PAGE, None)]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("regions", "size", "text"),
    [
        ([], SIZE, "regions"),
        ([(PAGE, 0, SIZE)], 0, "pages"),
        ([(PAGE, 0, SIZE)], SIZE + 1, "pages"),
        ([(PAGE, 0, SIZE)], 1 << 60, "pages"),
        ([(PAGE, 0, SIZE + PAGE)], SIZE, "beyond"),
        ([(PAGE, PAGE, SIZE)], SIZE, "beyond"),
        ([(PAGE, 0, 2 * PAGE), (9 * PAGE, PAGE, PAGE)], SIZE, "overlap"),
        ([(PAGE + 1, 0, PAGE)], SIZE, "aligned"),
        ([(PAGE, 0, 0)], SIZE, "aligned"),
        ([(PAGE, 0, -PAGE)], SIZE, "aligned"),
    ],
)
def test_bad_regions_are_refused(regions, size, text):
    for call in (
        lambda: capture(os.getpid(), regions, size, -1, 1),
        lambda: memory.apply(0, os.getpid(), regions, size),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for threads in (0, 17):
        with pytest.raises(ValueError, match="threads"):
            capture(os.getpid(), [(PAGE, 0, PAGE)], PAGE, -1, 1, threads=threads)
    with pytest.raises(ValueError, match="UUID"):
        capture(os.getpid(), [(PAGE, 0, PAGE)], PAGE, -1, 1, uuid="short")


def test_layer_that_fits_no_region_changes_nothing(child, tmp_path):
    base = tmp_path / "base"
    fds = [new_file(base, page(5) * PAGES), new_file(tmp_path / "layer", bytes(sealed_layer(GOOD)))]
    try:
        child(map=str(base))
        address = child.regions(base)[0][0]
        with pytest.raises(memory.LayerError, match="no memory region"):
            memory.apply(fds[1], child.pid, [(address, 0, 4 * PAGE)], SIZE)
        assert child.read(base) == page(5) * PAGES
    finally:
        for fd in fds:
            os.close(fd)


def test_process_that_dies_and_mapping_that_goes(tmp_path):
    child = Child()
    base = tmp_path / "base"
    fds = [
        new_file(base, bytes(SIZE)),
        new_file(tmp_path / "layer", bytes(sealed_layer(GOOD))),
        new_file(tmp_path / "n"),
    ]
    try:
        child(map=str(base), write={n: random.randrange(256) for n in range(PAGES)})
        regions = child.regions(base)
        with pytest.raises(OSError, match="process_vm_writev: Bad address"):
            memory.apply(fds[1], child.pid, [(4096, 0, SIZE)], SIZE)
        with pytest.raises(memory.LayerError, match="parent extent 0: beyond the end of its file"):
            capture(child.pid, regions, SIZE, fds[1], fds[2])
        child.end()
        with pytest.raises(OSError, match=r"No such (file|process)"):
            capture(child.pid, regions, SIZE, -1, fds[2])
        with pytest.raises(OSError, match="No such process"):
            memory.apply(fds[1], child.pid, regions, SIZE)
    finally:
        for fd in fds:
            os.close(fd)


def test_full_disk_is_an_error(child, tmp_path):
    base = tmp_path / "base"
    fds = [new_file(base, bytes(SIZE)), os.open("/dev/full", os.O_RDWR)]
    try:
        child(map=str(base), write={7: 7})
        with pytest.raises(OSError, match="No space"):
            capture(child.pid, child.regions(base), SIZE, -1, fds[1])
    finally:
        for fd in fds:
            os.close(fd)


def test_reap_of_a_stranger_is_none():
    pidfd = os.pidfd_open(1)
    try:
        assert reap(pidfd) is None
    finally:
        os.close(pidfd)
