"""The command line's way to a daemon: where it is, which key opens it, and one call of its API."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from aenv.agent.client import ENVD_PORT
from aenv.agent.process import Processes
from aenv.daemon import Daemon
from aenv.errors import AenvError, InvalidInputError, UnavailableError
from aenv.http.client import Connection, ConnectionLostError
from aenv.http.head import ProtocolError
from aenv.http.message import HttpError

ANSWER_LIMIT = 16 << 20  # bytes
_URL = re.compile(r"[!-~]+")
_KEY = re.compile(r"[!-~]+")


def segment(text: str) -> str:
    """A word of the command line, which may be any bytes, as one segment of a path."""
    return quote(text, safe="", errors="surrogateescape")


class ApiError(AenvError):
    """The daemon said no; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """A daemon. The address comes from `--url`, AENV_URL, E2B_API_URL or the home; the key from AENV_API_KEY,
    E2B_API_KEY or the home."""

    def __init__(self, url: str, key: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or not _URL.fullmatch(url):
            raise UnavailableError(f"{url!r} is not an address of a daemon", hint="use http://HOST:PORT")
        if not _KEY.fullmatch(key):
            raise UnavailableError("the API key is not valid", hint="AENV_API_KEY holds e2b_ and hexadecimal digits")
        self.url = url.rstrip("/")
        self._key = key
        self._address = (parts.hostname, port)

    @classmethod
    def find(cls, home: Path, url: str | None = None) -> Remote:
        """Raises UnavailableError that says what to start or to set."""
        url = url or os.environ.get("AENV_URL") or os.environ.get("E2B_API_URL")
        key = os.environ.get("AENV_API_KEY") or os.environ.get("E2B_API_KEY")
        try:
            if url is None:
                url = Daemon.read(home).url
            if key is None:
                key = (home / "secrets/api-key").read_text().strip()
        except FileNotFoundError as error:
            raise UnavailableError(
                f"no daemon has been started with home {home}",
                hint="start `aenv serve`, or say where it is: --home DIR, or AENV_URL and AENV_API_KEY",
            ) from error
        except PermissionError as error:
            raise UnavailableError(
                f"{error.filename} is readable for its owner only", hint="set AENV_API_KEY, or run as the daemon's user"
            ) from error
        except (msgspec.MsgspecError, OSError, UnicodeDecodeError) as error:
            raise UnavailableError(
                f"the home {home} does not tell of its daemon: {error}", hint="set AENV_URL"
            ) from error
        return cls(url, key.strip())

    async def open(self) -> Connection:
        """A connection to the daemon. Raises UnavailableError when nothing listens."""
        host, port = self._address
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(10)
            sock.connect(address)
            sock.setblocking(False)
            return await Connection.open(sock)
        except OSError as error:
            raise UnavailableError(
                f"no daemon answers at {self.url}: {error.strerror or error}", hint="is `aenv serve` running?"
            ) from error

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """One API call; the decoded answer, or None for an empty one. Raises ApiError or UnavailableError."""
        answer, _ = await self._call(method, path, body)
        return answer

    async def pages(self, path: str, **query: str) -> list[Any]:
        """All pages of a list; parameters of `query` that are empty are left out."""
        found: list[Any] = []
        token = ""
        while True:
            given = query | ({"limit": "100", "nextToken": token} if token else {})
            target = urlencode({k: v for k, v in given.items() if v}, errors="surrogateescape")
            page, token = await self._call("GET", f"{path}?{target}" if target else path)
            found += page
            if not token:
                return found

    async def _call(self, method: str, path: str, body: Any = None) -> tuple[Any, str]:
        """The decoded answer and the token of the next page, if there is one."""
        headers = {"Host": urlsplit(self.url).netloc, "X-API-Key": self._key}
        content: bytes | None = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            try:
                content = msgspec.json.encode(body)
            except UnicodeEncodeError as error:  # words of a command line may be any bytes, JSON may not
                raise InvalidInputError(ascii(error.object), "is not UTF-8") from error
        connection = await self.open()
        try:
            response = await connection.request(method, path, headers.items(), content)
            answer = await response.read(ANSWER_LIMIT)
        except (ConnectionLostError, ProtocolError, HttpError) as error:
            raise UnavailableError(f"the daemon at {self.url} hung up: {error.message}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(response.status, _message(answer, response.status))
        try:
            decoded = msgspec.json.decode(answer) if answer else None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UnavailableError(
                f"what answers at {self.url} is not a daemon", hint="look at --url and AENV_URL"
            ) from error
        return decoded, response.headers.get("x-next-token") or ""

    async def processes(self, sandbox_id: str, user: str | None = None) -> Processes:
        """The processes of a running sandbox, through the daemon's proxy; resumes it when it is paused."""
        box = await self.call("POST", f"/v2/sandboxes/{segment(sandbox_id)}/connect", {})
        headers = {
            "Host": urlsplit(self.url).netloc,
            "E2b-Sandbox-Id": sandbox_id,
            "E2b-Sandbox-Port": str(ENVD_PORT),
        }
        if isinstance(box, dict) and (token := box.get("envdAccessToken")):
            headers["X-Access-Token"] = token
        return Processes(self.open, headers, user)


def _message(answer: bytes, status: int) -> str:
    fallback = f"the daemon answered with status {status}"
    try:
        decoded: Mapping[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return fallback
    return str(decoded.get("message", fallback))
