"""Host-side client of envd, the guest agent: what the daemon itself asks of a guest.

One connection per request: the socket is opened inside the sandbox's namespace and never outlives the incarnation of
the guest it was opened to.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from aenv.errors import AenvError, GuestError
from aenv.http.client import Connection

ENVD_PORT = 49983
ENTROPY_BYTES = 64
ANSWER_LIMIT = 1 << 20  # bytes
Connect = Callable[[int], Awaitable[socket.socket]]  # opens a connected non-blocking socket to a port of the guest


class Init(msgspec.Struct, omit_defaults=True, rename="camel"):
    """Body of POST /init. `timestamp` is RFC 3339; `entropy` is base64, mixed into the guest's random pool."""

    env_vars: dict[str, str]
    access_token: str | None
    timestamp: str
    default_user: str
    default_workdir: str
    hostname: str
    machine_id: str
    entropy: str
    sandbox_id: str
    template_id: str
    lifecycle_id: str = msgspec.field(name="lifecycleID")


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class AgentMetrics(msgspec.Struct):
    """Answer of GET /metrics: bytes and per cent."""

    ts: Count
    cpu_count: Count
    cpu_used_pct: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    mem_total: Count
    mem_used: Count
    disk_used: Count
    disk_total: Count
    mem_cache: Count = 0


def identity(
    sandbox_id: str,
    template_id: str,
    *,
    token: str | None,
    env: Mapping[str, str],
    user: str,
    workdir: str,
    incarnation: str,
    machine_id: str,
) -> Init:
    """The body of /init for one incarnation of a sandbox: what must be its own, and entropy nobody else gets."""
    return Init(
        env_vars=dict(env),
        access_token=token,
        timestamp=datetime.now(UTC).isoformat(),
        default_user=user,
        default_workdir=workdir,
        hostname=sandbox_id,
        machine_id=machine_id,
        entropy=base64.b64encode(os.urandom(ENTROPY_BYTES)).decode(),
        sandbox_id=sandbox_id,
        template_id=template_id,
        lifecycle_id=incarnation,
    )


class Agent:
    """The agent of one incarnation of one guest. Methods raise GuestError."""

    def __init__(self, connect: Connect, token: str | None) -> None:
        self._connect = connect
        self._token = token

    async def init(self, body: Init) -> None:
        """Give the guest its identity, clock and entropy. Answered means the agent is ready for users."""
        await self._call("POST", "/init", msgspec.json.encode(body))

    async def metrics(self) -> AgentMetrics:
        raw = await self._call("GET", "/metrics")
        try:
            return msgspec.json.decode(raw, type=AgentMetrics)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise GuestError(f"envd's metrics are not valid: {error}") from error

    async def health(self) -> None:
        """Ask whether the agent answers at all."""
        await self._call("GET", "/health")

    async def sync(self) -> None:
        """Have the guest's disk hold everything that was written to it."""
        await self._call("POST", "/sync")

    async def _call(self, method: str, target: str, body: bytes | None = None) -> bytes:
        headers: Mapping[str, str] = {"Host": "guest"}
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        if self._token is not None:
            headers = {**headers, "X-Access-Token": self._token}
        try:
            connection = await Connection.open(await self._connect(ENVD_PORT))
            try:
                response = await connection.request(method, target, headers.items(), body)
                content = await response.read(ANSWER_LIMIT)
            finally:
                connection.close()
        except (OSError, AenvError) as error:
            raise GuestError(f"envd {method} {target}: {str(error) or type(error).__name__}") from error
        if response.status >= 300:
            raise GuestError(f"envd {method} {target}: {response.status} {_message(content)}")
        return content


def _message(content: bytes) -> str:
    try:
        answer: Any = msgspec.json.decode(content)
        return str(answer["message"])[:1000]
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError):
        return content[:200].decode("utf-8", "replace")
