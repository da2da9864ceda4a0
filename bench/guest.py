"""The inside of a guest, for benches: run programs there, make memory and disk dirty."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from aenv.agent.client import ENVD_PORT
from aenv.agent.process import Ended, Output, Processes
from aenv.errors import UnavailableError
from aenv.http.client import Connection
from aenv.node import Node
from aenv.vmm.spawn import find_binary
from bench.client import run_true

WRITER = "/run/writer"
MEMORY_FILE, DISK_FILE = "/dev/shm/bench", "/var/tmp/bench"


class Reachable(Protocol):
    """What a guest's ports are reached through."""

    async def connect(self, port: int) -> socket.socket:
        """A connected non-blocking socket."""


class Guest:
    """A guest that runs. It acts as root in it."""

    def __init__(self, dial: Callable[[], Awaitable[Connection]], headers: Mapping[str, str]) -> None:
        self._dial = dial
        self._headers = {"Host": "guest", **headers}
        self._seed = 0

    @classmethod
    def behind(cls, machine: Reachable, token: str | None = None) -> Guest:
        async def dial() -> Connection:
            return await Connection.open(await machine.connect(ENVD_PORT))

        return cls(dial, {} if token is None else {"X-Access-Token": token})

    @classmethod
    async def of(cls, node: Node, sandbox_id: str) -> Guest:
        """Of a sandbox of a node in this process."""
        sandbox, _ = await node.manager.reach(sandbox_id)

        async def dial() -> Connection:
            _, running = await node.manager.reach(sandbox_id)
            return await Connection.open(await running.connect(ENVD_PORT))

        token = node.manager.envd_token(sandbox)
        return cls(dial, {} if token is None else {"X-Access-Token": token})

    async def true(self) -> None:
        """What `commands.run("true")` of the SDK sends."""
        await run_true(Processes(self._dial, self._headers))

    async def run(self, *command: str) -> bytes:
        """What a program prints. Raises RuntimeError when it fails."""
        text = b""
        async for event in Processes(self._dial, self._headers, "root").start(command[0], command[1:]):
            if isinstance(event, Output):
                text += event.data
            elif isinstance(event, Ended) and event.exit_code != 0:
                raise RuntimeError(f"{command[0]} ended with {event.status}: {text!r}")
        return text

    async def install(self, writer: bytes, room_mib: int) -> None:
        """Put the writer into the guest, and let its /dev/shm have `room_mib`."""
        connection = await self._dial()
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        response = await connection.request(
            "POST", f"/files?path={WRITER}&username=root", headers.items(), writer, length=len(writer)
        )
        answer = await response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"upload: {response.status} {answer!r}")
        await self.run("chmod", "755", WRITER)
        await self.run("mount", "-o", f"remount,size={room_mib}m", "/dev/shm")
        await self.dirty_memory(1)  # what the program itself needs

    async def dirty_memory(self, mib: int) -> None:
        """Write `mib` of random bytes to the same memory as before."""
        if mib:
            self._seed += 1
            await self.run(WRITER, "memory", MEMORY_FILE, str(mib), str(self._seed))

    async def dirty_disk(self, mib: int) -> None:
        """Write `mib` to the disk, past the guest's page cache."""
        self._seed += 1
        await self.run(WRITER, "disk", DISK_FILE, str(mib), str(self._seed))


async def compiled_writer() -> bytes:
    """The program that `Guest.install` takes, from `writer.c`."""
    return await asyncio.to_thread(_compile)


def _compile() -> bytes:
    try:
        compiler = find_binary("gcc")
    except UnavailableError as error:
        raise UnavailableError("the bench needs a C compiler", hint="apt-get install gcc libc6-dev") from error
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as folder:
        program = Path(folder) / "writer"
        source = Path(__file__).with_name("writer.c")
        subprocess.run([compiler, "-std=gnu11", "-O2", "-static", "-o", program, source], check=True)
        return program.read_bytes()
