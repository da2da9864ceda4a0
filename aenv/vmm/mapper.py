"""Client of the mapper, the library in each VMM process that maps files over guest RAM (see mapper/request.h).

One connection a call: the files of a call are closed with it, and nothing has to be found again after a restart.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import aenv._native
from aenv.errors import VmmError

LIBRARY = Path(aenv._native.__file__).with_name("aenv-mapper.so")
SOCKET_NAME = "mapper.sock"
VARIABLE = "AENV_MAPPER"

MAGIC = 0x50414D41
VERSION = 1
START_TIMEOUT = 10.0  # seconds; its thread runs before QEMU's first instruction
KIND_RAM, KIND_OPEN, KIND_MAP, KIND_POPULATE = range(1, 5)
FILES_A_MESSAGE = 252  # SCM_MAX_FD, less one for the table
REQUEST = struct.Struct("=IHHIIQQ")
ANSWER = struct.Struct("=IHHiIII")
RANGE = struct.Struct("=QQ")
# In the order of enum mapper_step.
STEPS = (
    "none", "length", "magic", "version", "kind", "count", "files", "ram", "table", "file", "guest_offset", "length",
    "file index", "reserved", "file_offset", "mmap", "populate",
)  # fmt: skip


class Mapper:
    """The mapper of the machine whose run directory is `run_dir`. Methods raise VmmError."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SOCKET_NAME

    async def tell_ram(self, address: int, length: int) -> None:
        """Where guest RAM lies; said once, before anything else."""
        await self._session([REQUEST.pack(MAGIC, VERSION, KIND_RAM, 0, 0, address, length)], [[]], START_TIMEOUT)

    async def map(self, files: Sequence[int], extents: bytes, count: int, timeout: float = 60) -> None:
        """Map `count` packed extents of the open `files` over RAM. After an error RAM may be half mapped."""
        with ExitStack() as stack:
            messages, rights = [], []
            *batches, last = [files[i : i + FILES_A_MESSAGE] for i in range(0, len(files) or 1, FILES_A_MESSAGE)]
            for batch in batches:
                messages.append(REQUEST.pack(MAGIC, VERSION, KIND_OPEN, 0, len(batch), 0, 0))
                rights.append(list(batch))
            messages.append(REQUEST.pack(MAGIC, VERSION, KIND_MAP, count, len(last), 0, 0))
            rights.append([_table(stack, extents), *last])
            await self._session(messages, rights, timeout)

    async def populate(self, ranges: Sequence[tuple[int, int]], timeout: float = 60) -> None:
        """Map the pages of `ranges` (guest offset, length) now: they fault no more."""
        with ExitStack() as stack:
            table = _table(stack, b"".join(RANGE.pack(*r) for r in ranges))
            request = REQUEST.pack(MAGIC, VERSION, KIND_POPULATE, len(ranges), 0, 0, 0)
            await self._session([request], [[table]], timeout)

    async def _session(self, messages: list[bytes], rights: list[list[int]], timeout: float) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as client:
            client.setblocking(False)
            try:
                _connect(client, self._path)
                async with asyncio.timeout(timeout):
                    for message, descriptors in zip(messages, rights, strict=True):
                        # Never blocks: one small message is under way at a time.
                        client.sendmsg([message], _rights(descriptors))
                        _check(await loop.sock_recv(client, ANSWER.size + 1))
            except TimeoutError:
                raise VmmError(f"the mapper did not answer within {timeout:g} s") from None
            except OSError as error:
                raise VmmError(f"cannot talk to the mapper: {error.strerror}") from error


def _connect(client: socket.socket, path: Path) -> None:
    # Through the directory's descriptor, because a socket address holds at most 107 bytes of path.
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        client.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _rights(descriptors: list[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []


def _table(stack: ExitStack, content: bytes) -> int:
    """Tables travel as a file: of any length in one message."""
    fd = os.memfd_create("table")
    stack.callback(os.close, fd)
    if os.write(fd, content) != len(content):
        raise VmmError("cannot write the table of extents")
    return fd


def _check(answer: bytes) -> None:
    if not answer:
        raise VmmError("the mapper closed the connection")
    if len(answer) != ANSWER.size:
        raise VmmError(f"the mapper broke the protocol: an answer of {len(answer)} bytes")
    magic, version, step, error, index, done, _reserved = ANSWER.unpack(answer)
    if (magic, version) != (MAGIC, VERSION) or step >= len(STEPS):
        raise VmmError("the mapper broke the protocol: not an answer of this version")
    if error:
        raise VmmError(f"the mapper refused {STEPS[step]} of entry {index}: {os.strerror(error)} ({done} done)")
