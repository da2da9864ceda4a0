"""The block server with ublk: choice of the front end, recovery, spare devices, and nothing left at the end."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import AenvError, ConflictError, InvalidInputError, UnavailableError
from ublk.client import BlockClient

from .support import BLKDISCARD, Direct, exercise, kernel_devices, sh, until

SIZE = 16 << 20


class Blockd:
    """A server process with a folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "run/control"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> BlockClient:
        ready, theirs = os.pipe()
        command = [
            sys.executable, "-m", "ublk", "--socket", str(self.socket), "--mount", str(self.folder / "images"),
            "--ready", str(theirs), *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=[theirs])  # noqa: ASYNC220  # it returns at once
        os.close(theirs)
        assert await asyncio.to_thread(os.read, ready, 1), "the server did not start"
        os.close(ready)
        return await BlockClient.connect(self.socket)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


Body = Callable[[Blockd, BlockClient], Awaitable[None]]


def run(folder: Path, body: Body, *options: str) -> None:
    """Afterwards the kernel has no device left, whatever happened."""

    async def main() -> None:
        server = Blockd(folder, *options)
        try:
            client = await server.start()
            await body(server, client)
            await client.close()
        finally:
            server.end()

    asyncio.run(main())
    until(lambda: not kernel_devices())


async def new_disk(server: Blockd, client: BlockClient, name: str, **more: object) -> str:
    data, index = server.folder / f"{name}.data", server.folder / f"{name}.index"
    await client.create(data, index, SIZE)
    found = await client.open(name, data=data, index=index, **more)  # type: ignore[arg-type]
    return str(found["path"])


async def refused(request: Awaitable[object]) -> AenvError:
    try:
        await request
    except AenvError as error:
        return error
    raise AssertionError("it was not refused")


def test_front_end_is_chosen(folder: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        assert client.server["front_ends"] == ["fuse", "ublk"]
        disk = await new_disk(server, client, "disk", uid=123, gid=124, mode=0o640)
        assert disk.startswith("/dev/ublkb")
        status = os.stat(disk)
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (123, 124, 0o640)
        assert (await new_disk(server, client, "file", front_end="fuse")) == str(server.folder / "images/file")
        with (folder / "layer").open("wb") as file:
            writer = Writer(file.fileno(), SIZE)
            writer.add(0, b"m" * 4096)
            writer.finish()
        memory = await client.open("memory", [folder / "layer"], cached=True)
        assert memory["front_end"] == "fuse"
        error = await refused(client.open("m2", [folder / "layer"], cached=True, front_end="ublk"))
        assert isinstance(error, InvalidInputError)
        assert error.field == "front_end"
        error = await refused(client.open("m2", [folder / "layer"], front_end="floppy"))
        assert isinstance(error, InvalidInputError)
        shown = await client.open("shown", [folder / "layer"], front_end="ublk")
        assert shown["read_only"]
        assert await asyncio.to_thread(sh, f"dd if={shown['path']} bs=4096 count=1 2>/dev/null") == "m" * 4096
        assert {i["image"]: i["front_end"] for i in await client.list_images()} == {
            "disk": "ublk", "file": "fuse", "memory": "fuse", "shown": "ublk",
        }  # fmt: skip

    run(folder, body)


def test_disk_in_use_is_not_closed(folder: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        path = await new_disk(server, client, "disk")
        assert [i["opens"] for i in await client.list_images()] == [0]
        fds = [os.open(path, os.O_RDWR) for _ in range(2)]
        assert [i["opens"] for i in await client.list_images()] == [2]
        assert isinstance(await refused(client.close_image("disk")), ConflictError)
        assert isinstance(await refused(client.shutdown()), ConflictError)
        for fd in fds:
            os.close(fd)
        sh(f"/bin/mke2fs -q -t ext4 {path} && mkdir -p {folder}/mnt && mount -t ext4 {path} {folder}/mnt")
        assert isinstance(await refused(client.close_image("disk")), ConflictError)
        sh(f"umount {folder}/mnt")
        await client.close_image("disk")
        assert not os.path.exists(path)

    run(folder, body)


def test_resize_changes_nothing_or_all(folder: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        path = await new_disk(server, client, "disk")
        try:
            await client.resize("disk", 2 * SIZE)
            expected = 2 * SIZE
        except UnavailableError:
            expected = SIZE  # before Linux 6.16
        assert int(sh(f"blockdev --getsize64 {path}")) == expected
        assert [i["size"] for i in await client.list_images()] == [expected]

    run(folder, body)


def test_restack_under_load(folder: Path) -> None:
    """Snapshots of a live device: each holds what was there, and nothing is lost."""

    async def body(server: Blockd, client: BlockClient) -> None:
        path = await new_disk(server, client, "disk")
        model = bytearray(SIZE)
        load = asyncio.create_task(asyncio.to_thread(exercise, path, model, 120, 7))
        layers = []
        for number in range(4):
            await asyncio.sleep(0.1)
            pair = folder / f"next{number}.data", folder / f"next{number}.index"
            index = folder / ("disk.index" if number == 0 else f"next{number - 1}.index")
            layers.append(await client.restack("disk", *pair))
            await client.seal(layers[-1], index)
        await load
        await client.close_image("disk")
        await client.seal(folder / "next3.data", folder / "next3.index")
        layers.append(folder / "next3.data")
        assert Stack([Layer(layer) for layer in layers]).read(0, SIZE) == model

    run(folder, body)


def test_killed_server_is_followed_by_one_that_takes_over(folder: Path) -> None:
    """With two devices under load, three times. Who uses them sees no error; what was written is there."""

    async def body(server: Blockd, client: BlockClient) -> None:
        paths = [await new_disk(server, client, f"disk{i}") for i in range(2)]
        models = [bytearray(SIZE) for _ in paths]
        loads = [
            asyncio.create_task(asyncio.to_thread(exercise, path, model, 250, i))
            for i, (path, model) in enumerate(zip(paths, models, strict=True))
        ]
        for _ in range(3):
            await asyncio.sleep(0.3)
            assert not any(load.done() for load in loads), "the load is too small to be disturbed"
            server.kill()
            await client.close()
            client = await server.start()
            assert sorted(i["path"] for i in await client.list_images()) == paths
        await asyncio.gather(*loads)
        for number, model in enumerate(models):
            await client.close_image(f"disk{number}")
            await client.seal(folder / f"disk{number}.data", folder / f"disk{number}.index")
            assert Stack([Layer(folder / f"disk{number}.data")]).read(0, SIZE) == model
        await client.close()

    run(folder, body)


def test_requests_wait_while_there_is_no_server(folder: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        path = await new_disk(server, client, "disk")
        direct = Direct(path)
        direct.write(0, b"a" * 4096)
        server.kill()
        read = asyncio.create_task(asyncio.to_thread(direct.read, 0, 4096))
        await asyncio.sleep(0.5)
        assert not read.done()
        await client.close()
        client = await server.start()
        assert await read == b"a" * 4096
        direct.ioctl(BLKDISCARD, 0, 4096)
        assert direct.read(0, 4096) == bytes(4096)
        direct.close()
        await client.close()

    run(folder, body)


def test_what_cannot_be_taken_over_gives_errors(folder: Path) -> None:
    """The layer is gone: whoever waits for the device must not wait for ever."""

    async def body(server: Blockd, client: BlockClient) -> None:
        path = await new_disk(server, client, "disk")
        direct = Direct(path)
        direct.write(0, b"a" * 4096)
        server.kill()
        read = asyncio.create_task(asyncio.to_thread(direct.read, 0, 4096))
        (folder / "disk.index").unlink()
        await client.close()
        client = await server.start()
        try:
            await read
        except OSError:
            direct.close()
        else:
            raise AssertionError("bytes from nowhere")
        assert isinstance(await refused(client.flush("disk")), UnavailableError)
        await client.close_image("disk")
        await client.close()

    run(folder, body)


def test_devices_without_an_image_do_not_outlive_their_server(folder: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        await until_async(lambda: len(kernel_devices()) == 5)
        server.kill()
        await client.close()
        before = kernel_devices()
        assert len(before) == 5
        client = await server.start()
        await until_async(lambda: len(kernel_devices()) == 5)
        paths = [await new_disk(server, client, f"disk{i}") for i in range(8)]
        assert len(set(paths)) == 8
        generator = random.Random(3)
        for path in paths:
            direct = Direct(path)
            data = generator.randbytes(4096)
            direct.write(8192, data)
            assert direct.read(8192, 4096) == data
            direct.close()
        await client.close()

    run(folder, body, "--ublk-spare", "5")


async def until_async(done: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, done)


def test_stopped_server_leaves_no_device(folder: Path) -> None:
    """Even with one in use: there is nobody any more who could serve it."""

    async def body(server: Blockd, client: BlockClient) -> None:
        direct = Direct(await new_disk(server, client, "disk"))
        direct.write(0, b"z" * 4096)
        await client.shutdown(force=True)
        assert server.process is not None
        await asyncio.to_thread(server.process.wait)
        direct.close()

    run(folder, body)
