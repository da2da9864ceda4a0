"""Remote layers in the block server: opened over the control socket, read through FUSE files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from tests.blocks import range_server
from ublk.client import BlockClient
from ublk.ranges import ChunkList, FileSpec, HttpSpec, RemoteSpec
from ublk.trace import Trace

pytestmark = pytest.mark.root
SIZE = 8 << 20
CHUNK = 64 << 10


class Blockd:
    """A server process in a folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.socket = folder / "run/control"
        self.images = folder / "images"
        self.cache = folder / "cache"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [
            sys.executable, "-m", "ublk", "--socket", self.socket, "--mount", self.images, "--cache", self.cache,
            "--chunk-size", str(CHUNK), *self.options,
        ]  # fmt: skip
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert self.process.stderr is not None
        text = b""
        while b"serving" not in text:
            line = await self.process.stderr.readline()
            assert line, text.decode()
            text += line

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()
        await asyncio.to_thread(subprocess.run, ["umount", "-l", self.images], check=False, capture_output=True)


@contextlib.asynccontextmanager
async def blockd(folder: Path, *options: str) -> AsyncIterator[tuple[Blockd, BlockClient]]:
    server = Blockd(folder, *options)
    try:
        await server.start()
        async with await BlockClient.connect(server.socket) as client:
            yield server, client
    finally:
        await server.end()


Body = Callable[[Blockd, BlockClient], Awaitable[None]]


def run(folder: Path, body: Body, *options: str) -> None:
    async def main() -> None:
        async with blockd(folder, *options) as (server, client):
            await body(server, client)

    asyncio.run(main())


def sealed(path: Path, seed: int, **options: Any) -> bytes:
    """A layer's file, which is made here, and what it holds."""
    data = random.Random(seed).randbytes(SIZE // 2)
    with path.open("wb") as file:
        writer = Writer(file.fileno(), SIZE, **options)
        writer.add(0, data[: SIZE // 4])
        writer.add(SIZE // 2, data[SIZE // 4 :])
        writer.finish()
    half = bytes(SIZE // 4)
    return data[: SIZE // 4] + half + data[SIZE // 4 :] + half


def spec(blob: bytes, source: Any, *, chunks: bool = False) -> RemoteSpec:
    listed = None
    if chunks:
        digests = b"".join(hashlib.sha256(blob[at : at + CHUNK]).digest() for at in range(0, len(blob), CHUNK))
        listed = ChunkList(CHUNK, digests)
    return RemoteSpec(source, len(blob), f"sha256:{hashlib.sha256(blob).hexdigest()}", listed)


def read(path: str, length: int = SIZE, offset: int = 0) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("options", [{}, {"form": "lz4"}, {"form": "zstd", "tar": True}, {"tar": True}])
@pytest.mark.parametrize("cached", [False, True])
def test_remote_layer_is_a_layer(tmp_path: Path, options: dict[str, Any], cached: bool) -> None:
    content = sealed(tmp_path / "layer", 1, **options)
    blob = (tmp_path / "layer").read_bytes()

    async def body(server: Blockd, client: BlockClient) -> None:
        with range_server.serve(blob) as (url, behaviour):
            found = await client.open("image", [spec(blob, HttpSpec(url), chunks=True)], cached=cached)
            generator = random.Random(3)
            for _ in range(30):
                at = generator.randrange(SIZE)
                length = generator.randrange(1, 100_000)
                assert await asyncio.to_thread(read, found["path"], length, at) == content[at : at + length]
            assert await asyncio.to_thread(read, found["path"]) == content
            stats, requests = await client.stats("image"), len(behaviour.ranges())
            assert stats["remote_layers"] == 1
            assert stats["cache_misses"] > 0
            assert stats["fetched_bytes"] <= len(blob)
            await client.close_image("image")
            await client.open("again", [spec(blob, HttpSpec(url))], cached=cached)
            assert await asyncio.to_thread(read, str(server.images / "again")) == content
            assert len(behaviour.ranges()) == requests, "all of it was in the cache"
            await client.close_image("again")

    run(tmp_path, body)


def test_stack_of_remote_and_local_layers_under_a_writable_one(tmp_path: Path) -> None:
    sealed(tmp_path / "base", 1, form="lz4")
    with (tmp_path / "middle").open("wb") as file:
        writer = Writer(file.fileno(), SIZE)
        writer.add(4096, b"m" * 8192)
        writer.finish()
    with (tmp_path / "upper").open("wb") as file:
        writer = Writer(file.fileno(), SIZE, form="zstd")
        writer.add(8192, b"u" * 4096)
        writer.finish()
    expected = bytearray(Stack([Layer(tmp_path / n) for n in ("base", "middle", "upper")]).read(0, SIZE))
    base, upper = (tmp_path / "base").read_bytes(), (tmp_path / "upper").read_bytes()

    async def body(server: Blockd, client: BlockClient) -> None:
        with range_server.serve(base) as (url, _):
            layers = [spec(base, HttpSpec(url)), tmp_path / "middle", spec(upper, FileSpec(str(tmp_path / "upper")))]
            await client.create(tmp_path / "d", tmp_path / "i", SIZE)
            found = await client.open("disk", layers, data=tmp_path / "d", index=tmp_path / "i")
            path = found["path"]
            fd = os.open(path, os.O_RDWR)
            await asyncio.to_thread(os.pwrite, fd, b"w" * 700, 1 << 20)
            os.close(fd)
            expected[1 << 20 : (1 << 20) + 700] = b"w" * 700
            assert await asyncio.to_thread(read, path) == bytes(expected)
            described = (await client.list_images())[0]["layers"]
            assert described[0]["source"] == {"kind": "http", "url": url, "credentials": None, "ca": None}
            assert described[1] == str(tmp_path / "middle")
            await client.restack("disk", tmp_path / "d2", tmp_path / "i2")
            assert await asyncio.to_thread(read, path) == bytes(expected)
            await client.close_image("disk")

    run(tmp_path, body)


def test_restarted_server_opens_the_same(tmp_path: Path) -> None:
    content = sealed(tmp_path / "layer", 1)
    blob = (tmp_path / "layer").read_bytes()

    async def main() -> None:
        server = Blockd(tmp_path)
        try:
            with range_server.serve(blob) as (url, behaviour):
                await server.start()
                async with await BlockClient.connect(server.socket) as client:
                    await client.open("image", [spec(blob, HttpSpec(url), chunks=True)])
                    assert await asyncio.to_thread(read, str(server.images / "image"), CHUNK) == content[:CHUNK]
                    # Readers go on before their chunk is in the file.
                    while (stats := (await client.stats())["cache"])["stored_chunks"] < stats["fetched_chunks"]:
                        await asyncio.sleep(0.01)
                await server.kill()
                before = set(behaviour.ranges())
                await server.start()
                async with await BlockClient.connect(server.socket) as client:
                    found = await client.list_images()
                    assert [i["image"] for i in found] == ["image"]
                    # Digests would make the list longer than a frame may be.
                    assert found[0]["layers"][0]["chunks"] == {"size": CHUNK, "digests": None, "path": None}
                    path = str(server.images / "image")
                    assert await asyncio.to_thread(read, path, CHUNK) == content[:CHUNK]
                    assert len(behaviour.ranges()) == len(before), "what the killed one had is used"
                    assert await asyncio.to_thread(read, path) == content
                    stats = (await client.stats())["cache"]
                    assert stats["damaged_chunks"] == 0
        finally:
            await server.end()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": "md5:00"}, "layers.digest"),
        ({"digest": "sha256:" + "0" * 63}, "layers.digest"),
        ({"digest": "sha256:" + "../" * 21 + "0"}, "layers.digest"),
        ({"size": 0}, "layers.size"),
        ({"size": -1}, "layers.size"),
        ({"source": HttpSpec("ftp://127.0.0.1/x")}, "layers.source.url"),
        ({"source": HttpSpec("http://u:p@127.0.0.1/x")}, "layers.source.url"),
        ({"source": HttpSpec("http://127.0.0.1/x", credentials="relative")}, "layers.source.credentials"),
        ({"source": FileSpec("relative")}, "layers.source.path"),
        ({"chunks": ChunkList(CHUNK)}, "layers.chunks"),
        ({"chunks": ChunkList(CHUNK, b"", "/x")}, "layers.chunks"),
        ({"chunks": ChunkList(CHUNK, b"short")}, "layers.chunks"),
        ({"chunks": ChunkList(0, b"")}, "layers.chunks.size"),
        ({"chunks": ChunkList(3 << 20, b"0" * 32)}, "layers.chunks.size"),
    ],
)
def test_bad_layers_are_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        values = {"source": FileSpec("/x"), "size": 3 << 20, "digest": f"sha256:{'0' * 64}", "chunks": None} | change
        with pytest.raises(InvalidInputError) as caught:
            await client.open("image", [RemoteSpec(**values)])
        assert caught.value.field == field
        assert await client.list_images() == []
        assert os.listdir(server.cache) == []

    run(tmp_path, body)


def test_size_that_is_wrong_and_files_that_are_missing(tmp_path: Path) -> None:
    sealed(tmp_path / "layer", 1)
    blob = (tmp_path / "layer").read_bytes()

    async def body(server: Blockd, client: BlockClient) -> None:
        good = spec(blob, FileSpec(str(tmp_path / "layer")))
        for size in (len(blob) - 512, len(blob) + 512):
            with pytest.raises(UnavailableError):
                await client.open("image", [RemoteSpec(good.source, size, good.digest)])
        with pytest.raises(UnavailableError):
            await client.open("image", [RemoteSpec(FileSpec("/no/such"), len(blob), good.digest)])
        chunks = ChunkList(CHUNK, path="/no/such")
        with pytest.raises(NotFoundError):
            await client.open("image", [RemoteSpec(good.source, len(blob), good.digest, chunks)])
        await client.open("image", [good])

    run(tmp_path, body)


def test_server_without_a_cache_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        server = Blockd(tmp_path)
        server.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ublk", "--socket", server.socket, "--mount", server.images,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert server.process.stderr is not None
        try:
            while b"serving" not in await server.process.stderr.readline():
                pass
            async with await BlockClient.connect(server.socket) as client:
                with pytest.raises(UnavailableError, match="--cache"):
                    await client.open("image", [RemoteSpec(FileSpec("/x"), 512, f"sha256:{'0' * 64}")])
                assert (await client.stats())["cache"] is None
        finally:
            await server.end()

    asyncio.run(main())


def test_dead_source_stalls_only_its_readers(tmp_path: Path) -> None:
    """More readers of a silent server than the front end has threads at first; others must not notice."""
    content = sealed(tmp_path / "layer", 1)
    blob = (tmp_path / "layer").read_bytes()
    local = sealed(tmp_path / "local", 2)
    alive = sealed(tmp_path / "alive", 3)
    many = 80

    async def body(server: Blockd, client: BlockClient) -> None:
        hold = threading.Event()
        remote = (tmp_path / "alive").read_bytes()
        with range_server.serve(blob) as (url, behaviour), range_server.serve(remote) as (other, _):
            dead = spec(blob, HttpSpec(url))
            await client.open("dead", [dead])
            await client.open("alive", [spec(remote, HttpSpec(other))])
            await client.open("local", [tmp_path / "local"])
            path = str(server.images / "dead")
            assert await asyncio.to_thread(read, path, 4096) == content[:4096]
            behaviour.hold = hold
            results: list[int] = []

            def stuck(number: int) -> None:
                try:
                    read(path, 512, 2 * CHUNK + number * 4096 * 2)
                    results.append(0)
                except OSError as error:
                    results.append(error.errno)

            threads = [threading.Thread(target=stuck, args=(i,)) for i in range(many)]
            for thread in threads:
                thread.start()
            while (await client.stats())["cache"]["waiting"] < 16:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(read, str(server.images / "local")) == local
            assert await asyncio.to_thread(read, str(server.images / "alive")) == alive
            assert await asyncio.to_thread(read, path, 4096) == content[:4096], "what is local is read still"
            await client.flush("dead")
            assert not results
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert set(results) == {errno.EIO}
            hold.set()
            behaviour.hold = None
            assert await asyncio.to_thread(read, path) == content, "the next read tries again"

    # Longer than the rest of the test takes on a slow machine: the order of events, not the time, is tested.
    run(tmp_path, body, "--remote-wait", "8")


def test_trace_is_recorded_and_prefetched(tmp_path: Path) -> None:
    content = sealed(tmp_path / "layer", 1)
    blob = (tmp_path / "layer").read_bytes()
    places = [3 << 20, 64 << 10, 1 << 20, SIZE // 2 + (1 << 20)]

    async def body(server: Blockd, client: BlockClient) -> None:
        with range_server.serve(blob) as (url, _):
            layer = spec(blob, HttpSpec(url))
            path = str(server.images / "first")
            await client.open("first", [layer], record=100)
            for place in places:
                await asyncio.to_thread(read, path, 4096, place)
            count = await client.trace("first", tmp_path / "trace")
            with pytest.raises(ConflictError):
                await client.trace("first", tmp_path / "trace")
            await client.close_image("first")
            trace = Trace.load(tmp_path / "trace")
            assert len(trace.entries) == count
            assert trace.layers == ((layer.digest, CHUNK),)

    run(tmp_path, body)

    async def second(server: Blockd, client: BlockClient) -> None:
        with range_server.serve(blob) as (url, behaviour):
            await client.open("second", [spec(blob, HttpSpec(url))], prefetch=tmp_path / "trace")
            while (stats := (await client.stats())["cache"])["queued"] + stats["in_flight"]:
                await asyncio.sleep(0.01)
            before = len(behaviour.ranges())
            for place in places:
                found = await asyncio.to_thread(read, str(server.images / "second"), 4096, place)
                assert found == content[place : place + 4096]
            assert len(behaviour.ranges()) == before
            assert stats["prefetched_chunks"] > 0

    (tmp_path / "other").mkdir()
    run(tmp_path / "other", second)


def test_trace_that_is_no_trace_opens_nothing(tmp_path: Path) -> None:
    sealed(tmp_path / "layer", 1)
    (tmp_path / "trace").write_bytes(b"AENVTRC1" + bytes(20))

    async def body(server: Blockd, client: BlockClient) -> None:
        with pytest.raises(InvalidInputError) as caught:
            await client.open("image", [tmp_path / "layer"], prefetch=tmp_path / "trace")
        assert caught.value.field == "trace.crc"
        with pytest.raises(NotFoundError):
            await client.open("image", [tmp_path / "layer"], prefetch=tmp_path / "nothing")
        with pytest.raises(InvalidInputError) as caught:
            await client.open("image", [tmp_path / "layer"], record=-1)
        assert caught.value.field == "record"
        assert await client.list_images() == []

    run(tmp_path, body)


def test_server_killed_in_the_middle_of_fetches_and_evictions(tmp_path: Path) -> None:
    content = sealed(tmp_path / "layer", 1, form="lz4")
    blob = (tmp_path / "layer").read_bytes()

    def read_on(path: str, seed: int, failures: list[int]) -> None:
        """Until the server dies."""
        generator = random.Random(seed)
        with contextlib.suppress(OSError):
            while True:
                at = generator.randrange(SIZE - 5000)
                if read(path, 5000, at) != content[at : at + 5000]:
                    failures.append(at)

    async def main() -> None:
        server = Blockd(tmp_path, "--cache-size", str(16 * CHUNK))
        failures: list[int] = []
        try:
            with range_server.serve(blob) as (url, behaviour):
                for round_ in range(3):
                    await server.start()
                    path = str(server.images / "image")
                    async with await BlockClient.connect(server.socket) as client:
                        if not round_:
                            await client.open("image", [spec(blob, HttpSpec(url), chunks=True)])
                        assert await asyncio.to_thread(read, path) == content
                        threads = [
                            threading.Thread(target=read_on, args=(path, 10 * round_ + i, failures)) for i in range(4)
                        ]
                        for thread in threads:
                            thread.start()
                        wanted = len(behaviour.requests) + 50
                        while len(behaviour.requests) < wanted:
                            await asyncio.sleep(0.001)
                        stats = (await client.stats())["cache"]
                        assert stats["evicted_chunks"] > 0
                        assert stats["used_bytes"] <= 16 * CHUNK
                        assert stats["damaged_chunks"] == 0
                    await server.kill()
                    for thread in threads:
                        await asyncio.to_thread(thread.join)
                    assert not failures
        finally:
            await server.end()

    asyncio.run(main())
