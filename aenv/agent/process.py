"""Client of envd's `process.Process` service: Connect-RPC with the JSON codec.

Streams are frames of one flag byte, four bytes of big-endian length, and JSON; flag 2 marks the last one, which
carries the error if there was one (https://connectrpc.com/docs/protocol).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aenv.errors import GuestError
from aenv.http.client import ClientResponse, Connection, ConnectionLostError
from aenv.http.head import ProtocolError
from aenv.http.message import HttpError

END_STREAM = 0x02
MAX_FRAME = 4 << 20  # bytes; envd sends at most 32 KiB of output a frame
KEEPALIVE_SECONDS = 50
CHANNELS = ("stdout", "stderr", "pty")
# The words for signals 1 to 15, which are those of Go's syscall package.
SIGNALS = (
    "", "hangup", "interrupt", "quit", "illegal instruction", "trace/breakpoint trap", "aborted", "bus error",
    "floating point exception", "killed", "user defined signal 1", "segmentation fault", "user defined signal 2",
    "broken pipe", "alarm clock", "terminated",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes from the process; `channel` is stdout, stderr or pty."""

    channel: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """`exit_code` is -1 when a signal ended it; `status` says which."""

    exit_code: int
    status: str

    @property
    def shell_status(self) -> int:
        """The status as a shell reports it: 128 and the number for a signal."""
        if self.exit_code >= 0:
            return self.exit_code & 0xFF
        name = self.status.removeprefix("signal: ").removesuffix(" (core dumped)")
        number = name.removeprefix("signal ")
        if number.isascii() and number.isdigit():
            return 128 + min(int(number), 127)
        return 128 + SIGNALS.index(name) if name in SIGNALS else 255


Event = Started | Output | Ended


class Processes:
    """The processes of one sandbox. Methods raise GuestError with the agent's words."""

    def __init__(
        self, dial: Callable[[], Awaitable[Connection]], headers: Mapping[str, str], user: str | None = None
    ) -> None:
        """`dial` opens a connection that, with `headers`, leads to the sandbox's envd."""
        self._dial = dial
        self._fixed = dict(headers)
        self._user = user

    async def start(
        self,
        command: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pty: tuple[int, int] | None = None,
        stdin: bool = False,
        tag: str | None = None,
    ) -> AsyncIterator[Event]:
        """Run a program and yield what it does, `Started` first and `Ended` last. `pty` is (columns, rows)."""
        config: dict[str, Any] = {"cmd": command, "args": list(arguments), "envs": dict(env or {})}
        if cwd is not None:
            config["cwd"] = cwd
        request: dict[str, Any] = {"process": config, "stdin": stdin}
        if pty is not None:
            request["pty"] = {"size": {"cols": pty[0], "rows": pty[1]}}
        if tag is not None:
            request["tag"] = tag
        async for message in self._stream("Start", request):
            event = _event(message)
            if event is not None:
                yield event

    async def send_input(self, pid: int, data: bytes, *, pty: bool) -> None:
        text = base64.b64encode(data).decode()
        await self._unary("SendInput", {"process": {"pid": pid}, "input": {"pty" if pty else "stdin": text}})

    async def close_stdin(self, pid: int) -> None:
        await self._unary("CloseStdin", {"process": {"pid": pid}})

    async def resize(self, pid: int, columns: int, rows: int) -> None:
        await self._unary("Update", {"process": {"pid": pid}, "pty": {"size": {"cols": columns, "rows": rows}}})

    async def signal(self, pid: int, name: str) -> None:
        """`name` is SIGNAL_SIGTERM or SIGNAL_SIGKILL."""
        await self._unary("SendSignal", {"process": {"pid": pid}, "signal": name})

    def _headers(self, content_type: str) -> list[tuple[str, str]]:
        headers = {**self._fixed, "Content-Type": content_type, "Connect-Protocol-Version": "1"}
        if self._user is not None:
            headers["Authorization"] = "Basic " + base64.b64encode(f"{self._user}:".encode()).decode()
        return list(headers.items())

    async def _unary(self, method: str, request: Mapping[str, Any]) -> Any:
        connection = await self._dial()
        try:
            response = await connection.request(
                "POST", f"/process.Process/{method}", self._headers("application/json"), msgspec.json.encode(request)
            )
            content = await response.read(MAX_FRAME)
        except (ConnectionLostError, ProtocolError, HttpError) as error:
            raise GuestError(f"{method}: {error.message}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise _refusal(method, response.status, content)
        return _decode(content)

    async def _stream(self, method: str, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        headers = self._headers("application/connect+json")
        headers.append(("Keepalive-Ping-Interval", str(KEEPALIVE_SECONDS)))
        body = msgspec.json.encode(request)
        connection = await self._dial()
        try:
            response = await connection.request(
                "POST", f"/process.Process/{method}", headers, struct.pack(">BI", 0, len(body)) + body
            )
            if response.status != 200:
                raise _refusal(method, response.status, await response.read(MAX_FRAME))
            async for flags, content in _frames(response):
                message = _decode(content)
                if flags & END_STREAM:
                    if (error := message.get("error")) is not None:
                        raise GuestError(str(error.get("message", error) if isinstance(error, dict) else error))
                    return
                yield message
            raise GuestError("the connection to the sandbox ended in the middle of a stream")
        except (ConnectionLostError, ProtocolError, HttpError) as error:
            raise GuestError(f"{method}: {error.message}") from error
        finally:
            connection.close()


async def _frames(response: ClientResponse) -> AsyncIterator[tuple[int, bytes]]:
    buffer = bytearray()
    async for chunk in response.body:
        buffer += chunk
        while len(buffer) >= 5:
            flags, length = struct.unpack_from(">BI", buffer)
            if length > MAX_FRAME:
                raise GuestError(f"a frame of {length} bytes is longer than {MAX_FRAME}")
            if len(buffer) < 5 + length:
                break
            content = bytes(buffer[5 : 5 + length])
            del buffer[: 5 + length]
            yield flags, content


def _decode(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GuestError(f"not a JSON object: {content[:200]!r}") from error


def _refusal(method: str, status: int, content: bytes) -> GuestError:
    try:
        message = _decode(content).get("message")
    except GuestError:
        message = None
    return GuestError(str(message) if message else f"{method} failed with status {status}")


def _event(message: Mapping[str, Any]) -> Event | None:
    """One message of a Start or Connect stream; None for a keep-alive. Raises GuestError for anything else."""
    try:
        event = message["event"]
        if "start" in event:
            return Started(int(event["start"]["pid"]))
        if "data" in event:
            channel, text = next(iter(event["data"].items()))
            if channel in CHANNELS:
                return Output(channel, base64.b64decode(text, validate=True))
        if "end" in event:
            end = event["end"]
            return Ended(int(end.get("exitCode", 0)), str(end.get("status", "")))
        if "keepalive" in event:
            return None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, StopIteration) as error:
        raise GuestError(f"not a process event: {str(message)[:200]}") from error
    raise GuestError(f"not a process event: {str(message)[:200]}")
