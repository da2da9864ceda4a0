"""A lean HTTP client of a node, for measuring without the SDK's own cost."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aenv.agent.client import ENVD_PORT
from aenv.agent.process import Ended, Output, Processes
from aenv.http.client import ClientResponse, Connection
from aenv.node import Node


@dataclass(frozen=True)
class Box:
    """A sandbox seen from outside."""

    client: Client
    id: str
    headers: Mapping[str, str]

    async def true(self) -> None:
        """What `commands.run("true")` of the SDK sends."""
        await run_true(Processes(self.client.dial, self.headers))

    async def output(self, command: Sequence[str]) -> bytes:
        """What a command in the sandbox prints. Raises RuntimeError when it fails."""
        text = b""
        async for event in Processes(self.client.dial, self.headers).start(command[0], command[1:]):
            if isinstance(event, Output):
                text += event.data
            elif isinstance(event, Ended) and event.exit_code != 0:
                raise RuntimeError(f"{command[0]} ended with {event.status}: {text!r}")
        return text


class Client:
    """Calls of the API over one kept connection; sandboxes over connections of their own."""

    def __init__(self, node: Node) -> None:
        self._address = ("127.0.0.1", int(node.url.rpartition(":")[2]))
        self._headers = {"Host": "127.0.0.1", "X-API-Key": node.api_key}
        self._control: Connection | None = None

    async def dial(self) -> Connection:
        sock = socket.socket()
        sock.setblocking(False)
        return await Connection.open(sock, self._address)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """One API call. Raises RuntimeError for an error answer."""
        if self._control is None or not self._control.reusable:
            self._control = await self.dial()
        content = None if body is None else msgspec.json.encode(body)
        response: ClientResponse = await self._control.request(method, path, self._headers.items(), content)
        answer = await response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer!r}")
        return msgspec.json.decode(answer) if answer else None

    async def create(self) -> Box:
        made = await self.call("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 3600})
        headers = {
            "Host": "127.0.0.1",
            "E2b-Sandbox-Id": made["sandboxID"],
            "E2b-Sandbox-Port": str(ENVD_PORT),
            "X-Access-Token": made["envdAccessToken"],
        }
        return Box(self, made["sandboxID"], headers)

    async def kill(self, box: Box) -> None:
        await self.call("DELETE", f"/sandboxes/{box.id}")

    def close(self) -> None:
        if self._control is not None:
            self._control.close()


async def run_true(processes: Processes) -> None:
    """Run `true` in a login shell and wait for its end."""
    async for event in processes.start("/bin/bash", ["-l", "-c", "true"]):
        if isinstance(event, Ended) and event.exit_code != 0:
            raise RuntimeError(f"true ended with {event.status}")
