"""Control client of the block server, for asyncio. One connection, many requests at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from aenv.errors import AenvError, InvalidInputError, UnavailableError
from ublk import protocol
from ublk.ranges import RemoteSpec


class BlockClient:
    """Methods raise the errors of `aenv.errors` that the server raised, or UnavailableError if it is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._gone: AenvError | None = None
        self._receiver = asyncio.create_task(self._receive(), name="block client")
        self.server: dict[str, Any] = {}  # the answer to `hello`: version, pid, front_ends, directory

    @classmethod
    async def connect(cls, socket_path: Path) -> Self:
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
        except OSError as error:
            raise UnavailableError(f"{socket_path}: no block server: {error.strerror}") from error
        client = cls(reader, writer)
        try:
            client.server = await client.call(protocol.Hello(client.new_id(), protocol.VERSION))
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; images stay open."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._lose(UnavailableError("the connection to the block server is closed"))
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def connected(self) -> bool:
        """False as soon as the connection has ended, for whatever reason."""
        return self._gone is None

    async def wait_lost(self) -> None:
        """Until the connection has ended."""
        await asyncio.wait([self._receiver])

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def call(self, request: protocol.Request) -> Any:
        """Send one request and wait for its result."""
        if self._gone is not None:
            raise self._gone
        message = protocol.frame(request)
        if len(message) > protocol.MAX_FRAME:
            raise InvalidInputError("request", "is too long")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        try:
            self._writer.write(message)
            with contextlib.suppress(ConnectionError):  # the receiver sees the end, and says so to all who wait
                await self._writer.drain()
            return await future
        finally:
            self._waiting.pop(request.id, None)

    async def _receive(self) -> None:
        try:
            while (body := await protocol.read_frame(self._reader)) is not None:
                self._deliver(msgspec.msgpack.decode(body))
            self._lose(UnavailableError("the block server has closed the connection"))
        except (AenvError, msgspec.DecodeError, KeyError, TypeError) as error:
            self._lose(UnavailableError(f"the block server answered nonsense: {error}"))

    def _deliver(self, reply: dict[str, Any]) -> None:
        if reply["id"] is None:
            self._lose(protocol.decode_error(reply["error"]))
            return
        future = self._waiting.get(reply["id"])
        if future is None or future.done():
            return
        if "error" in reply:
            future.set_exception(protocol.decode_error(reply["error"]))
        else:
            future.set_result(reply["ok"])

    def _lose(self, error: AenvError) -> None:
        self._gone = self._gone or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    # --- requests: see ublk.protocol for what each does -------------------------------------------------------

    async def create(
        self, data: Path, index: Path, size: int, *, uuid: str | None = None, parent_uuid: str = ""
    ) -> str:
        reply = await self.call(protocol.Create(self.new_id(), str(data), str(index), size, uuid, parent_uuid))
        return str(reply["uuid"])

    async def open(
        self,
        image: str,
        layers: Sequence[Path | RemoteSpec] = (),
        *,
        data: Path | None = None,
        index: Path | None = None,
        cached: bool = False,
        uid: int = 0,
        gid: int = 0,
        mode: int = 0o600,
        prefetch: Path | None = None,
        record: int = 0,
        front_end: str = "auto",
    ) -> dict[str, Any]:
        """Gives the description of the image; `path` is the file to use."""
        request = protocol.Open(
            self.new_id(),
            image,
            [layer if isinstance(layer, RemoteSpec) else str(layer) for layer in layers],
            None if data is None else str(data),
            None if index is None else str(index),
            cached,
            uid,
            gid,
            mode,
            None if prefetch is None else str(prefetch),
            record,
            front_end,
        )
        reply: dict[str, Any] = await self.call(request)
        return reply

    async def trace(self, image: str, path: Path) -> int:
        """Gives the number of chunks that were recorded."""
        reply = await self.call(protocol.Trace(self.new_id(), image, str(path)))
        return int(reply["chunks"])

    async def close_image(self, image: str) -> None:
        await self.call(protocol.Close(self.new_id(), image))

    async def restack(self, image: str, data: Path, index: Path, *, uuid: str | None = None) -> Path:
        """Gives the path of the layer that was sealed."""
        reply = await self.call(protocol.Restack(self.new_id(), image, str(data), str(index), uuid))
        return Path(reply["sealed"])

    async def replace(self, image: str, layers: Sequence[Path]) -> None:
        await self.call(protocol.Replace(self.new_id(), image, [str(layer) for layer in layers]))

    async def seal(self, data: Path, index: Path) -> None:
        await self.call(protocol.Seal(self.new_id(), str(data), str(index)))

    async def flush(self, image: str) -> None:
        await self.call(protocol.Flush(self.new_id(), image))

    async def stats(self, image: str | None = None) -> dict[str, Any]:
        reply: dict[str, Any] = await self.call(protocol.Stats(self.new_id(), image))
        return reply

    async def list_images(self) -> list[dict[str, Any]]:
        reply: list[dict[str, Any]] = await self.call(protocol.List(self.new_id()))
        return reply

    async def resize(self, image: str, size: int) -> None:
        await self.call(protocol.Resize(self.new_id(), image, size))

    async def shutdown(self, *, force: bool = False) -> None:
        await self.call(protocol.Shutdown(self.new_id(), force))
