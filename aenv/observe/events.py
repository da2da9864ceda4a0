"""Life-cycle events: what happened to a sandbox, as lines of its log."""

from __future__ import annotations

import enum

from aenv.observe.logs import LogEntry, LogLevel, LogRing


class Event(enum.StrEnum):
    """The names are those of the E2B life-cycle webhooks, without the `sandbox.lifecycle.` prefix, where one exists."""

    CREATED = "created"
    PAUSED = "paused"
    RESUMED = "resumed"
    UPDATED = "updated"  # time-out or network changed
    CHECKPOINTED = "checkpointed"  # snapshot or fork taken, the sandbox goes on
    ROLLED_BACK = "rolled_back"
    KILLED = "killed"
    EXPIRED = "expired"
    FAILED = "failed"


_SENTENCES = {
    Event.CREATED: "sandbox created",
    Event.PAUSED: "sandbox paused",
    Event.RESUMED: "sandbox resumed",
    Event.UPDATED: "sandbox changed",
    Event.CHECKPOINTED: "sandbox checkpointed",
    Event.ROLLED_BACK: "sandbox rolled back",
    Event.KILLED: "sandbox killed",
    Event.EXPIRED: "time-out reached",
    Event.FAILED: "sandbox failed",
}


def record(ring: LogRing, event: Event, detail: str = "") -> LogEntry:
    """Write an event into the sandbox's log; `detail` says why or how (a reason, a count of milliseconds)."""
    sentence = _SENTENCES[event]
    return ring.append(
        f"{sentence}: {detail}" if detail else sentence,
        level=LogLevel.ERROR if event is Event.FAILED else LogLevel.INFO,
        fields={"source": "event", "event": event.value},
    )
