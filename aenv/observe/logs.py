"""Logs of sandboxes: life-cycle events and lines from the guest, one bounded ring each.

Readers page by time (the E2B API knows no other cursor), so time stamps inside a ring are unique and a millisecond
holds at most `1 ms / SPACING` entries: a larger page always gets past the millisecond it starts in.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

DEFAULT_ENTRIES = 2000
DEFAULT_BYTES = 1 << 20
MAX_MESSAGE = 8192  # characters; a longer line is cut
SPACING = timedelta(microseconds=20)


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {level: rank for rank, level in enumerate(LogLevel)}


class LogDirection(enum.StrEnum):
    FORWARD = "forward"  # oldest first, from the cursor on
    BACKWARD = "backward"  # newest first, from the cursor back


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line. `fields` says where it comes from (`source`: event, stdout, stderr, console) and what it is about."""

    timestamp: datetime
    message: str
    level: LogLevel = LogLevel.INFO
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Characters held, as the measure of a ring's fill."""
        return len(self.message) + sum(len(k) + len(v) for k, v in self.fields.items())


@dataclass(frozen=True, slots=True)
class LogQuery:
    """A page of a log. `cursor` is a moment, inclusive; `level` the lowest one wanted; `search` a case-sensitive part
    of the message."""

    cursor: datetime | None = None
    limit: int = 1000
    direction: LogDirection = LogDirection.FORWARD
    level: LogLevel = LogLevel.DEBUG
    search: str = ""

    def matches(self, entry: LogEntry) -> bool:
        if self.cursor is not None:
            early = entry.timestamp < self.cursor
            if early if self.direction is LogDirection.FORWARD else entry.timestamp > self.cursor:
                return False
        return entry.level.rank >= self.level.rank and self.search in entry.message


class LogRing:
    """The newest entries of one sandbox, bounded by number and by characters."""

    def __init__(self, max_entries: int = DEFAULT_ENTRIES, max_size: int = DEFAULT_BYTES) -> None:
        if max_entries < 1 or max_size < 1:
            raise ValueError("a ring holds at least one entry and one character")
        self._entries: deque[LogEntry] = deque()
        self._max_entries = max_entries
        self._max_size = max_size
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def append(
        self,
        message: str,
        *,
        level: LogLevel = LogLevel.INFO,
        fields: Mapping[str, str] | None = None,
        timestamp: datetime | None = None,
    ) -> LogEntry:
        """Store a line and return the entry. Its time is moved forward where needed to stay behind the last one."""
        moment = timestamp or datetime.now(UTC)
        if self._entries:
            moment = max(moment, self._entries[-1].timestamp + SPACING)
        # Guests decide on these characters: what UTF-8 cannot encode would break every later answer.
        clean = message[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")
        entry = LogEntry(moment, clean, level, dict(fields or {}))
        self._entries.append(entry)
        self._size += entry.size
        while len(self._entries) > self._max_entries or (self._size > self._max_size and len(self._entries) > 1):
            self._size -= self._entries.popleft().size
        return entry

    def query(self, query: LogQuery) -> list[LogEntry]:
        """At most `query.limit` entries, in the order of `query.direction`."""
        backward = query.direction is LogDirection.BACKWARD
        entries: Iterable[LogEntry] = reversed(self._entries) if backward else self._entries
        found: list[LogEntry] = []
        for entry in entries:
            if len(found) >= query.limit:
                break
            if query.matches(entry):
                found.append(entry)
        return found


class LogStore:
    """Rings by sandbox. Reading what was never written gives nothing, not an error."""

    def __init__(self, max_entries: int = DEFAULT_ENTRIES, max_size: int = DEFAULT_BYTES) -> None:
        self._max_entries = max_entries
        self._max_size = max_size
        self._rings: dict[str, LogRing] = {}

    def ring(self, sandbox_id: str) -> LogRing:
        """The ring to append to, made at first use."""
        ring = self._rings.get(sandbox_id)
        if ring is None:
            ring = self._rings[sandbox_id] = LogRing(self._max_entries, self._max_size)
        return ring

    def query(self, sandbox_id: str, query: LogQuery) -> list[LogEntry]:
        ring = self._rings.get(sandbox_id)
        return [] if ring is None else ring.query(query)

    def forget(self, sandbox_id: str) -> None:
        self._rings.pop(sandbox_id, None)
