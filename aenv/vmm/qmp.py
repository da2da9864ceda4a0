"""A lean client of QEMU's machine protocol: JSON lines over one Unix socket, watched by the loop, without a task.

The socket is handled directly and not through an asyncio transport, because descriptors travel with a command as
SCM_RIGHTS, which transports cannot send.
"""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aenv.errors import VmmError

T = TypeVar("T")

MESSAGE_LIMIT = 4 << 20  # bytes of one line from the VMM; the largest real answer (a block graph) has some 10 kB
CHUNK = 64 << 10


class _Failure(msgspec.Struct):
    desc: str
    error_class: str = msgspec.field(name="class", default="GenericError")


_NONE = msgspec.Raw()  # an absent field: no JSON value is empty


class _Message(msgspec.Struct):
    """Any line from QEMU: exactly one of greeting, answer, error and event."""

    greeting: msgspec.Raw = msgspec.field(name="QMP", default=_NONE)
    answer: msgspec.Raw = msgspec.field(name="return", default=_NONE)
    error: _Failure | None = None
    event: str | None = None
    data: dict[str, Any] = {}
    id: int | None = None


def bind(directory: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A listening socket `directory/name` to hand to a VMM: a client can connect before the VMM has even started."""
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        # Through the directory's descriptor, because a socket address holds at most 107 bytes of path.
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{fd}/{name}")
        finally:
            os.close(fd)
        listener.listen(2)
    except BaseException:
        listener.close()
        raise
    return listener


class Qmp:
    """One connection. `on_event(name, data)` runs for each event, `on_close()` once when the VMM closes it.

    Every method raises VmmError when the connection is closed, when the VMM breaks the protocol, or after a time-out.
    """

    def __init__(self, on_event: Callable[[str, dict[str, Any]], None], on_close: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._on_close = on_close
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._buffer = bytearray()
        self._decoder = msgspec.json.Decoder(_Message)
        self._greeting: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._next_id = 0
        self._why_closed = ""

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        on_event: Callable[[str, dict[str, Any]], None],
        on_close: Callable[[], None],
        timeout: float = 20,
    ) -> Qmp:
        """Connect to the socket `path`, wait for the greeting and negotiate."""
        self = cls(on_event, on_close)
        try:
            self._open(path)
            async with asyncio.timeout(timeout):
                await self._greeting
            await self.execute("qmp_capabilities", timeout=timeout)
        except TimeoutError:
            self.close()
            raise VmmError(f"the VMM did not greet within {timeout:g} s") from None
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, path: Path) -> None:
        try:
            fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                self._socket.connect(f"/proc/self/fd/{fd}/{path.name}")
            finally:
                os.close(fd)
        except OSError as error:
            raise VmmError(f"cannot connect to the VMM at {path}: {error.strerror}") from error
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self, why: str = "the connection was closed") -> None:
        """Close and fail all commands in flight. `on_close` does not run. May be called twice."""
        if self.closed:
            return
        self._why_closed = why
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        futures: list[asyncio.Future[Any]] = [self._greeting, *self._waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(VmmError(why))
                future.exception()  # marks it as seen: nobody may be waiting any more
        self._waiting.clear()

    async def execute(
        self, command: str, arguments: dict[str, Any] | None = None, *, fd: int = -1, timeout: float = 10
    ) -> Any:
        """Run a command and return its plain answer. `fd` travels with it."""
        return await self.query(command, Any, arguments, fd=fd, timeout=timeout)

    async def query(
        self,
        command: str,
        answer: type[T] | Any,
        arguments: dict[str, Any] | None = None,
        *,
        fd: int = -1,
        timeout: float = 10,
    ) -> T:
        """`execute` whose answer must have the type `answer`."""
        if self.closed:
            raise VmmError(f"{command}: {self._why_closed}")
        self._next_id += 1
        number = self._next_id
        future: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._waiting[number] = future
        try:
            message: dict[str, Any] = {"execute": command, "id": number}
            self._send(message | {"arguments": arguments} if arguments else message, fd)
            async with asyncio.timeout(timeout):
                raw = await future
            decoded: T = msgspec.json.decode(raw, type=answer)
            return decoded
        except TimeoutError:
            raise VmmError(f"{command}: no answer within {timeout:g} s") from None
        except VmmError as error:
            raise VmmError(f"{command}: {error.message}") from None
        except msgspec.DecodeError as error:
            raise VmmError(f"{command}: unexpected answer: {error}") from error
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: dict[str, Any], fd: int) -> None:
        data = msgspec.json.encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))] if fd >= 0 else []
        try:
            sent = self._socket.sendmsg([data], rights)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(f"the VMM closed the connection ({error.strerror})")
            raise VmmError(self._why_closed) from error
        # Commands are far smaller than a socket buffer: one that does not fit meets a VMM that has stopped reading.
        if sent != len(data):
            self._lost("the VMM does not read its commands")
            raise VmmError(self._why_closed)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(f"the VMM closed the connection ({error.strerror})")
            return
        if not data:
            self._lost("the VMM closed the connection")
            return
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            if self.closed:
                return
            if line.strip():
                self._take(line)
        if len(self._buffer) > MESSAGE_LIMIT:
            self._lost(f"the VMM sent a line of more than {MESSAGE_LIMIT} bytes")

    def _lost(self, why: str) -> None:
        if not self.closed:
            self.close(why)
            self._on_close()

    def _take(self, line: bytearray) -> None:
        try:
            message = self._decoder.decode(line)
        except msgspec.DecodeError as error:
            self._lost(f"the VMM broke the protocol: {error}")
            return
        if message.event is not None:
            self._on_event(message.event, message.data)
        elif bytes(message.greeting):
            if not self._greeting.done():
                self._greeting.set_result(None)
        elif message.id is None:
            self._lost("the VMM broke the protocol: an answer without id")
        elif (future := self._waiting.get(message.id)) is not None and not future.done():
            # An answer to a command that timed out has no future any more and is dropped.
            if message.error is not None:
                future.set_exception(VmmError(message.error.desc))
            elif bytes(message.answer):
                future.set_result(message.answer)
            else:
                future.set_exception(VmmError("an answer that is neither result nor error"))
