"""The daemon's block server: it dies, and neither open files nor calls under way notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.storage.blocks import Blocks

pytestmark = pytest.mark.root
SIZE = 8 << 20

# Writes blocks of a number with O_DIRECT and reads back what it wrote, for each line that it gets.
WRITER = """
import mmap, os, random, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
blocks, seed = int(sys.argv[2]), int(sys.argv[3])
generator, model, buffer = random.Random(seed), {}, mmap.mmap(-1, 4096)
print("ready", flush=True)
number = 0
for line in sys.stdin:
    if line != "go\\n":
        break
    for _ in range(20):
        number += 1
        block = generator.randrange(blocks)
        buffer[:] = number.to_bytes(8, "little") * 512
        assert os.pwrite(fd, buffer, block * 4096) == 4096
        model[block] = number
        if number % 50 == 0:
            os.fsync(fd)
        block = generator.choice(list(model))
        assert os.preadv(fd, [buffer], block * 4096) == 4096
        assert buffer[:] == model[block].to_bytes(8, "little") * 512, (block, buffer[:8], model[block])
    print(number, flush=True)
for block, expected in model.items():
    assert os.preadv(fd, [buffer], block * 4096) == 4096
    assert buffer[:] == expected.to_bytes(8, "little") * 512, (block, buffer[:8], expected)
print("verified", flush=True)
"""

# Maps an image privately and compares pages with what they must hold, for each line that it gets.
READER = """
import mmap, os, random, sys
fd = os.open(sys.argv[1], os.O_RDWR)
private = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
os.close(fd)
pages = list(range(len(private) // 4096))
random.Random(1).shuffle(pages)
print("ready", flush=True)
for line in sys.stdin:
    if line != "go\\n":
        break
    for page in [pages.pop() for _ in range(min(20, len(pages)))]:
        assert private[page * 4096 : page * 4096 + 8] == page.to_bytes(8, "little"), page
    print(len(pages), flush=True)
for page in range(len(private) // 4096):
    assert private[page * 4096 : page * 4096 + 8] == page.to_bytes(8, "little"), page
print("verified", flush=True)
"""


class Helper:
    """A process that uses a file of the server: what hangs or fails is not the test itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, script: str, *arguments: str) -> Helper:
        helper = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )
        await helper.says()
        return helper

    async def says(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line, "the helper has failed"
        return line.decode().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    async def step(self) -> str:
        self.tell("go")
        return await self.says()

    async def verify(self) -> None:
        self.tell("end")
        assert await self.says() == "verified"
        assert await self.process.wait() == 0


Body = Callable[[Blocks, Path], Awaitable[None]]


def run(folder: Path, body: Body) -> None:
    async def main() -> None:
        blocks = await Blocks.start(folder / "run")
        try:
            await asyncio.wait_for(body(blocks, folder), 120)
        finally:
            await end(blocks)

    asyncio.run(main())


async def end(blocks: Blocks) -> None:
    """Whatever happened: no server and no mount is left."""
    pid = blocks.pid
    await blocks.close()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            await wait_ended(fd)
    command = ["umount", "-l", blocks.directory]
    await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True)


async def wait_ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    await ended
    loop.remove_reader(pidfd)
    os.close(pidfd)


def kill(blocks: Blocks) -> None:
    assert blocks.pid is not None
    os.kill(blocks.pid, signal.SIGKILL)


def memory_layer(path: Path) -> Path:
    """Each page begins with its number."""
    with path.open("wb") as file:
        writer = Writer(file.fileno(), SIZE)
        writer.add(0, b"".join(page.to_bytes(8, "little") * 512 for page in range(SIZE // 4096)))
        writer.finish()
    return path


@contextlib.asynccontextmanager
async def disk(blocks: Blocks, folder: Path, name: str = "disk") -> AsyncIterator[dict[str, Any]]:
    data, index = folder / f"{name}.data", folder / f"{name}.index"
    await blocks.create(data, index, SIZE)
    yield await blocks.open(name, data=data, index=index)
    await blocks.close_image(name)


def test_open_files_survive_the_server(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path) -> None:
        restarts: list[bool] = []
        blocks.on_restarted(restarts.append)
        memory = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        async with disk(blocks, folder) as found:
            writer = await Helper.start(WRITER, found["path"], "500", "1")
            reader = await Helper.start(READER, memory["path"])
            for _ in range(5):
                await asyncio.gather(writer.step(), reader.step())
                before = blocks.pid
                kill(blocks)
                await asyncio.gather(writer.step(), reader.step())
                images = {image["image"]: image for image in await blocks.list_images()}
                assert {name: image["opens"] for name, image in images.items()} == {"disk": 1, "memory": 1}
                assert blocks.pid not in (None, before)
            await asyncio.gather(writer.verify(), reader.verify())
        await blocks.close_image("memory")
        assert restarts == [True] * 5
        assert await blocks.list_images() == []

    run(tmp_path, body)
