"""Connections into one incarnation of a sandbox: opened, kept for reuse, and dropped together when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aenv.errors import AenvError
from aenv.http.client import Connection, ConnectionLostError
from aenv.http.head import ProtocolError
from aenv.proxy.target import ENVD_PORT, Target

DIAL_PROTOCOL = "aenv-dial"


class PortClosedError(AenvError):
    """Nothing listens on the port, neither outside nor on the guest's loopback."""


class TooManyConnectionsError(AenvError):
    """The sandbox has as many connections as it may have."""


class EndedError(AenvError):
    """The incarnation has ended, and nothing of the request was sent."""


class Upstream:
    """All connections to one incarnation. Idle ones are kept per port, newest first; a connection is either idle here
    or in the hands of one exchange, which gives it back by `release`.

    When `target.closed` is done everything is aborted, then `on_ended` is called.
    """

    def __init__(self, target: Target, *, max_connections: int, max_idle: int, on_ended: Callable[[], None]) -> None:
        self.target = target
        self._max_connections = max_connections
        self._max_idle = max_idle
        self._on_ended = on_ended
        self._idle: dict[int, list[tuple[float, Connection]]] = {}
        self._busy: set[Connection] = set()
        self._opening = 0
        self._streams: set[Callable[[], None]] = set()
        target.closed.add_done_callback(self._target_closed)

    @property
    def ended(self) -> bool:
        """Whether the incarnation is over."""
        return self.target.closed.done()

    @property
    def size(self) -> int:
        """Connections that are open or being opened."""
        return len(self._busy) + self._opening + len(self._streams) + sum(map(len, self._idle.values()))

    def reuse(self, port: int) -> Connection | None:
        """An idle connection to `port`, if there is a live one."""
        kept = self._idle.get(port)
        while kept:
            _, connection = kept.pop()
            if connection.reusable:
                self._busy.add(connection)
                return connection
        return None

    async def open(self, port: int) -> Connection:
        """A new connection to `port`; through the agent when only the guest's loopback listens there. Raises
        PortClosedError, TooManyConnectionsError, TimeoutError, OSError, and EndedError at once when it is over."""
        if self.size >= self._max_connections and not self._drop_idle():
            raise TooManyConnectionsError("too many connections to the sandbox")
        self._opening += 1
        opening = asyncio.ensure_future(self._open(port))
        try:
            # A guest that has stopped answers nothing: its end must not have to wait for a time-out.
            await asyncio.wait((opening, self.target.closed), return_when=asyncio.FIRST_COMPLETED)
            if self.ended:
                raise EndedError("the sandbox has ended")
            connection = opening.result()
        except BaseException:
            opening.add_done_callback(_abort_opened)
            opening.cancel()
            raise
        finally:
            self._opening -= 1
        self._busy.add(connection)
        return connection

    async def _open(self, port: int) -> Connection:
        try:
            return await self._connect(port)
        except ConnectionRefusedError as error:
            if port == ENVD_PORT:
                raise PortClosedError("the agent does not listen") from error
            return await self._dial(port)

    async def _connect(self, port: int) -> Connection:
        return await Connection.open(await self.target.connect(port))

    async def _dial(self, port: int) -> Connection:
        """Ask the agent for a relay to 127.0.0.1 or ::1 of the guest."""
        try:
            connection = await self._connect(ENVD_PORT)
        except ConnectionRefusedError as error:
            raise PortClosedError("the agent does not listen") from error
        fields = [("Host", f"127.0.0.1:{ENVD_PORT}"), ("Connection", "Upgrade"), ("Upgrade", DIAL_PROTOCOL)]
        if self.target.envd_token is not None:
            fields.append(("X-Access-Token", self.target.envd_token))
        try:
            response = await connection.request("GET", f"/dial?port={port}", fields)
            if response.status != 101:
                raise PortClosedError(f"the agent answered {response.status} to dial")
            connection.restart()
        except (ProtocolError, ConnectionLostError) as error:
            connection.abort()
            raise PortClosedError("the agent cannot dial") from error
        except BaseException:
            connection.abort()
            raise
        return connection

    def release(self, port: int, connection: Connection, now: float) -> None:
        """An exchange is over: keep the connection when it can be used again, else close it."""
        self._busy.discard(connection)
        kept = self._idle.setdefault(port, [])
        if connection.reusable and not self.ended and len(kept) < self._max_idle:
            kept.append((now, connection))
        elif not connection.closed:
            connection.abort()

    def keep_stream(self, abort: Callable[[], None], connection: Connection) -> None:
        """An exchange has become a raw stream: `abort` drops it when the incarnation ends."""
        self._busy.discard(connection)
        self._streams.add(abort)
        if self.ended:
            abort()

    def forget_stream(self, abort: Callable[[], None]) -> None:
        """The raw stream has ended."""
        self._streams.discard(abort)

    def expire(self, before: float) -> bool:
        """Close connections idle since before loop time `before`. True while any connection is left."""
        for port, kept in list(self._idle.items()):
            live = [(since, c) for since, c in kept if since > before and c.reusable]
            for _, connection in kept:
                if all(connection is not c for _, c in live):
                    connection.abort()
            if live:
                self._idle[port] = live
            else:
                del self._idle[port]
        return self.size > 0

    def close(self) -> None:
        """Drop everything."""
        self.target.closed.remove_done_callback(self._target_closed)
        self._abort_all()

    def _drop_idle(self) -> bool:
        for kept in self._idle.values():
            if kept:
                kept.pop(0)[1].abort()
                return True
        return False

    def _target_closed(self, _: asyncio.Future[None]) -> None:
        self._abort_all()
        self._on_ended()

    def _abort_all(self) -> None:
        for kept in self._idle.values():
            for _, connection in kept:
                connection.abort()
        self._idle.clear()
        for connection in list(self._busy):
            connection.abort()
        self._busy.clear()
        for abort in list(self._streams):
            abort()
        self._streams.clear()


def _abort_opened(opening: asyncio.Future[Connection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abort()
