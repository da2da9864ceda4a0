"""The API key: made at first start, kept in a file only its owner can read, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from aenv.errors import InvalidInputError
from aenv.http.message import HttpError, Request

HEADER = "X-API-Key"
# Older SDKs refuse other forms before they send anything; at least 128 bits.
_KEY = re.compile(r"e2b_[0-9a-f]{32,128}")


class ApiKey:
    """Checks requests against one key."""

    def __init__(self, key: str) -> None:
        if not _KEY.fullmatch(key):
            raise InvalidInputError("API key", "expected e2b_ and 32 to 128 lower-case hexadecimal digits")
        self._digest = _digest(key)

    def check(self, request: Request) -> None:
        """Raises `HttpError` 401 unless the header is there once and right. Two headers are refused even when one of
        them is right: a proxy in front may have looked at the other."""
        values = request.headers.get_all(HEADER)
        if not values:
            raise HttpError(401, f"the {HEADER} header is missing")
        if len(values) > 1:
            raise HttpError(401, f"the {HEADER} header was sent more than once")
        if not hmac.compare_digest(_digest(values[0]), self._digest):
            raise HttpError(401, "the API key is not valid")


def _digest(key: str) -> bytes:
    """Of equal length for all keys, so a comparison does not tell the length either."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_or_create_key(path: Path) -> str:
    """The key in `path`; a new one (`e2b_` and 40 hexadecimal digits, mode 0600) when there is no file.

    Several processes may call this at once and get the same key. Raises `InvalidInputError` for a file that holds
    something else or that others may read.
    """
    if not path.exists():
        _create(path, f"e2b_{secrets.token_hex(20)}")
    mode = path.stat().st_mode
    if mode & 0o077:
        raise InvalidInputError(str(path), "others may read the API key", hint=f"chmod 600 {path}")
    key = path.read_text(errors="replace").strip()
    if not _KEY.fullmatch(key):
        raise InvalidInputError(str(path), "does not hold an API key", hint="remove the file to get a new key")
    return key


def _create(path: Path, key: str) -> None:
    """Write the whole file under another name and give it its own by link(2), which fails when somebody was faster:
    nobody ever sees half a key or replaces one in use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        _sync_directory(path.parent)
    finally:
        draft.unlink()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
