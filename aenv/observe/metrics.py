"""Resource figures of sandboxes: one bounded ring of samples each.

A sample is kept packed (64 bytes and an object header) instead of as an object with nine boxed numbers, because a node
holds some thousand of them for every sandbox.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

# Three hours at one sample in five seconds.
DEFAULT_CAPACITY = 2160

_PACKED = struct.Struct("<dd6q")


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """What a sandbox used at one moment. Sizes are bytes; `cpu_used_pct` is percent of all its CPUs (0 to 100)."""

    timestamp: datetime  # with a time zone
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int

    def pack(self) -> bytes:
        return _PACKED.pack(
            self.timestamp.timestamp(),
            self.cpu_used_pct,
            self.cpu_count,
            self.mem_used,
            self.mem_total,
            self.mem_cache,
            self.disk_used,
            self.disk_total,
        )

    @classmethod
    def unpack(cls, packed: bytes) -> MetricPoint:
        seconds, cpu_used_pct, cpu_count, *sizes = _PACKED.unpack(packed)
        return cls(datetime.fromtimestamp(seconds, UTC), cpu_count, cpu_used_pct, *sizes)


def _seconds(packed: bytes) -> float:
    seconds: float = _PACKED.unpack(packed)[0]
    return seconds


class MetricStore:
    """The newest samples of every sandbox. Reading what was never written gives nothing, not an error."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._rings: dict[str, deque[bytes]] = {}

    def add(self, sandbox_id: str, point: MetricPoint) -> None:
        """Append a sample; the oldest makes room. A sample older than the last one (the clock was set back) is dropped,
        so a ring is always in order of time."""
        ring = self._rings.get(sandbox_id)
        if ring is None:
            ring = self._rings[sandbox_id] = deque(maxlen=self._capacity)
        packed = point.pack()
        if not ring or _seconds(packed) >= _seconds(ring[-1]):
            ring.append(packed)

    def latest(self, sandbox_id: str) -> MetricPoint | None:
        ring = self._rings.get(sandbox_id)
        return MetricPoint.unpack(ring[-1]) if ring else None

    def window(self, sandbox_id: str, start: datetime | None = None, end: datetime | None = None) -> list[MetricPoint]:
        """Samples from `start` to `end`, both inclusive, oldest first. `None` leaves that side open."""
        low = float("-inf") if start is None else start.timestamp()
        high = float("inf") if end is None else end.timestamp()
        ring = self._rings.get(sandbox_id, ())
        return [MetricPoint.unpack(packed) for packed in ring if low <= _seconds(packed) <= high]

    def forget(self, sandbox_id: str) -> None:
        self._rings.pop(sandbox_id, None)
