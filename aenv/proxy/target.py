"""What the data plane needs from the rest of the system: a way to find a sandbox, and a way to connect into it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from aenv.errors import AenvError, ConflictError, NotFoundError

ENVD_PORT = 49983  # where the guest agent listens in every sandbox


class SandboxNotFoundError(NotFoundError):
    """The sandbox is unknown, killed, or paused and not to be woken by traffic."""

    def __init__(self) -> None:
        super().__init__("The sandbox was not found")


class TransitionError(ConflictError):
    """The sandbox changes its state and did not come to rest in time."""


class ResumeDeniedError(AenvError):
    """The sandbox is paused and may not be resumed by this traffic."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running sandbox. `incarnation` changes each time its guest is restored, resumed or moved: connections to one
    incarnation are never used for another."""

    sandbox_id: str
    incarnation: str
    connect: Callable[[int], Awaitable[socket.socket]]
    """Open a connected, non-blocking socket to a TCP port of the guest, from inside the sandbox's network namespace.
    Raises ConnectionRefusedError, TimeoutError, OSError."""
    closed: asyncio.Future[None]
    """Done when this incarnation ends (paused, killed, died): every connection to it is dropped at once."""
    envd_token: str | None = None  # what envd wants as X-Access-Token, None when it is open
    mask_host: str | None = None  # Host header for user ports; `${PORT}` stands for the port
    ended: Callable[[], None] = field(default=lambda: None)  # called when the exchange that this was made for is over


class Resolver(Protocol):
    """Finds sandboxes by id."""

    def traffic_token(self, sandbox_id: str) -> str | None:
        """The token that every port but envd's requires, None when the sandbox's traffic is public or there is no such
        sandbox. Asked before `resolve`, so that a stranger cannot wake a private sandbox."""

    async def resolve(self, sandbox_id: str, port: int, request_path: str, envd: bool) -> Target:
        """The running sandbox; may wake a paused one and wait for it. Raises SandboxNotFoundError, TransitionError,
        ResumeDeniedError, or any other AenvError when waking failed."""
