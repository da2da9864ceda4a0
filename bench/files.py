"""Upload and download of a large file through daemon and agent, against a raw TCP copy into the same guest.

The raw copy is a Python program in the guest that copies between a socket and a file, reached over the same tap
without daemon or agent. Memory of daemon and agent is read before and at the end.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aenv.agent.process import Output, Processes
from aenv.config import Config
from aenv.node import Node
from bench.client import Box, Client
from bench.facts import host_facts, percentile

SIZE = 256 << 20
PIECE = 256 << 10
TARGET = "/files?path=/home/user/large.bin&username=user"
PORT = 4000
RAW = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
buffer = bytearray({PIECE})
while True:
    peer, _ = server.accept()
    direction = peer.recv(1)
    if direction == b"u":
        left = {SIZE}
        with open("/home/user/raw.bin", "wb", buffering=0) as file:
            while left:
                got = peer.recv_into(buffer)
                file.write(memoryview(buffer)[:got])
                left -= got
        peer.sendall(b"x")
    elif direction == b"d":
        with open("/home/user/raw.bin", "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                peer.sendall(memoryview(buffer)[:got])
    peer.close()
"""


async def run(config: Config, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`n` rounds of four transfers of 256 MiB; at most ten."""
    rounds = min(n, 10)
    seconds: dict[tuple[str, str], list[float]] = {}
    node = await Node.start(config)
    try:
        client = Client(node)
        box = await client.create()
        processes = Processes(client.dial, box.headers)
        server = asyncio.create_task(_drain(processes.start("python3", ["-c", RAW])))
        _, running = await node.manager.reach(box.id)
        await _listening(running)
        before = _memory(), await _agent_memory(processes)
        for number in range(rounds):
            for direction in ("upload", "download"):
                began = time.perf_counter()
                await _raw(running, direction)
                seconds.setdefault((direction, "raw"), []).append(time.perf_counter() - began)
                began = time.perf_counter()
                await (_upload(client, box) if direction == "upload" else _download(client, box))
                seconds.setdefault((direction, "files"), []).append(time.perf_counter() - began)
            say(f"round {number + 1} of {rounds}")
        after = _memory(), await _agent_memory(processes)
        await client.kill(box)
        await asyncio.gather(server, return_exceptions=True)
    finally:
        await node.close()
    rows = []
    for direction in ("upload", "download"):
        raw, ours = percentile(seconds[direction, "raw"], 50), percentile(seconds[direction, "files"], 50)
        rows.append(
            {
                "bench": "files",
                "direction": direction,
                "n": rounds,
                "mib_s": round((SIZE >> 20) / ours, 1),
                "rival": "raw TCP",
                "rival_mib_s": round((SIZE >> 20) / raw, 1),
                "ratio": round(raw / ours, 3),
            }
        )
    rows.append(
        {
            "bench": "files",
            "direction": "memory",
            "n": 1,
            "daemon_growth_kib": after[0] - before[0],
            "agent_growth_kib": after[1] - before[1],
            "agent_kib": after[1],
        }
    )
    return {"host": host_facts(vmm=f"{node.vmm.kind.value} {node.vmm.version}"), "rows": rows}


async def _drain(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def _listening(running: Any) -> None:
    for _ in range(600):
        try:
            (await running.connect(PORT)).close()
            return
        except ConnectionRefusedError:  # the program has not come that far
            await asyncio.sleep(0.05)
    raise RuntimeError("the raw copy's server did not start")


async def _raw(running: Any, direction: str) -> None:
    loop = asyncio.get_running_loop()
    sock = await running.connect(PORT)
    with sock:
        if direction == "upload":
            await loop.sock_sendall(sock, b"u")
            piece = bytes(PIECE)
            for _ in range(SIZE // PIECE):
                await loop.sock_sendall(sock, piece)
            await loop.sock_recv(sock, 1)
        else:
            await loop.sock_sendall(sock, b"d")
            buffer = bytearray(PIECE)
            while await loop.sock_recv_into(sock, buffer):
                pass


async def _upload(client: Client, box: Box) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        piece = bytes(PIECE)
        for _ in range(SIZE // PIECE):
            yield piece

    connection = await client.dial()
    headers = {**box.headers, "Content-Type": "application/octet-stream"}
    response = await connection.request("POST", TARGET, headers.items(), pieces(), length=SIZE)
    answer = await response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"upload: {response.status} {answer!r}")


async def _download(client: Client, box: Box) -> None:
    connection = await client.dial()
    headers = {**box.headers, "Accept-Encoding": "identity"}
    response = await connection.request("GET", TARGET, headers.items())
    size = 0
    async for piece in response.body:
        size += len(piece)
    connection.close()
    if (response.status, size) != (200, SIZE):
        raise RuntimeError(f"download: {response.status}, {size} bytes")


def _memory() -> int:
    """Resident KiB of this process, which is the daemon."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


async def _agent_memory(processes: Processes) -> int:
    """Resident KiB of envd in the guest: the parent of whatever it starts."""
    text = b""
    async for event in processes.start("/bin/sh", ["-c", "cat /proc/$PPID/status"]):
        if isinstance(event, Output):
            text += event.data
    found = re.search(rb"VmRSS:\s+(\d+) kB", text)
    if found is None:
        raise RuntimeError(f"no memory figure of the agent: {text[:200]!r}")
    return int(found[1])
