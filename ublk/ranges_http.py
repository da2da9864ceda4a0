"""Ranges of HTTP resources, with the token and redirect flow of OCI registries.

A registry answers 401 with the place where a token is to be had; with the token it answers with a redirect to a storage
service, which must be asked without the token (it may take it for a signature of its own). Tokens and redirects are
kept as long as they are good. (OCI distribution specification, and the registry's token authentication page.)
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import urllib3

from aenv.errors import InvalidInputError
from ublk.ranges import Arrived, HttpSpec, RangeError, absolute_path, check_deadline

CONNECT_SECONDS = 5
SILENCE_SECONDS = 10  # without a byte
REDIRECTS = 5
HOSTS = 64  # whose connections are kept
REDIRECT_SECONDS = 300  # a redirect is used for so long; signed addresses live longer
TOKEN_SECONDS = 60  # if the answer does not say: what the specification says, minus a margin below
TOKEN_MARGIN = 10
TOKEN_ANSWER = 1 << 20  # bytes
PIECE = 256 << 10
REDIRECT_CODES = (301, 302, 303, 307, 308)
_CHALLENGE = re.compile(r'([A-Za-z][A-Za-z0-9_-]*)="((?:[^"\\]|\\.)*)"|([A-Za-z][A-Za-z0-9_-]*)=([^",\s]+)')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def parse_challenge(header: str) -> tuple[str, dict[str, str]]:
    """Scheme (lower case) and parameters of a WWW-Authenticate header."""
    scheme, _, rest = header.strip().partition(" ")
    found = {}
    for quoted_name, quoted, name, plain in _CHALLENGE.findall(rest):
        found[(quoted_name or name).lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted_name else plain
    return scheme.lower(), found


def read_credentials(path: Path) -> dict[str, str]:
    """Raises RangeError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RangeError(f"credentials {path}: {error}", permanent=True) from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise RangeError(f"credentials {path}: not a map of texts", permanent=True)
    return found


class Tokens:
    """Authorization headers by what they are for, shared by all layers of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], tuple[str, float]] = {}

    def get(self, key: tuple[str, ...]) -> str | None:
        with self._lock:
            value, until = self._known.get(key, ("", 0.0))
            return value if time.monotonic() < until else None

    def put(self, key: tuple[str, ...], value: str, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._known = {k: v for k, v in self._known.items() if v[1] > now}
            self._known[key] = value, now + seconds


class HttpShared:
    """What all layers of a server have in common: tokens and connections."""

    def __init__(self, connections: int) -> None:
        """`connections`: to one host, that are kept."""
        self.tokens = Tokens()
        self._connections = connections
        self._lock = threading.Lock()
        self._pools: dict[str | None, urllib3.PoolManager] = {}

    def pool(self, ca: str | None) -> urllib3.PoolManager:
        with self._lock:
            if ca not in self._pools:
                self._pools[ca] = urllib3.PoolManager(
                    num_pools=HOSTS, maxsize=self._connections, ca_certs=ca, retries=False
                )
            return self._pools[ca]


class HttpRanges:
    def __init__(self, spec: HttpSpec, size: int, shared: HttpShared) -> None:
        parts = urlsplit(spec.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidInputError("layers.source.url", f"{spec.url!r} is not an address of http or https")
        self._url = spec.url
        self._size = size
        self._credentials = spec.credentials and absolute_path("layers.source.credentials", spec.credentials)
        self._tokens = shared.tokens
        self._challenge: tuple[str, ...] | None = None  # the key of our token
        self._lock = threading.Lock()  # the redirect, and one token request at a time
        self._redirect: tuple[str, float] | None = None
        ca = str(absolute_path("layers.source.ca", spec.ca)) if spec.ca else None
        self._http = shared.pool(ca)

    def read_into(self, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        try:
            response = self._open(offset, len(view), deadline)
            try:
                self._receive(response, offset, view, arrived, deadline)
            except BaseException:
                response.close()  # what is left of the answer must not be taken for the next one
                raise
            response.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise RangeError(f"{self._url}: {error}") from error

    def _receive(self, response: Any, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        done = 0
        while done < len(view):
            check_deadline(deadline)
            piece = response.read1(min(PIECE, len(view) - done), decode_content=False)
            if not piece:
                raise RangeError(f"{self._url}: the answer ended at byte {offset + done}")
            view[done : done + len(piece)] = piece
            done += len(piece)
            arrived(done)

    def _open(self, offset: int, length: int, deadline: float) -> Any:
        """The response whose body is the range."""
        url, authorized = self._first_address()
        renewals = 0
        for _ in range(REDIRECTS + 3):
            token = self._token() if authorized else None
            response = self._get(url, offset, length, token, deadline)
            status = response.status
            if status == 206 or (status == 200 and offset == 0 and length == self._size):
                self._check_answer(response, offset, length)
                return response
            headers = response.headers
            response.close()
            if status in REDIRECT_CODES:
                url, authorized = self._follow(url, headers.get("Location")), False
            elif status in (401, 403) and url != self._url:
                self._forget_redirect()  # a signed address has expired
                url, authorized = self._url, True
            elif status in (401, 403) and renewals < 2 and self._renew(headers, token, deadline):
                renewals += 1  # the first may be a token that another thread has got
            else:
                raise self._failure(status, headers)
        raise RangeError(f"{self._url}: more than {REDIRECTS} redirects", permanent=True)

    def _get(self, url: str, offset: int, length: int, token: str | None, deadline: float) -> Any:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = token
        left = check_deadline(deadline)
        timeout = urllib3.Timeout(connect=min(CONNECT_SECONDS, left), read=min(SILENCE_SECONDS, left))
        return self._http.request(
            "GET", url, headers=headers, timeout=timeout, preload_content=False, redirect=False, decode_content=False
        )

    def _check_answer(self, response: Any, offset: int, length: int) -> None:
        """Servers that ignore or shift a range must not fill chunks with other bytes."""
        try:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise RangeError(f"{self._url}: the answer is encoded", permanent=True)
            if response.status == 206:
                given = response.headers.get("Content-Range", "")
                match = _CONTENT_RANGE.fullmatch(given)
                wanted = (offset, offset + length - 1, self._size)
                if match is None or tuple(map(int, match.groups())) != wanted:
                    raise RangeError(f"{self._url}: asked for bytes {wanted[0]}-{wanted[1]}/{wanted[2]}, got {given!r}")
            announced = response.headers.get("Content-Length")
            if announced is not None and announced != str(length):
                raise RangeError(f"{self._url}: {announced} bytes instead of {length}")
        except RangeError:
            response.close()
            raise

    def _failure(self, status: int, headers: Any) -> RangeError:
        if status == 200:
            return RangeError(f"{self._url}: the server does not answer range requests", permanent=True)
        after = headers.get("Retry-After", "")
        again = status in (408, 425, 429) or status >= 500
        return RangeError(
            f"{self._url}: status {status}", permanent=not again, after=float(after) if after.isdecimal() else 0
        )

    # --- redirects ------------------------------------------------------------------------------------------------

    def _first_address(self) -> tuple[str, bool]:
        with self._lock:
            if self._redirect is not None and time.monotonic() < self._redirect[1]:
                return self._redirect[0], False
            return self._url, True

    def _follow(self, url: str, location: str | None) -> str:
        target = urljoin(url, location or "")
        parts = urlsplit(target)
        if not location or parts.scheme not in ("http", "https") or not parts.hostname:
            raise RangeError(f"{self._url}: a redirect to {location!r}", permanent=True)
        if urlsplit(url).scheme == "https" and parts.scheme == "http":
            raise RangeError(f"{self._url}: a redirect from https to http", permanent=True)
        with self._lock:
            self._redirect = target, time.monotonic() + REDIRECT_SECONDS
        return target

    def _forget_redirect(self) -> None:
        with self._lock:
            self._redirect = None

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _token(self) -> str | None:
        with self._lock:
            return self._tokens.get(self._challenge) if self._challenge is not None else None

    def _renew(self, headers: Any, refused: str | None, deadline: float) -> bool:
        """Get an Authorization header for this challenge, another one than was refused; false if there is none."""
        scheme, given = parse_challenge(headers.get("WWW-Authenticate", ""))
        key = (scheme, given.get("realm", ""), given.get("service", ""), given.get("scope", ""), str(self._credentials))
        with self._lock:
            self._challenge = key
            if self._tokens.get(key) not in (None, refused):
                return True  # another layer or thread has got one meanwhile
            credentials = read_credentials(self._credentials) if self._credentials else {}
            if scheme == "bearer":
                token, seconds = self._ask_for_token(given, credentials, deadline)
            elif scheme == "basic" and "username" in credentials:
                token, seconds = _basic(credentials), float(REDIRECT_SECONDS)
            else:
                return False
            self._tokens.put(key, token, seconds)
            return token != refused

    def _ask_for_token(self, given: dict[str, str], credentials: dict[str, str], deadline: float) -> tuple[str, float]:
        if "token" in credentials:
            return _bearer(credentials["token"], "credentials"), REDIRECT_SECONDS
        realm = given.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https"):
            raise RangeError(f"{self._url}: a token from {realm!r}", permanent=True)
        if urlsplit(self._url).scheme == "https" and urlsplit(realm).scheme == "http":
            raise RangeError(f"{self._url}: a token over http for https", permanent=True)
        headers = {"Authorization": _basic(credentials)} if "username" in credentials else {}
        left = check_deadline(deadline)
        response = self._http.request(
            "GET", realm, fields={name: given[name] for name in ("service", "scope") if name in given}, headers=headers,
            timeout=urllib3.Timeout(connect=min(CONNECT_SECONDS, left), read=min(SILENCE_SECONDS, left)),
            redirect=False, preload_content=False,
        )  # fmt: skip
        try:
            if response.status != 200:
                refused = response.status < 500 and response.status != 429
                raise RangeError(f"{realm}: no token, status {response.status}", permanent=refused)
            return _token_of(realm, response.read(TOKEN_ANSWER))
        finally:
            response.close()


def _basic(credentials: dict[str, str]) -> str:
    text = f"{credentials['username']}:{credentials.get('password', '')}"
    return "Basic " + base64.b64encode(text.encode()).decode()


def _token_of(realm: str, body: bytes) -> tuple[str, float]:
    """The header and for how many seconds it is good."""
    try:
        answer = json.loads(body)
        token = answer.get("token") or answer.get("access_token")
        seconds = float(answer.get("expires_in", TOKEN_SECONDS))
    except (ValueError, AttributeError, TypeError) as error:
        raise RangeError(f"{realm}: the answer is no token") from error
    if not isinstance(token, str):
        raise RangeError(f"{realm}: the answer is no token")
    return _bearer(token, realm), max(seconds - TOKEN_MARGIN, 1)


def _bearer(token: str, where: str) -> str:
    """It must fit in a header, and stay out of messages."""
    if not token or not token.isascii() or not token.isprintable():
        raise RangeError(f"{where}: the token cannot be sent", permanent=True)
    return f"Bearer {token}"
