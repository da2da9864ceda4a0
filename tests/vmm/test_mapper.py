"""The mapper in a process that is not QEMU: what it maps, and what it refuses."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm import mapper, qmp
from aenv.vmm.base import MAX_EXTENTS, PAGE, MemoryExtent, MemoryMap
from tests.processes import open_files

RAM = 256 * PAGE
HERE = Path(__file__).parent
# A process with some memory, which tells where it lies, and its environment, and then shows pages of it.
SUBJECT = f"""
import ctypes, mmap, os, sys, threading
ram = mmap.mmap(-1, {RAM}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(ctypes.addressof(ctypes.c_char.from_buffer(ram)), "AENV_MAPPER" in os.environ, "LD_PRELOAD" in os.environ,
      flush=True)
for line in sys.stdin:
    offset, length = map(int, line.split())
    print(ram[offset:offset + length].hex(), flush=True)
"""


class Subject:
    """A process with the mapper in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with qmp.bind(folder, mapper.SOCKET_NAME, socket.SOCK_SEQPACKET) as listener, mapper.LIBRARY.open() as library:
            inherited = (listener.fileno(), library.fileno())
            environment = {
                **os.environ,
                "LD_PRELOAD": f"/proc/self/fd/{inherited[1]}",
                mapper.VARIABLE: "{}:{}".format(*inherited),
            }
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUBJECT],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=inherited, env=environment,
            )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self._ask, self._answers = self.process.stdin, self.process.stdout
        address, *self.variables = self._answers.readline().split()
        self.ram = int(address)
        self.mapper = mapper.Mapper(folder)

    def read(self, offset: int = 0, length: int = RAM) -> bytes:
        print(offset, length, file=self._ask, flush=True)
        return bytes.fromhex(self._answers.readline())

    def files(self) -> int:
        """Descriptors, other than sockets, that are open in it when it has done with all earlier connections."""
        self.raw(b"x")
        return sum(not link.startswith("socket:") for link in open_files(self.process.pid).values())

    async def tell(self) -> None:
        await self.mapper.tell_ram(self.ram, RAM)

    def raw(self, request: bytes, fds: list[int] | None = None) -> tuple[int, int, int]:
        """Send anything; (step, errno, done) of the answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(self.folder / mapper.SOCKET_NAME))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            client.sendmsg([request], rights)
            answer = client.recv(100)
            assert len(answer) == mapper.ANSWER.size
            _, _, step, error, _, done, _ = mapper.ANSWER.unpack(answer)
            return step, error, done

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    (tmp_path / "run").mkdir()
    one = Subject(tmp_path / "run")
    with contextlib.closing(one):
        yield one


def noise(path: Path, size: int, seed: int) -> Path:
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


@contextlib.contextmanager
def opened(*paths: Path, flags: int = os.O_RDONLY) -> Iterator[list[int]]:
    fds = [os.open(path, flags) for path in paths]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def map_of(*extents: tuple[float, float, int, float]) -> MemoryMap:
    """Extents in pages: guest, length, file, file offset."""
    records = (MemoryExtent(int(g * PAGE), int(n * PAGE), f, int(o * PAGE)) for g, n, f, o in extents)
    return MemoryMap.of(RAM, (), records)


def test_nothing_is_inherited_from_the_environment(subject: Subject):
    assert subject.variables == ["False", "False"]
    assert not [name for name in open_files(subject.process.pid).values() if "aenv-mapper" in name]


def test_process_that_does_not_ask_for_it_is_left_alone():
    environment = {"LD_PRELOAD": str(mapper.LIBRARY), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["/bin/cat", "/proc/self/status"], env=environment, capture_output=True, text=True, check=True
    )
    assert "Threads:\t1\n" in done.stdout


@pytest.mark.parametrize("value", ["", "x", "3", "3:", "0:1"])
def test_bad_variable_ends_the_process(value: str):
    environment = {"LD_PRELOAD": str(mapper.LIBRARY), mapper.VARIABLE: value}
    done = subprocess.run(
        ["/bin/cat"], env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert done.stderr.startswith("aenv-mapper: ")


def test_memory_becomes_what_the_map_says(subject: Subject, tmp_path: Path):
    base, layer = noise(tmp_path / "base", RAM, 1), noise(tmp_path / "layer", 100 * PAGE, 2)
    expected = bytearray(base.read_bytes())

    async def main() -> None:
        await subject.tell()
        with opened(base) as files:
            await subject.mapper.map(files, MemoryMap.whole(base, RAM).extents, 1)
        assert subject.read() == expected
        extents = [(guest, 1, 1, guest // 3) for guest in range(0, 256, 3)]
        with opened(base, layer) as files:
            await subject.mapper.map(files, map_of(*extents).extents, len(extents))
        for guest, _, _, offset in extents:
            expected[guest * PAGE : (guest + 1) * PAGE] = layer.read_bytes()[offset * PAGE : (offset + 1) * PAGE]
        assert subject.read() == expected
        await subject.mapper.map([], b"", 0)
        await subject.mapper.populate([(0, RAM)])
        await subject.mapper.populate([])

    before = subject.files()
    asyncio.run(main())
    assert subject.read() == expected
    assert subject.files() == before


def test_more_files_than_one_message_holds(subject: Subject, tmp_path: Path):
    count = 512  # the limit
    file = noise(tmp_path / "file", PAGE * 256, 3)

    async def main() -> None:
        await subject.tell()
        extents = map_of(*((page, 1, 2 * page + 1, page) for page in range(256)))
        with opened(*[file] * count) as files:
            await subject.mapper.map(files, extents.extents, extents.count)
            with pytest.raises(VmmError, match="files of entry"):
                await subject.mapper.map([*files, files[0]], extents.extents, extents.count)

    before = subject.files()
    asyncio.run(main())
    assert subject.read() == file.read_bytes()
    assert subject.files() == before


@pytest.mark.parametrize(
    ("extents", "field"),
    [
        ([(256, 1, 0, 0)], "length of entry 0"),
        ([(257, 1, 0, 0)], "guest_offset of entry 0"),
        ([(0, 1, 0, 0), (255, 2, 0, 0)], "length of entry 1"),
        ([(0, 0, 0, 0)], "length of entry 0"),
        ([(0, 2, 0, 0), (1, 1, 0, 0)], "guest_offset of entry 1"),
        ([(5, 1, 0, 0), (3, 1, 0, 0)], "guest_offset of entry 1"),
        ([(0, 1, 1, 0)], "file index of entry 0"),
        ([(0, 1, 0, 8)], "file_offset of entry 0"),
        ([(0, 2, 0, 7)], "file_offset of entry 0"),
        ([(0, 1, 0, 1 << 51)], "file_offset of entry 0"),
        ([(1 << 51, 1, 0, 0)], "guest_offset of entry 0"),
        ([(0, (1 << 52) - 1, 0, 0)], "length of entry 0"),
        ([(1, (1 << 52) - 1, 0, 0)], "length of entry 0"),
        ([(0, 0.5, 0, 0)], "length of entry 0"),
        ([(0.5, 1, 0, 0)], "guest_offset of entry 0"),
        ([(0, 1, 0, 0.5)], "file_offset of entry 0"),
    ],
)
def test_bad_extent_is_named_and_nothing_is_mapped(subject: Subject, tmp_path: Path, extents, field: str):
    file = noise(tmp_path / "file", 8 * PAGE, 4)
    packed = map_of(*extents)

    async def main() -> None:
        await subject.tell()
        with opened(file) as files, pytest.raises(VmmError, match=field):
            await subject.mapper.map(files, packed.extents, packed.count)

    asyncio.run(main())
    assert subject.read() == bytes(RAM)


def test_files_that_may_be_written_and_things_that_are_no_files_are_refused(subject: Subject, tmp_path: Path):
    file = noise(tmp_path / "file", RAM, 5)
    whole = MemoryMap.whole(file, RAM)

    async def attempt(files: list[int]) -> None:
        with pytest.raises(VmmError, match="file of entry"):
            await subject.mapper.map(files, whole.extents, 1)

    async def main() -> None:
        await subject.tell()
        for path, flags in (
            (file, os.O_RDWR), (file, os.O_WRONLY), (file, os.O_PATH), (tmp_path, os.O_RDONLY),
            (Path("/dev/null"), os.O_RDONLY),
        ):  # fmt: skip
            with opened(path, flags=flags) as files:
                await attempt(files)
                with opened(file) as good:
                    await attempt([*good, *files])
        pipe = os.pipe()
        await attempt([pipe[0]])
        for fd in pipe:
            os.close(fd)

    before = subject.files()
    asyncio.run(main())
    assert subject.read() == bytes(RAM)
    assert subject.files() == before


def test_memory_is_told_once_and_must_be_there(subject: Subject):
    async def refused(address: int, length: int, why: str) -> None:
        with pytest.raises(VmmError, match=why):
            await subject.mapper.tell_ram(address, length)

    async def main() -> None:
        with pytest.raises(VmmError, match="ram of entry 0: No such device"):
            await subject.mapper.populate([(0, PAGE)])
        for address, length in ((0, RAM), (subject.ram + 1, RAM), (subject.ram, 0), (subject.ram, RAM + 1)):
            await refused(address, length, "refused ram")
        await refused((1 << 64) - PAGE, 2 * PAGE, "Invalid argument")
        await refused(subject.ram, 1 << 46, "Cannot allocate memory")
        await subject.tell()
        await subject.tell()
        await refused(subject.ram, RAM - PAGE, "File exists")

    asyncio.run(main())


def test_bad_requests_are_refused(subject: Subject, tmp_path: Path):
    good = {
        "magic": mapper.MAGIC,
        "version": 1,
        "kind": mapper.KIND_MAP,
        "count": 1,
        "files": 1,
        "address": 0,
        "length": 0,
    }
    table = tmp_path / "table"
    table.write_bytes(MemoryMap.whole(table, RAM).extents)
    file = noise(tmp_path / "file", RAM, 6)

    def step(fds: list[int], **changes: int) -> str:
        number, error, done = subject.raw(mapper.REQUEST.pack(*(good | changes).values()), fds)
        assert done == (0 if error else 1)
        return mapper.STEPS[number] if error else "none"

    asyncio.run(subject.tell())
    before = subject.files()
    with opened(table, file) as fds:
        assert step(fds, magic=1) == "magic"
        assert step(fds, version=2) == "version"
        for kind in (0, 5, 65535):
            assert step(fds, kind=kind) == "kind"
        for count in (MAX_EXTENTS + 1, (1 << 32) - 1):
            assert step(fds, count=count) == "count"
        assert step(fds, kind=mapper.KIND_OPEN) == "count"
        for files in (0, 2, 254, (1 << 32) - 1):
            assert step(fds, files=files) == "files"
        assert step([], files=0) == "files"
        assert step(fds, kind=mapper.KIND_POPULATE) == "files"
        assert step(fds, kind=mapper.KIND_RAM, count=0) == "files"
        assert step(fds, address=PAGE) == "ram"
        assert step(fds, count=2) == "table"  # it is shorter
        assert step(fds[::-1], count=1) in ("guest_offset", "length", "file")  # noise for a table
        whole = mapper.REQUEST.pack(*good.values())
        for length in (1, 16, 31):
            assert mapper.STEPS[subject.raw(whole[:length], fds)[0]] == "length"
        assert mapper.STEPS[subject.raw(whole + b"x", fds)[0]] == "length"
        assert subject.read() == bytes(RAM)
        assert subject.files() == before
        assert step(fds) == "none"
    assert subject.read() == file.read_bytes()


def test_files_do_not_outlive_their_connection(subject: Subject, tmp_path: Path):
    """A client that dies in the middle leaves nothing, and the next one is served."""
    file = noise(tmp_path / "file", RAM, 7)

    async def main() -> None:
        await subject.tell()
        with opened(file) as files:
            request = mapper.REQUEST.pack(mapper.MAGIC, 1, mapper.KIND_OPEN, 0, 1, 0, 0)
            assert subject.raw(request, files) == (0, 0, 0)
            with pytest.raises(VmmError, match="file index"):
                await subject.mapper.map([], MemoryMap.whole(file, RAM).extents, 1)

    before = subject.files()
    asyncio.run(main())
    assert subject.files() == before
    assert subject.read() == bytes(RAM)


@pytest.mark.root
def test_another_user_is_not_served(subject: Subject, tmp_path: Path):
    for folder in (subject.folder, *subject.folder.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    path = subject.folder / mapper.SOCKET_NAME
    path.chmod(0o777)
    program = (
        "import os, socket, sys\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"client.connect({str(path)!r})\n"
        "try:\n"
        f"    client.send(bytes({mapper.REQUEST.size}))\n"
        "    print(len(client.recv(100)))\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) in (0, errno.EPIPE, errno.ECONNRESET)
    asyncio.run(subject.tell())


def test_random_requests_under_sanitizers(tmp_path: Path):
    """A model of the memory is kept beside it; see mapper_fuzz.c."""
    program = tmp_path / "fuzz"
    source = HERE.parents[1] / "mapper"
    subprocess.run(
        ["cc", "-g", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", "-Wl,--wrap=mmap", f"-I{source}", "-o", str(program), str(HERE / "mapper_fuzz.c"),
         str(source / "request.c")],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program, "10000"], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    mapped, refused = (int(word) for word in done.stdout.split())
    assert mapped > 1000
    assert refused > 1000
