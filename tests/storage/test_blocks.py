"""The daemon's block server: it dies, and neither open files nor calls under way notice."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv._native.lsmt import Layer, Stack, Writer
from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.storage.blocks import Blocks
from tests.processes import open_files
from ublk import protocol
from ublk.client import BlockClient

pytestmark = pytest.mark.root
SIZE = 8 << 20
KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])

# Writes blocks of a number with O_DIRECT and reads back what it wrote, for each line that it gets. In the end it says
# how many requests were aborted.
WRITER = """
import mmap, os, random, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
first, blocks, seed = (int(argument) for argument in sys.argv[2:])
generator, model, buffer = random.Random(seed), {}, mmap.mmap(-1, 4096)
print("ready", flush=True)
number = aborted = 0

def persist(call, *arguments):
    global aborted
    while True:
        try:
            return call(*arguments)
        except ConnectionAbortedError:
            aborted += 1

for line in sys.stdin:
    if line != "go\\n":
        break
    for _ in range(20):
        number += 1
        block = first + generator.randrange(blocks)
        buffer[:] = number.to_bytes(8, "little") * 512
        assert persist(os.pwrite, fd, buffer, block * 4096) == 4096
        model[block] = number
        if number % 50 == 0:
            persist(os.fsync, fd)
        block = generator.choice(list(model))
        assert persist(os.preadv, fd, [buffer], block * 4096) == 4096
        assert buffer[:] == model[block].to_bytes(8, "little") * 512, (block, buffer[:8], model[block])
    print(number, flush=True)
for block, expected in model.items():
    assert persist(os.preadv, fd, [buffer], block * 4096) == 4096
    assert buffer[:] == expected.to_bytes(8, "little") * 512, (block, buffer[:8], expected)
print("verified", aborted, flush=True)
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
print("verified 0", flush=True)
"""


class Helper:
    """A process that uses a file of the server: what hangs or fails is not the test itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, script: str, *arguments: str) -> Helper:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(sys.executable, "-c", script, *arguments, stdin=pipe, stdout=pipe)
        )

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

    async def verify(self) -> int:
        """Gives the number of aborted requests."""
        self.tell("end")
        verified, aborted = (await self.says()).split()
        assert verified == "verified"
        assert await self.process.wait() == 0
        return int(aborted)


Start = Callable[..., Awaitable[Helper]]
Body = Callable[[Blocks, Path, Start], Awaitable[None]]


def run(folder: Path, body: Body) -> None:
    async def main() -> None:
        helpers: list[Helper] = []

        async def start(script: str, *arguments: str | int) -> Helper:
            helpers.append(await Helper.start(script, *map(str, arguments)))
            await helpers[-1].says()
            return helpers[-1]

        blocks = await Blocks.start(folder / "run")
        try:
            await asyncio.wait_for(body(blocks, folder, start), 120)
        finally:
            await end(blocks)
            for helper in helpers:
                if helper.process.returncode is None:
                    helper.process.kill()
                await helper.process.communicate()

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
    command = ["umount", "-l", str(blocks.directory)]
    await asyncio.to_thread(lambda: subprocess.run(command, check=False, capture_output=True))


async def wait_ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    await ended.wait()
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
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        restarts: list[bool] = []
        blocks.on_restarted(restarts.append)
        memory = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        async with disk(blocks, folder) as found:
            writer = await start(WRITER, found["path"], 0, 500, 1)
            reader = await start(READER, memory["path"])
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


async def write_through_kills(blocks: Blocks, folder: Path, start: Start) -> int:
    """Several processes write and read all the time; the server dies at any point of their requests. Gives the number
    of requests that were aborted."""
    generator = random.Random(7)
    async with disk(blocks, folder) as found:
        helpers = [await start(WRITER, found["path"], n * 300, 300, n) for n in range(4)]
        for _ in range(5):
            for helper in helpers:
                for _ in range(30):
                    helper.tell("go")
            await asyncio.sleep(generator.random() * 0.1)
            kill(blocks)
            for helper in helpers:
                for _ in range(30):
                    await helper.says()
        aborted = [await helper.verify() for helper in helpers]
    await blocks.seal(folder / "disk.data", folder / "disk.index")
    return sum(aborted)


@pytest.mark.skipif(KERNEL < (6, 9), reason="the kernel does not send requests again")
def test_requests_under_way_are_answered_by_the_next_server(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        assert await write_through_kills(blocks, folder, start) == 0

    run(tmp_path, body)


def test_without_resend_requests_under_way_are_aborted_and_nothing_else(tmp_path: Path) -> None:
    """As on a kernel before 6.9: what the dead server had read ends with ECONNABORTED, and can be repeated."""

    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        with (folder / "run/state/fuse").open("r+b") as record:
            record.seek(32)
            record.write(bytes(4))  # fuse_record.resend
        await blocks.close()
        blocks = await Blocks.start(folder / "run")
        try:
            assert await write_through_kills(blocks, folder, start) > 0
        finally:
            await end(blocks)

    run(tmp_path, body)


def test_server_outlives_the_daemon_and_its_files_the_server(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        data, index = folder / "disk.data", folder / "disk.index"
        await blocks.create(data, index, SIZE)
        found = await blocks.open("disk", data=data, index=index)
        writer = await start(WRITER, found["path"], 0, 500, 1)
        await writer.step()
        pid = blocks.pid
        await blocks.close()
        await writer.step()
        with pytest.raises(UnavailableError):
            await blocks.list_images()
        again = await Blocks.start(folder / "run")
        try:
            assert again.pid == pid
            kill(again)
            await writer.step()
            assert [image["opens"] for image in await again.list_images()] == [1]
            await writer.verify()
            await again.close_image("disk")
        finally:
            await end(again)

    run(tmp_path, body)


def test_death_of_daemon_and_server_at_once_keeps_the_data(tmp_path: Path) -> None:
    """Nobody holds the mount then: who has a file open gets errors. The images are served again as they were."""

    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        data, index = folder / "disk.data", folder / "disk.index"
        await blocks.create(data, index, SIZE)
        found = await blocks.open("disk", data=data, index=index)
        fd = os.open(found["path"], os.O_RDWR)
        os.pwrite(fd, b"x" * 4096, 8192)
        os.kill(blocks.pid or 0, signal.SIGSTOP)  # it must not end before nobody holds the mount
        pid = blocks.pid
        await blocks.close()
        os.kill(pid or 0, signal.SIGKILL)
        again = await Blocks.start(folder / "run")
        try:
            for call in (lambda: os.pread(fd, 1, 0), lambda: os.pwrite(fd, b"y", 0), lambda: os.fsync(fd)):
                with pytest.raises(OSError, match=r"not connected|Software caused|Input/output"):
                    call()
            os.close(fd)
            assert [(i["image"], i["opens"]) for i in await again.list_images()] == [("disk", 0)]
            assert Path(found["path"]).read_bytes() == bytes(8192) + b"x" * 4096 + bytes(SIZE - 12288)
            kill(again)
            await again.close_image("disk")
        finally:
            await end(again)

    run(tmp_path, body)


def test_files_do_not_survive_an_end_of_the_server_on_purpose(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        survived: asyncio.Queue[bool] = asyncio.Queue()
        blocks.on_restarted(survived.put_nowait)
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        fd = os.open(found["path"], os.O_RDWR)
        os.kill(blocks.pid or 0, signal.SIGTERM)
        assert await survived.get() is False
        with pytest.raises(OSError, match=r"not connected|Software caused|Input/output"):
            os.pread(fd, 4096, 0)
        os.close(fd)
        assert await blocks.list_images() == []
        found = await blocks.open("memory", [folder / "layer"], cached=True)
        assert Path(found["path"]).stat().st_size == SIZE
        await blocks.close_image("memory")

    run(tmp_path, body)


@pytest.mark.parametrize("steps", [0, 1, 5, 20])
def test_server_that_dies_instead_of_ending_leaves_nothing(tmp_path: Path, steps: int) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        closing = asyncio.create_task(blocks.close(stop_server=True))
        for _ in range(steps):
            await asyncio.sleep(0)
        if blocks.pid is not None:
            kill(blocks)
        await closing
        assert blocks.pid is None
        again = await Blocks.start(folder / "run")
        await again.close(stop_server=True)
        assert not os.path.ismount(blocks.directory)
        assert sorted(path.name for path in (folder / "run").iterdir()) == ["control.lock", "images", "log"]

    run(tmp_path, body)


def test_stop_server(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        fd = os.open(found["path"], os.O_RDWR)
        with pytest.raises(ConflictError, match="in use"):
            await blocks.close(stop_server=True)
        assert len(await blocks.list_images()) == 1
        kill(blocks)
        # Never in the loop's thread: it is what starts the server.
        assert await asyncio.to_thread(os.pread, fd, 8, 4096) == (1).to_bytes(8, "little")
        os.close(fd)  # of which the kernel tells the server a little later
        await blocks.close(stop_server=True)
        assert blocks.pid is None
        assert not os.path.ismount(blocks.directory)
        assert sorted(path.name for path in (folder / "run").iterdir()) == ["control.lock", "images", "log"]

    run(tmp_path, body)


def test_damaged_state_and_missing_layers_harm_nothing_else(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        memory = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        await blocks.open("gone", [memory_layer(folder / "gone")])
        found = await blocks.open("held", [memory_layer(folder / "held")])
        held = os.open(found["path"], os.O_RDONLY)
        reader = await start(READER, memory["path"])
        for name in ("gone", "held"):
            (folder / name).rename(folder / f"{name}.away")
        for name, content in (("image-1", b""), ("image-2", b"[]"), ("seal-1", b'{"data": 1}'), ("image-3", b"\xff")):
            (folder / f"run/state/{name}.json").write_bytes(content)
        (folder / "run/state/image-4.draft").write_bytes(b"{")
        kill(blocks)
        await reader.step()
        assert [image["image"] for image in await blocks.list_images()] == ["memory"]
        with pytest.raises(UnavailableError, match="gone: could not be opened again"):
            await blocks.stats("gone")
        with pytest.raises(OSError, match="Stale"):
            os.pread(held, 4096, 0)
        await blocks.close_image("gone")
        with pytest.raises(NotFoundError):
            await blocks.stats("gone")
        (folder / "held.away").rename(folder / "held")
        await blocks.open("held", [folder / "held"])
        os.close(held)
        kill(blocks)
        assert [(i["image"], i["opens"]) for i in await blocks.list_images()] == [("held", 0), ("memory", 1)]
        await reader.verify()
        for name in ("held", "memory"):
            await blocks.close_image(name)

    run(tmp_path, body)


@pytest.mark.skipif(KERNEL < (6, 9) or shutil.which("qemu-io") is None, reason="needs Linux 6.9 and qemu-utils")
def test_qemu_sees_only_latency(tmp_path: Path) -> None:
    """Its own block layer, with O_DIRECT and several requests at a time. It ends at the first error."""

    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        async with disk(blocks, folder) as found:
            commands = []
            for step in range(60):
                commands += [f"aio_write -P {step + 1} {(step * 7 + i) % 60 * 131072} 128k" for i in range(4)]
                commands += ["aio_flush", f"read -P {step + 1} {step * 7 % 60 * 131072} 128k", "flush"]
                commands += [f"discard {step * 7 % 60 * 131072} 64k", f"read -P 0 {step * 7 % 60 * 131072} 64k"]
            arguments = [argument for command in commands for argument in ("-c", command)]
            qemu = await asyncio.create_subprocess_exec(
                "qemu-io", "-f", "raw", "-t", "none", "-d", "unmap", *arguments, found["path"],
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output = asyncio.create_task(qemu.communicate())
            kills = 0
            while not output.done() and kills < 10:
                kill(blocks)
                kills += 1
                await blocks.list_images()
            text = (await output)[0].decode()
            assert qemu.returncode == 0, text
            assert "failed" not in text
            assert text.count("wrote 131072/131072") == 240

    run(tmp_path, body)


@pytest.mark.parametrize("offset", [0, 36, 44, 80], ids=["magic", "init_length", "opcode", "version"])
def test_damaged_record_of_the_mount_ends_it_and_nothing_else(tmp_path: Path, offset: int) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        survived: asyncio.Queue[bool] = asyncio.Queue()
        blocks.on_restarted(survived.put_nowait)
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        fd = os.open(found["path"], os.O_RDONLY)
        with (folder / "run/state/fuse").open("r+b") as record:
            record.seek(offset)
            record.write(b"\xff" * 4)
        kill(blocks)
        assert await survived.get() is False
        with pytest.raises(OSError, match=r"not connected|Software caused|Input/output"):
            await asyncio.to_thread(os.pread, fd, 4096, 0)
        os.close(fd)
        reader = await start(READER, found["path"])
        kill(blocks)
        assert await survived.get() is True
        await reader.verify()
        await blocks.close_image("memory")

    run(tmp_path, body)


# The server of another release.
OTHER = """
import ublk.protocol, ublk.server
ublk.protocol.VERSION = ublk.server.VERSION = 99
from ublk.__main__ import main
main()
"""


def test_server_of_another_version_is_replaced_under_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        await blocks.close(stop_server=True)
        command = ["--socket", folder / "run/control", "--mount", blocks.directory, "--state", folder / "run/state"]
        ready, theirs = os.pipe()
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHER, *map(str, command), "--ready", str(theirs), pass_fds=[theirs]
        )
        os.close(theirs)
        assert await asyncio.to_thread(os.read, ready, 1) == b"1"
        os.close(ready)
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "VERSION", 99)
            async with await BlockClient.connect(folder / "run/control") as client:
                data, index = folder / "disk.data", folder / "disk.index"
                await client.create(data, index, SIZE)
                found = await client.open("disk", data=data, index=index)
        writer = await start(WRITER, found["path"], 0, 500, 1)
        await writer.step()
        try:
            again = await Blocks.start(folder / "run")
        except BaseException:
            other.kill()
            raise
        try:
            assert again.pid != other.pid
            await other.wait()  # whatever it says: as its parent in this test, `Blocks` may have reaped it
            await writer.step()
            assert [image["opens"] for image in await again.list_images()] == [1]
            await writer.verify()
            await again.close_image("disk")
        finally:
            await end(again)

    run(tmp_path, body)


def test_server_does_not_wait_for_itself(tmp_path: Path) -> None:
    """While it takes its mount over nobody answers there: it must not look into it. Nothing else has, either, so that
    the kernel has nothing to answer from."""

    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        for own in (found["path"], f"{blocks.directory}/../images/memory"):
            with pytest.raises(InvalidInputError, match="image of this server"):
                await blocks.open("itself", [Path(own)])
        kill(blocks)
        assert len(await blocks.list_images()) == 1
        await blocks.close_image("memory")

    run(tmp_path, body)


def test_programs_are_locked_into_memory_and_indexes_are_not(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        def locked() -> int:
            status = Path(f"/proc/{blocks.pid}/status").read_text()
            return int(re.findall(r"VmLck:\s+(\d+) kB", status)[0]) << 10

        before = locked()
        if "memory cannot be locked" in (folder / "run/log").read_text():
            pytest.skip("this machine lets nobody lock memory")
        assert before > 8 << 20
        entries = 900_000
        with (folder / "large").open("wb") as file:
            writer = Writer(file.fileno(), entries * 1024)
            for i in range(entries):
                writer.add_zeros(i * 1024, 512)
            writer.finish()
        await blocks.open("large", [folder / "large"])
        assert (await blocks.stats())["segments"] == entries
        assert locked() - before < entries * 16 / 2
        await blocks.close_image("large")

    run(tmp_path, body)


def test_whoever_asks_for_the_mount_and_goes_away_does_no_harm(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        for sent in (b"", b"x" * 1000):
            for _ in range(50):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(folder / "run/control.keep"))
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(sent)
        await blocks.list_images()
        assert blocks.pid
        assert len(open_files(blocks.pid)) < 50
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        reader = await start(READER, found["path"])
        kill(blocks)
        await reader.verify()
        await blocks.close_image("memory")

    run(tmp_path, body)


def test_state_of_another_boot_is_forgotten(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        pid = blocks.pid
        await blocks.close()
        os.kill(pid or 0, signal.SIGKILL)
        (folder / "run/state/boot").write_text("another")
        again = await Blocks.start(folder / "run")
        try:
            assert await again.list_images() == []
        finally:
            await end(again)

    run(tmp_path, body)


def test_server_that_does_not_start_is_told_and_tried_again(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        found = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        reader = await start(READER, found["path"])
        restarted: asyncio.Queue[bool] = asyncio.Queue()
        blocks.on_restarted(restarted.put_nowait)
        kill(blocks)
        lock = os.open(folder / "run/control.lock", os.O_RDWR)
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="block server exited with status 1") as caught:
            await blocks.list_images()
        assert caught.value.hint is not None
        assert str(folder / "run/log") in caught.value.hint
        assert "runs there already" in (folder / "run/log").read_text()
        # Now one fails after it has taken the mount over: that must survive this, too.
        (folder / "run/control.keep").unlink(missing_ok=True)
        (folder / "run/control.keep/block").mkdir(parents=True)
        started = (folder / "run/log").read_text().count("cannot go on")
        os.close(lock)
        while (folder / "run/log").read_text().count("cannot go on") == started:
            await asyncio.sleep(0.01)
        (folder / "run/control.keep/block").rmdir()
        (folder / "run/control.keep").rmdir()
        assert await restarted.get() is True
        await reader.verify()
        await blocks.close_image("memory")

    run(tmp_path, body)


def test_errors_of_the_server_are_those_of_the_call(tmp_path: Path) -> None:
    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        async with disk(blocks, folder):
            for data, index in (("disk.data", "new.index"), ("new.data", "disk.index")):
                with pytest.raises(ConflictError, match="exists"):
                    await blocks.create(folder / data, folder / index, SIZE)
                with pytest.raises(ConflictError, match="exists"):
                    await blocks.restack("disk", folder / data, folder / index)
            with pytest.raises(InvalidInputError, match="size"):
                await blocks.create(folder / "n.data", folder / "n.index", 5)
            with pytest.raises(NotFoundError):
                await blocks.restack("nobody", folder / "n.data", folder / "n.index")
            with pytest.raises(ConflictError, match="open already"):
                await blocks.open("disk", data=folder / "disk.data", index=folder / "disk.index")
            await blocks.resize("disk", 2 * SIZE)
            kill(blocks)
            await blocks.resize("disk", 2 * SIZE)
            await blocks.flush("disk")
            assert (await blocks.list_images())[0]["size"] == 2 * SIZE
            assert (await blocks.stats())["lost"] == 0

    run(tmp_path, body)


def test_kill_at_any_point_of_any_operation(tmp_path: Path) -> None:
    """Each call ends as if there had been no kill, and what is written meanwhile is there."""

    async def body(blocks: Blocks, folder: Path, start: Start) -> None:
        generator = random.Random(8)
        memory = await blocks.open("memory", [memory_layer(folder / "layer")], cached=True)
        layers: list[Path] = []
        uppers = [(folder / "disk.data", folder / "disk.index")]
        async with disk(blocks, folder) as found:
            writer = await start(WRITER, found["path"], 0, 1500, 3)
            reader = await start(READER, memory["path"])
            for i in range(16):
                if i % 2:
                    asyncio.get_running_loop().call_later(generator.random() * 0.06, kill, blocks)
                writer.tell("go")
                reader.tell("go")
                uppers.append((folder / f"{i}.data", folder / f"{i}.index"))
                sealed = await blocks.restack("disk", *uppers[-1])
                assert sealed == uppers[-2][0]
                layers.append(sealed)
                child = await blocks.open(f"child{i}", layers)
                assert child["read_only"]
                await blocks.seal(*uppers[-2])
                assert Layer(sealed).info.virtual_size == SIZE
                own = folder / f"own{i}.data", folder / f"own{i}.index"
                await blocks.create(*own, SIZE)
                await blocks.open(f"own{i}", layers, data=own[0], index=own[1])
                await blocks.close_image(f"own{i}")
                await blocks.close_image(f"child{i}")
                names = [(image["image"], image["opens"]) for image in await blocks.list_images()]
                assert names == [("disk", 1), ("memory", 1)]
                await writer.says()
                await reader.says()
            await asyncio.gather(writer.verify(), reader.verify())
            live = await asyncio.to_thread(Path(found["path"]).read_bytes)
            listed = (await blocks.list_images())[0]
            assert listed["layers"] == [str(layer) for layer in layers]
        await blocks.close_image("memory")
        opened = [Layer(layer) for layer in layers]
        assert Stack([*opened, Layer(*uppers[-1])]).read(0, SIZE) == live
        assert not list((folder / "run/state").glob("*.json"))

    run(tmp_path, body)
