"""The block server as a process: control socket, FUSE files, kills."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import AenvError, ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.snapshot.compaction import compact
from ublk.client import BlockClient
from ublk.protocol import MAX_FRAME, VERSION

pytestmark = pytest.mark.root
SIZE = 8 << 20
libc = ctypes.CDLL(None, use_errno=True)


class Blockd:
    """A server process in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "run/control"
        self.images = folder / "images"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "ublk", "--socket", self.socket, "--mount", self.images]
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert self.process.stderr is not None
        text = b""
        while b"serving" not in text:
            line = await self.process.stderr.readline()
            assert line, text.decode()
            text += line

    async def connect(self) -> BlockClient:
        return await BlockClient.connect(self.socket)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()
        await asyncio.to_thread(subprocess.run, ["umount", "-l", self.images], check=False, capture_output=True)


Body = Callable[[Blockd, BlockClient], Awaitable[None]]


def run(folder: Path, body: Body) -> None:
    async def main() -> None:
        server = Blockd(folder)
        try:
            await server.start()
            async with await server.connect() as client:
                await body(server, client)
        finally:
            await server.end()

    asyncio.run(main())


def sealed(path: Path, data: bytes, size: int = SIZE) -> Path:
    with path.open("wb") as file:
        writer = Writer(file.fileno(), size, form="lz4")
        writer.add(0, data)
        writer.finish()
    return path


@contextlib.asynccontextmanager
async def disk(server: Blockd, client: BlockClient, name: str = "disk") -> AsyncIterator[Path]:
    data, index = server.folder / f"{name}.data", server.folder / f"{name}.index"
    await client.create(data, index, SIZE)
    found = await client.open(name, data=data, index=index)
    yield Path(found["path"])
    await client.close_image(name)


def test_file_is_a_disk(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        generator = random.Random(1)
        model = bytearray(SIZE)
        async with disk(server, client) as path:
            assert path.stat().st_size == SIZE
            fd = os.open(path, os.O_RDWR)
            for _ in range(200):
                offset = generator.randrange(SIZE)
                length = min(generator.choice([1, 511, 512, 4096, 70000]), SIZE - offset)
                if generator.random() < 0.2:
                    mode = generator.choice([3, 0x11])  # PUNCH_HOLE or ZERO_RANGE, with KEEP_SIZE
                    assert libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) == 0
                    model[offset : offset + length] = bytes(length)
                else:
                    data = generator.randbytes(length)
                    assert os.pwrite(fd, data, offset) == length
                    model[offset : offset + length] = data
            os.fsync(fd)
            assert os.pread(fd, SIZE, 0) == model
            assert os.pread(fd, 4096, SIZE - 100) == model[-100:]
            assert os.pread(fd, 4096, SIZE) == b""
            with pytest.raises(OSError, match="No space left"):
                os.pwrite(fd, b"xy", SIZE - 1)
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(fd, SIZE // 2)
            os.close(fd)
        await client.seal(server.folder / "disk.data", server.folder / "disk.index")
        assert Stack([Layer(server.folder / "disk.data")]).read(0, SIZE) == model

    run(tmp_path, body)


def test_direct_io_and_several_writers(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            buffer = mmap.mmap(-1, 65536)
            buffer[:] = bytes(range(256)) * 256

            def write(number: int) -> None:
                fd = os.open(path, os.O_RDWR | os.O_DIRECT)
                for i in range(16):
                    os.pwritev(fd, [buffer], (number * 16 + i) * 65536)
                os.close(fd)

            await asyncio.gather(*(asyncio.to_thread(write, n) for n in range(4)))
            expected = bytes(range(256)) * 256 * 64 + bytes(SIZE - 64 * 65536)
            assert await asyncio.to_thread(path.read_bytes) == expected

    run(tmp_path, body)


def test_read_only_image_opens_for_writing_and_refuses_every_change(tmp_path: Path) -> None:
    """QEMU opens memory images read-write even for private mappings, and would punch holes into them."""

    async def body(server: Blockd, client: BlockClient) -> None:
        content = random.Random(2).randbytes(1 << 20)
        layer = sealed(tmp_path / "layer", content)
        found = await client.open("memory", [layer], cached=True)
        assert found["read_only"]
        fd = os.open(found["path"], os.O_RDWR)
        private = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        private[:4096] = b"p" * 4096
        assert private[4096 : 1 << 20] == content[4096:]
        with pytest.raises(OSError, match="Read-only"):
            os.pwrite(fd, b"x" * 4096, 0)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        for mode in (0, 1, 3, 0x10, 0x11, 8, 0x20):
            assert libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)) == -1
        with pytest.raises(OSError, match="not permitted"):
            os.open(found["path"], os.O_RDWR | os.O_TRUNC)
        with pytest.raises(PermissionError):
            os.fchmod(fd, 0o777)
        assert os.pread(fd, 1 << 20, 0) == content
        private.close()
        os.close(fd)
        await client.close_image("memory")

    run(tmp_path, body)


def test_pages_of_a_memory_image_are_read_once_and_shared(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        content = random.Random(3).randbytes(SIZE)
        found = await client.open("memory", [sealed(tmp_path / "layer", content)], cached=True)

        def touch() -> bytes:
            fd = os.open(found["path"], os.O_RDWR)
            private = mmap.mmap(fd, SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(fd)
            return bytes(private)

        assert await asyncio.to_thread(touch) == content
        once = (await client.stats("memory"))["read_bytes"]
        assert await asyncio.to_thread(touch) == content
        assert (await client.stats("memory"))["read_bytes"] == once
        assert once <= SIZE + (1 << 20)

    run(tmp_path, body)


def test_mode_and_owner_are_enforced_by_the_kernel(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        layer = sealed(tmp_path / "layer", b"x" * 4096)
        mine = await client.open("mine", [layer], uid=12345, gid=12345, mode=0o600)
        root = await client.open("root", [layer])
        for folder in [server.images, *server.images.parents]:
            if folder.owner() == "root" and folder.stat().st_mode & 0o001 == 0 and folder != Path("/"):
                folder.chmod(folder.stat().st_mode | 0o011)
        script = "import os, sys; os.setgid(12345); os.setuid(12345); os.open(sys.argv[1], os.O_RDWR)"
        for path, expected in ((mine["path"], b""), (root["path"], b"PermissionError")):
            command = [sys.executable, "-c", script, path]
            done = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True)
            assert expected in done.stderr
            assert (done.returncode == 0) == (expected == b"")

    run(tmp_path, body)


def test_restack_of_a_disk_in_use(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            fd = os.open(path, os.O_RDWR)
            model = bytearray(SIZE)
            stop = asyncio.Event()

            async def write() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    offset = number % 2000 * 4096
                    data = number.to_bytes(8, "little") * 512
                    await asyncio.to_thread(os.pwrite, fd, data, offset)
                    model[offset : offset + 4096] = data

            writer = asyncio.create_task(write())
            layers: list[Path] = []
            for i in range(10):
                layers.append(await client.restack("disk", tmp_path / f"{i}.data", tmp_path / f"{i}.index"))
                before = await client.open(f"child{i}", layers)
                assert before["read_only"]
                await client.close_image(f"child{i}")
            stop.set()
            await writer
            assert await asyncio.to_thread(os.pread, fd, SIZE, 0) == model
            listed = (await client.list_images())[0]
            assert listed["layers"] == [str(p) for p in layers]
            assert listed["opens"] == 1
            for i, layer in enumerate(layers):
                await client.seal(layer, tmp_path / ("disk.index" if i == 0 else f"{i - 1}.index"))
            os.fsync(fd)
            os.close(fd)
        files = [Layer(layer) for layer in layers]
        assert Stack([*files, Layer(tmp_path / "9.data", tmp_path / "9.index")]).read(0, SIZE) == model

    run(tmp_path, body)


def test_merged_layers_take_the_place_of_those_of_a_live_disk(tmp_path: Path) -> None:
    """Again and again, under a writer: a disk of any number of restacks never has many layers."""

    async def body(server: Blockd, client: BlockClient) -> None:
        data, index = server.folder / "disk.data", server.folder / "disk.index"
        await client.create(data, index, SIZE)
        found = await client.open("disk", data=data, index=index)
        layers: list[Path] = []
        model = bytearray(SIZE)
        fd = os.open(found["path"], os.O_RDWR)
        try:
            for round_number in range(1, 31):
                for page in random.Random(round_number).sample(range(SIZE // 4096), 20):
                    content = (round_number * 1000 + page).to_bytes(8, "little") * 512
                    await asyncio.to_thread(os.pwrite, fd, content, page * 4096)
                    model[page * 4096 : page * 4096 + 4096] = content
                upper = tmp_path / f"{round_number}.data", tmp_path / f"{round_number}.index"
                sealed_now = await client.restack("disk", *upper)
                await client.seal(sealed_now, index)
                index, layers = upper[1], [*layers, sealed_now]
                if len(layers) == 5:
                    merged = tmp_path / f"merged{round_number}"
                    await compact(layers, merged, below=False)
                    await client.replace("disk", [merged])
                    for layer in layers:
                        layer.unlink()
                    layers = [merged]
                    assert (await client.list_images())[0]["layers"] == [str(merged)]
                assert await asyncio.to_thread(os.pread, fd, SIZE, 0) == model
        finally:
            os.close(fd)
        with pytest.raises(ConflictError):
            await client.replace("disk", [tmp_path / "30.data"])  # its own writable layer
        with pytest.raises(NotFoundError):
            await client.replace("disk", [tmp_path / "nothing"])
        with pytest.raises(InvalidInputError, match="layers"):
            await client.replace("disk", [])
        await client.open("read-only", layers)
        with pytest.raises(ConflictError):
            await client.replace("read-only", layers)
        assert await asyncio.to_thread(Path(found["path"]).read_bytes) == model

    run(tmp_path, body)


def test_images_of_one_stack_share_its_index(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        layers = [sealed(tmp_path / f"layer{i}", bytes([i + 1]) * 8192) for i in range(3)]
        for i in range(5):
            await client.open(f"image{i}", layers)
        totals = await client.stats()
        assert (totals["images"], totals["stacks"], totals["segments"]) == (5, 1, 1)
        await client.open("longer", [*layers, sealed(tmp_path / "top", b"t" * 4096)])
        assert (await client.stats())["stacks"] == 2
        for i in range(5):
            await client.close_image(f"image{i}")
        await client.close_image("longer")
        assert (await client.stats())["stacks"] == 0

    run(tmp_path, body)


def test_kill_of_the_server_loses_no_acknowledged_write(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        data, index = tmp_path / "d", tmp_path / "i"
        await client.create(data, index, SIZE)
        model = bytearray(SIZE)
        generator = random.Random(4)
        found = await client.open("disk", data=data, index=index)
        for _ in range(4):
            fd = os.open(found["path"], os.O_RDWR)
            assert os.pread(fd, SIZE, 0) == model
            for _ in range(50):
                offset = generator.randrange(SIZE // 4096) * 4096
                block = generator.randbytes(4096)
                os.pwrite(fd, block, offset)
                model[offset : offset + 4096] = block
            await server.kill()
            with pytest.raises(OSError, match=r"not connected|Software caused|Input/output"):
                os.pwrite(fd, b"x" * 4096, 0)
            os.close(fd)
            await client.close()
            await server.start()
            client = await server.connect()
            assert [i["data"] for i in await client.list_images()] == [str(data)]
        await client.close()

    run(tmp_path, body)


def test_busy_image_and_busy_server_are_not_ended(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            fd = os.open(path, os.O_RDWR)
            with pytest.raises(ConflictError, match="in use"):
                await client.close_image("disk")
            with pytest.raises(ConflictError, match="in use"):
                await client.shutdown()
            os.pwrite(fd, b"x" * 4096, 0)
            os.close(fd)
        await client.shutdown()
        assert server.process is not None
        assert await server.process.wait() == 0
        assert not server.socket.exists()
        assert not os.path.ismount(server.images)
        with pytest.raises(UnavailableError):
            await client.list_images()

    run(tmp_path, body)


def test_second_server_on_the_same_socket_is_refused(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        command = [sys.executable, "-m", "ublk", "--socket", server.socket, "--mount", tmp_path / "other"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "runs there already" in done.stderr
        assert await client.list_images() == []

    run(tmp_path, body)


def test_resize_is_seen_by_those_who_stat(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            assert path.stat().st_size == SIZE
            await client.resize("disk", 2 * SIZE)
            assert path.stat().st_size == 2 * SIZE
            with path.open("r+b", buffering=0) as file:
                file.seek(2 * SIZE - 512)
                file.write(b"e" * 512)
            with pytest.raises(InvalidInputError):
                await client.resize("disk", 1000)

    run(tmp_path, body)


def test_wrong_requests_name_what_is_wrong(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        layer = sealed(tmp_path / "layer", b"x" * 4096)
        broken = tmp_path / "broken"
        broken.write_bytes(layer.read_bytes()[:-1])
        with pytest.raises(InvalidInputError, match="zfile"):
            await client.open("a", [broken])
        with pytest.raises(NotFoundError):
            await client.open("a", [tmp_path / "missing"])
        with pytest.raises(InvalidInputError, match="absolute"):
            await client.open("a", [Path("layer")])
        for name in ("", ".", "..", "a/b", "x" * 256, "a\0"):
            with pytest.raises(InvalidInputError, match="name"):
                await client.open(name, [layer])
        with pytest.raises(InvalidInputError, match="layers"):
            await client.open("a", [layer] * 256)
        with pytest.raises(InvalidInputError, match="cached"):
            await client.open("a", [layer], data=tmp_path / "d", index=tmp_path / "i", cached=True)
        with pytest.raises(InvalidInputError, match="index"):
            await client.open("a", [layer], data=tmp_path / "d")
        with pytest.raises(InvalidInputError, match="size"):
            await client.create(tmp_path / "d", tmp_path / "i", 5)
        for call in (client.close_image, client.flush, client.stats):
            with pytest.raises(NotFoundError):
                await call("nobody")
        await client.open("a", [layer])
        with pytest.raises(ConflictError, match="open already"):
            await client.open("a", [layer])
        with pytest.raises(ConflictError, match="read-only"):
            await client.restack("a", tmp_path / "d", tmp_path / "i")
        assert not (tmp_path / "d").exists()
        assert [image["image"] for image in await client.list_images()] == ["a"]

    run(tmp_path, body)


async def talk(server: Blockd, *frames: bytes) -> list[Any]:
    reader, writer = await asyncio.open_unix_connection(str(server.socket))
    for frame in frames:
        writer.write(frame)
    writer.write_eof()
    data = await reader.read()
    writer.close()
    replies = []
    while data:
        length = int.from_bytes(data[:4], "little")
        replies.append(msgspec.msgpack.decode(data[4 : 4 + length]))
        data = data[4 + length :]
    return replies


def pack(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


HELLO = pack({"op": "hello", "id": 1, "version": VERSION})


def test_hostile_control_traffic(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        def error_of(replies: list[Any], field: str, number: int | None) -> None:
            assert [(r["id"], r["error"]["field"]) for r in replies if "error" in r] == [(number, field)]

        error_of(await talk(server, pack({"op": "list", "id": 7})), "op", 7)
        error_of(await talk(server, pack({"op": "hello", "id": 7, "version": 99})), "version", 7)
        error_of(await talk(server, (MAX_FRAME + 1).to_bytes(4, "little")), "frame", None)
        error_of(await talk(server, HELLO, b"\1\0\0\0\xc1"), "request", None)
        error_of(await talk(server, HELLO, pack([1, 2])), "request", None)
        error_of(await talk(server, HELLO, pack({"op": "no", "id": 2})), "op", 2)
        error_of(await talk(server, HELLO, pack({"op": "flush", "id": 2})), "request", 2)
        error_of(await talk(server, HELLO, pack({"op": "flush", "id": 2, "image": 5})), "image", 2)
        error_of(await talk(server, HELLO, pack({"op": "list", "id": 2, "more": 5})), "request", 2)
        deep = b"\x91" * 200000
        assert await talk(server, HELLO, len(deep).to_bytes(4, "little") + deep)
        for cut in range(len(HELLO)):
            assert await talk(server, HELLO[:cut]) == []
        generator = random.Random(5)
        for _ in range(100):
            junk = generator.randbytes(generator.randrange(1, 60))
            await talk(server, HELLO, len(junk).to_bytes(4, "little") + junk)
        assert await client.list_images() == []

    run(tmp_path, body)


def test_many_requests_at_a_time_on_one_connection(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        layer = sealed(tmp_path / "layer", b"x" * 4096)
        await asyncio.gather(*(client.open(f"i{n}", [layer]) for n in range(300)))
        assert len(await client.list_images()) == 300
        assert len(os.listdir(server.images)) == 300
        results = await asyncio.gather(*(client.open("i0", [layer]) for _ in range(20)), return_exceptions=True)
        assert all(isinstance(result, AenvError) for result in results)
        await asyncio.gather(*(client.close_image(f"i{n}") for n in range(300)))
        assert os.listdir(server.images) == []

    run(tmp_path, body)


def test_file_system_on_a_disk_passes_fsck(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            for command in (["mkfs.ext4", "-q", "-F", path], ["e2fsck", "-fn", path]):
                await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
            await client.restack("disk", tmp_path / "n.data", tmp_path / "n.index")
            await asyncio.to_thread(subprocess.run, ["e2fsck", "-fn", path], check=True, capture_output=True)

    run(tmp_path, body)


def test_termination_ends_cleanly_with_files_open(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        data, index = tmp_path / "d", tmp_path / "i"
        await client.create(data, index, SIZE)
        found = await client.open("disk", data=data, index=index)
        fd = os.open(found["path"], os.O_RDWR)
        os.pwrite(fd, b"x" * 4096, 0)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert await server.process.wait() == 0
        assert time.monotonic() - started < 60
        os.close(fd)
        assert Stack([Layer(data, index)]).read(0, 4096) == b"x" * 4096

    run(tmp_path, body)
