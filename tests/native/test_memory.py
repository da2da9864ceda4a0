"""Memory capture against a model: a child process with a private mapping that is written at random."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import resource
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
from aenv.snapshot.map import memory_map
from aenv.vmm.base import MemoryExtent, MemoryMap
from aenv.vmm.spawn import reap, start

PAGE = mmap.PAGESIZE
PAGES = 700  # more than two batches
SIZE = PAGES * PAGE
UUID = "11111111-2222-3333-4444-555555555555"
MAGIC = bytes.fromhex("4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a")

# A machine's RAM: empty at "new", then mapped over and written as told. Answers with its address each time.
CHILD = """
import ctypes, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
address = 0
def put(at, length, fd, offset):
    got = libc.mmap(at or None, length, 3, mmap.MAP_PRIVATE | (0x10 if at else 0), fd, offset)
    assert got != ctypes.c_void_p(-1).value, ctypes.get_errno()
    return got
for line in sys.stdin:
    order = json.loads(line)
    if "new" in order:
        size, fd = order["new"], os.memfd_create("blank")
        os.truncate(fd, size)
        address = put(address, size, fd, 0)
        os.close(fd)
    for at, length, path, offset in order.get("map", []):
        fd = os.open(path, os.O_RDONLY)
        put(address + at, length, fd, offset)
        os.close(fd)
    for page, byte in order.get("write", {}).items():
        ctypes.memset(address + int(page) * 4096, byte, 4096)
    if order.get("read"):
        ctypes.string_at(address, size)
    print(address, flush=True)
"""


class Child:
    def __init__(self) -> None:
        in_r, in_w = os.pipe()
        out_r, out_w = os.pipe()
        self.pid, self.pidfd = start([sys.executable, "-c", CHILD], fds={0: in_r, 1: out_w, 2: 2})
        os.close(in_r)
        os.close(out_w)
        self._in, self._out = os.fdopen(in_w, "w"), os.fdopen(out_r)
        self.regions: list[memory.Region] = []

    def __call__(self, **order: object) -> None:
        self._in.write(json.dumps(order) + "\n")
        self._in.flush()
        self.regions = [(int(self._out.readline()), 0, SIZE)]

    def new(self, what: MemoryMap, **order: object) -> None:
        self(new=SIZE, map=places(what), **order)

    def read(self) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as mem:
            mem.seek(self.regions[0][0])
            return mem.read(SIZE)

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


def records(extents: bytes) -> list[tuple[int, int, int, int, int]]:
    return list(struct.iter_unpack("=QQIIQ", extents))


def places(what: MemoryMap) -> list[tuple[int, int, str, int]]:
    return [(at, length, str(what.files[file]), offset) for at, length, file, _, offset in records(what.extents)]


NOTHING = MemoryMap.of(SIZE, (), ())


def capture(
    child: Child, out: Path, parent: MemoryMap = NOTHING, *, room: int = 0, **options: object
) -> tuple[memory.Stats, bytes]:
    fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in parent.files]
    fds.append(os.open(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    try:
        ahead = memory.Room(fds[-1], room) if room else None
        return memory.capture(
            child.pid,
            child.regions,
            SIZE,
            fds[:-1],
            parent.extents,
            fds[-1],
            room=ahead,
            uuid=UUID,
            **options,  # type: ignore[arg-type]
        )
    finally:
        for fd in fds:
            os.close(fd)


def page(byte: int) -> bytes:
    return bytes([byte]) * PAGE


def incore(fd: int) -> list[bool]:
    """Which pages of a file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = os.fstat(fd).st_size
    address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, None))
    view = (ctypes.c_ubyte * ((size + PAGE - 1) // PAGE))()
    assert libc.mincore(address, ctypes.c_size_t(size), view) == 0
    assert libc.munmap(address, ctypes.c_size_t(size)) == 0
    return [bool(byte & 1) for byte in view]


def pages_of(runs: bytes) -> list[int]:
    return [
        number
        for offset, length in struct.iter_unpack("=QQ", runs)
        for number in range(offset // PAGE, (offset + length) // PAGE)
    ]


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
ROOM = st.sampled_from([0, 1, 8 * PAGE, 300 * PAGE, 2 * SIZE])
HOW = st.fixed_dictionaries({"scan_by_ioctl": st.booleans(), "threads": st.integers(1, 4), "room": ROOM})


def spread(writes: dict[int, int], runs: list[tuple[int, int, int]]) -> dict[int, int]:
    for first, count, byte in runs:
        writes = writes | dict.fromkeys(range(first, min(first + count, PAGES)), byte)
    return writes


def fill(model: bytearray, writes: dict[int, int]) -> None:
    for number, byte in writes.items():
        model[number * PAGE : (number + 1) * PAGE] = page(byte)


@given(parent=CONTENT, writes=CONTENT, runs=RUNS, how=HOW, blank=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_capture_is_the_model(child, tmp_path, parent, writes, runs, how, blank):
    """Image + layer = what the process saw, by two ways of reading it; nothing superfluous is stored."""
    image = bytearray(SIZE)
    if not blank:
        fill(image, parent)
    writes = spread(writes, runs)
    model = bytearray(image)
    fill(model, writes)
    base, layer = tmp_path / "base", tmp_path / "layer"
    base.write_bytes(image)
    below = NOTHING if blank else MemoryMap.whole(base, SIZE)
    child.new(below, write=writes, read=True)
    stats, written = capture(child, layer, below, **how)
    assert pages_of(written) == sorted(writes)
    assert memory.written_bytes(child.pid, child.regions, SIZE) == len(writes) * PAGE
    assert stats["dirty_pages"] == len(writes)
    changed = [n for n in writes if model[n * PAGE : (n + 1) * PAGE] != image[n * PAGE : (n + 1) * PAGE]]
    zeroed = [n for n in changed if writes[n] == 0]
    assert stats["zero_pages"] == len(zeroed)
    assert stats["stored_pages"] == len(changed) - len(zeroed)
    assert stats["equal_pages"] == len(writes) - len(changed)
    assert stats["file_bytes"] == layer.stat().st_size
    assert independent_read(layer.read_bytes(), bytes(image)) == model
    segments = list(Layer(layer).segments())
    assert sum(s.length for s in segments) == len(changed) * PAGE
    if blank:
        assert Stack([Layer(layer)]).read(0, SIZE) == model, "the disk layers' reader sees the same"
    assert base.read_bytes() == image, "the shared image is never changed"


STEP = st.tuples(CONTENT, RUNS, HOW, st.sampled_from([0, 1, 3, 10_000]))


@given(image=CONTENT, with_base=st.booleans(), steps=st.lists(STEP, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_chain_is_the_model(child, tmp_path, image, with_base, steps):
    """Writes, captures and rehomings in turn: each chain is the memory of its moment, and what was rehomed is clean."""
    first = bytearray(SIZE)
    if with_base:
        fill(first, image)
    base, zero = tmp_path / "base", tmp_path / "zero"
    base.write_bytes(first)
    zero.touch()
    os.truncate(zero, SIZE)
    content = MemoryMap.whole(base, SIZE) if with_base else NOTHING
    child.new(content)
    model, layers, moments = bytearray(first), [], []
    left: set[int] = set()  # pages that were written and not rehomed
    for number, (scattered, runs, how, limit) in enumerate(steps):
        writes = spread(scattered, runs)
        child(write=writes, read=True)
        before = bytes(model)
        fill(model, writes)
        left |= set(writes)
        layer = tmp_path / f"layer-{number}"
        stats, written = capture(child, layer, content, **how)
        assert pages_of(written) == sorted(left)
        changed = sum(model[n * PAGE : (n + 1) * PAGE] != before[n * PAGE : (n + 1) * PAGE] for n in writes)
        assert stats["stored_pages"] + stats["zero_pages"] == changed
        layers.append(layer)
        moments.append(bytes(model))
        content = memory_map(SIZE, base if with_base else None, layers, zero, limit=None)
        assert content is not None
        extents = memory.home(written, content.extents, limit)
        home = MemoryMap(SIZE, content.files, extents)
        assert home.count <= limit
        child(map=places(home))
        moved = {n for at, length, *_ in records(extents) for n in range(at // PAGE, (at + length) // PAGE)}
        assert moved <= left
        left -= moved
        if limit == 10_000 and with_base:
            assert not left
        assert memory.written_bytes(child.pid, child.regions, SIZE) == len(left) * PAGE
        assert child.read() == model
    for count, moment in enumerate(moments, 1):
        what = memory_map(SIZE, base if with_base else None, layers[:count], zero)
        child.new(what)
        assert child.read() == moment
        below = bytes(first)
        for layer in layers[:count]:
            below = independent_read(layer.read_bytes(), below)
        assert below == moment


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
            stats, written = memory.capture(
                os.getpid(), [(address, 0, size)], size, [], b"", layer.fileno(), threads=2, scan_by_ioctl=ioctl
            )
    pages = [
        n for s in Layer(tmp_path / "layer").segments() for n in range(s.offset // PAGE, (s.offset + s.length) // PAGE)
    ]
    assert sorted(dirty) == pages == pages_of(written)
    assert stats["dirty_pages"] == stats["stored_pages"] == len(dirty)


@pytest.mark.parametrize("ioctl", [True, False])
def test_large_memory_is_scanned_in_parts(tmp_path, ioctl):
    """By several threads; runs go on over the borders of the parts (64 MiB)."""
    size, part = 200 << 20, (64 << 20) // PAGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as mapping, (tmp_path / "layer").open("w+b") as layer:
        dirty = [0, *range(part - 300, part + 300), 2 * part - 1, 2 * part, size // PAGE - 1]
        for number in dirty:
            mapping[number * PAGE] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        stats, written = memory.capture(
            os.getpid(), [(address, 0, size)], size, [], b"", layer.fileno(), threads=4, scan_by_ioctl=ioctl
        )
    assert pages_of(written) == dirty
    assert len(written) // 16 == 4
    assert stats["stored_pages"] == len(dirty)


def test_longest_extents_are_rehomed_first(child, tmp_path):
    base = tmp_path / "base"
    base.write_bytes(page(9) * PAGES)
    content = MemoryMap.whole(base, SIZE)
    lengths = {0: 1, 10: 5, 100: 2, 200: 7, 300: 1}
    runs = b"".join(struct.pack("=QQ", at * PAGE, count * PAGE) for at, count in lengths.items())
    assert [e[:2] for e in records(memory.home(runs, content.extents, 2))] == [
        (10 * PAGE, 5 * PAGE), (200 * PAGE, 7 * PAGE),
    ]  # fmt: skip
    assert len(records(memory.home(runs, content.extents, 99))) == 5
    assert memory.home(runs, content.extents, 0) == b""
    assert memory.home(runs, b"", 9) == memory.home(b"", content.extents, 9) == b""
    with pytest.raises(ValueError, match="records"):
        memory.home(runs[:-1], content.extents, 9)
    with pytest.raises(ValueError, match="records"):
        memory.home(runs, content.extents[:-1], 9)


def test_mapped_pages_are_found(child, tmp_path):
    base = tmp_path / "base"
    base.write_bytes(page(9) * PAGES)
    child.new(MemoryMap.whole(base, SIZE), write={5: 1, 600: 2})
    assert memory.pages(child.pid, child.regions, SIZE, written=True) == [(5 * PAGE, PAGE), (600 * PAGE, PAGE)]
    child(read=True)
    for ioctl in (True, False):
        found = memory.pages(child.pid, child.regions, SIZE, written=False, scan_by_ioctl=ioctl)
        assert sum(length for _, length in found) == SIZE


def test_memory_that_became_zero_takes_no_space(child, tmp_path):
    """Also where pages are read straight into room that was made for them."""
    base = tmp_path / "base"
    base.write_bytes(page(9) * PAGES)
    child.new(MemoryMap.whole(base, SIZE), write=dict.fromkeys(range(PAGES), 0) | {3: 1, 500: 1})
    stats, _ = capture(child, tmp_path / "layer", MemoryMap.whole(base, SIZE), room=2 * SIZE)
    assert (stats["stored_pages"], stats["zero_pages"]) == (2, PAGES - 2)
    assert (tmp_path / "layer").stat().st_blocks * 512 <= 16 * PAGE


E = MemoryExtent
HOSTILE = {
    "odd place": ([E(1, PAGE, 0, 0)], "extent 0: not made of whole pages"),
    "odd length": ([E(0, PAGE + 512, 0, 0)], "extent 0: not made of whole pages"),
    "odd file place": ([E(0, PAGE, 0, 512)], "extent 0: not made of whole pages"),
    "empty": ([E(0, 0, 0, 0)], "extent 0: not made of whole pages"),
    "overlap": ([E(0, 2 * PAGE, 0, 0), E(PAGE, PAGE, 0, 0)], "extent 1: overlaps"),
    "disorder": ([E(PAGE, PAGE, 0, 0), E(0, PAGE, 0, 0)], "extent 1: overlaps"),
    "beyond memory": ([E(SIZE - PAGE, 2 * PAGE, 0, 0)], "extent 0: beyond the memory"),
    "far beyond memory": ([E((1 << 64) - PAGE, PAGE, 0, 0)], "extent 0: beyond the memory"),
    "no file": ([E(0, PAGE, 1, 0)], "extent 0: no such file"),
    "beyond file": ([E(0, 2 * PAGE, 0, 3 * PAGE)], "extent 0: beyond the end of its file"),
    "far beyond file": ([E(0, PAGE, 0, (1 << 64) - PAGE)], "extent 0: beyond the end of its file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parent_is_refused(child, tmp_path, name):
    extents, text = HOSTILE[name]
    base = tmp_path / "base"
    base.write_bytes(page(9) * 4)
    child.new(NOTHING, write={1: 1})
    with pytest.raises(memory.ParentError, match=f"^parent {text}"):
        capture(child, tmp_path / "layer", MemoryMap.of(SIZE, (base,), extents))


def test_parent_that_is_not_in_the_page_cache_is_not_waited_for(child, tmp_path):
    """What is not known to be equal is stored; holes are known without reading."""
    base = tmp_path / "base"
    with base.open("wb") as file:
        os.pwrite(file.fileno(), page(9) * (PAGES // 2), 0)
        os.ftruncate(file.fileno(), SIZE)
        os.fsync(file.fileno())
    parent = MemoryMap.whole(base, SIZE)
    child.new(NOTHING, write={200: 9, 300: 0, 600: 0, 601: 1})
    with base.open("rb") as file:
        for _ in range(20):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if any(incore(file.fileno())):
                pytest.skip("this file system keeps the pages of files")
            stats, _ = capture(child, tmp_path / "layer", parent)
            found = stats["stored_pages"], stats["zero_pages"], stats["equal_pages"]
            if found == (2, 1, 1):
                break
            # A read with RWF_NOWAIT begins to fill the page cache, and a quick disk has done so at once.
            assert found == (1, 1, 2)
        else:
            pytest.fail("it waits for the disk")
    base.read_bytes()
    stats, _ = capture(child, tmp_path / "layer", parent)
    assert (stats["stored_pages"], stats["zero_pages"], stats["equal_pages"]) == (1, 1, 2)


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
        lambda: memory.capture(os.getpid(), regions, size, [], b"", 1),
        lambda: memory.pages(os.getpid(), regions, size, written=True),
        lambda: memory.written_bytes(os.getpid(), regions, size),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_bad_arguments_are_refused(tmp_path):
    region = [(PAGE, 0, PAGE)]
    for threads in (0, 17):
        with pytest.raises(ValueError, match="threads"):
            memory.capture(os.getpid(), region, PAGE, [], b"", 1, threads=threads)
        with pytest.raises(ValueError, match="threads"):
            memory.Room(1, PAGE, threads=threads)
    with pytest.raises(ValueError, match="UUID"):
        memory.capture(os.getpid(), region, PAGE, [], b"", 1, uuid="short")
    with pytest.raises(ValueError, match="records"):
        memory.capture(os.getpid(), region, PAGE, [], bytes(31), 1)
    with pytest.raises(OSError, match="parent file 0: Bad file descriptor"):
        memory.capture(os.getpid(), region, PAGE, [12345], b"", 1)


def test_process_that_dies_and_mapping_that_goes(tmp_path):
    child = Child()
    try:
        child.new(NOTHING, write={n: random.randrange(256) for n in range(PAGES)})
        with pytest.raises(OSError, match=r"PAGEMAP_SCAN|read pagemap"):
            memory.capture(child.pid, [(1 << 63, 0, SIZE)], SIZE, [], b"", 1)
    finally:
        child.end()
    with pytest.raises(OSError, match=r"No such (file|process)"):
        capture(child, tmp_path / "layer")


def test_full_disk_is_an_error(child, tmp_path):
    child.new(NOTHING, write={7: 7})
    fd = os.open("/dev/full", os.O_RDWR | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="No space"):
            memory.capture(child.pid, child.regions, SIZE, [], b"", fd)
    finally:
        os.close(fd)


def test_room_that_cannot_be_had_is_an_error(tmp_path):
    """Before anything is captured. (A limit stands in for a full disk.)"""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with (tmp_path / "layer").open("w+b") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, old[1]))
        try:
            with pytest.raises(OSError, match="make room for the layer"):
                memory.Room(file.fileno(), 2 * SIZE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
        room = memory.Room(file.fileno(), SIZE)
        assert room.length == SIZE + PAGE
        room.close()
        assert room.length == 0
        room.close()


def test_reap_of_a_stranger_is_none():
    pidfd = os.pidfd_open(1)
    try:
        assert reap(pidfd) is None
    finally:
        os.close(pidfd)
