from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from aenv.cli.source import AHEAD, CHUNK, Source


def test_all_bytes_arrive_and_the_end_stays_the_end(tmp_path: Path) -> None:
    sent = os.urandom(CHUNK * (AHEAD * 2) + 5)
    path = tmp_path / "input"
    path.write_bytes(sent)

    async def main() -> None:
        with path.open("rb") as file:
            source = Source(file.fileno())
            got = b""
            while data := await source.read():
                got += data
            assert got == sent
            assert await source.read() == b""

    asyncio.run(main())


def test_what_arrived_is_given_before_more_is_waited_for() -> None:
    reader, writer = os.pipe()

    async def main() -> None:
        source = Source(reader)
        os.write(writer, b"one")
        assert await asyncio.wait_for(source.read(), 10) == b"one"
        waiting = asyncio.create_task(source.read())
        await asyncio.sleep(0)
        assert not waiting.done()
        os.write(writer, b"two")
        assert await asyncio.wait_for(waiting, 10) == b"two"
        assert fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_NONBLOCK == 0
        os.close(writer)
        assert await asyncio.wait_for(source.read(), 10) == b""

    asyncio.run(main())
    os.close(reader)


def test_reading_ahead_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(bytes(CHUNK * AHEAD * 4))

    async def main() -> None:
        with path.open("rb") as file:
            source = Source(file.fileno())
            while os.lseek(file.fileno(), 0, os.SEEK_CUR) < CHUNK * AHEAD:
                await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == CHUNK * AHEAD
            while await source.read():
                pass

    asyncio.run(main())


def test_an_error_is_the_end() -> None:
    async def main() -> None:
        fd = os.open("/", os.O_RDONLY)  # reading a directory is EISDIR
        source = Source(fd)
        assert await asyncio.wait_for(source.read(), 10) == b""
        os.close(fd)

    asyncio.run(main())
