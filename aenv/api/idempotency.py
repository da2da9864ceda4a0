"""Requests that are sent again: one key, one outcome.

The table lives in memory: a key is forgotten when the daemon restarts, when it is old, and when its operation failed
(then nothing was made, and trying again is what the client wants).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from aenv.api.errors import CodedError

T = TypeVar("T")

LIFETIME = 24 * 3600.0  # seconds
MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    fingerprint: bytes
    outcome: asyncio.Future[T]
    born: float  # seconds of the event loop's clock


class IdempotencyTable(Generic[T]):
    """Outcomes by key. Entries under way are never dropped."""

    def __init__(self, *, lifetime: float = LIFETIME, max_entries: int = MAX_ENTRIES) -> None:
        self._lifetime = lifetime
        self._max_entries = max_entries
        self._entries: dict[str, _Entry[T]] = {}  # in order of birth

    async def run(self, key: str, fingerprint: bytes, operation: Callable[[], Awaitable[T]]) -> T:
        """Do `operation` unless it was done, or is being done, for this key; `fingerprint` stands for the request.

        The operation goes on when the caller is cancelled, since others may wait for it. Raises `CodedError` 422 when
        the key came with another request.
        """
        self._drop_old()
        entry = self._entries.get(key)
        if entry is None:
            self._drop_old(room=1)
            entry = _Entry(fingerprint, asyncio.ensure_future(operation()), asyncio.get_running_loop().time())
            self._entries[key] = entry
            entry.outcome.add_done_callback(partial(self._forget_failed, key))
        elif entry.fingerprint != fingerprint:
            raise CodedError(
                422, "Idempotency-Key: already used for a different request", "idempotency_request_mismatch"
            )
        return await asyncio.shield(entry.outcome)

    def _forget_failed(self, key: str, outcome: asyncio.Future[T]) -> None:
        if outcome.cancelled() or outcome.exception() is not None:
            entry = self._entries.get(key)
            if entry is not None and entry.outcome is outcome:
                del self._entries[key]

    def _drop_old(self, room: int = 0) -> None:
        """Drop what is over its lifetime, and the oldest beyond the number less `room`."""
        horizon = asyncio.get_running_loop().time() - self._lifetime
        old: list[str] = []
        for key, entry in self._entries.items():
            if entry.born >= horizon and len(self._entries) - len(old) + room <= self._max_entries:
                break
            if entry.outcome.done():
                old.append(key)
        for key in old:
            del self._entries[key]
