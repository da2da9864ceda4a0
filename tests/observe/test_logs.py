from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aenv.observe import events
from aenv.observe.logs import MAX_MESSAGE, SPACING, LogDirection, LogEntry, LogLevel, LogQuery, LogRing, LogStore

START = datetime(2026, 1, 1, tzinfo=UTC)


def ring_of(*messages: str, spacing: timedelta = timedelta(seconds=1)) -> LogRing:
    ring = LogRing()
    for number, message in enumerate(messages):
        ring.append(message, timestamp=START + number * spacing)
    return ring


def texts(entries: list[LogEntry]) -> list[str]:
    return [entry.message for entry in entries]


def test_forward_starts_at_the_cursor_inclusive() -> None:
    ring = ring_of("a", "b", "c", "d")
    assert texts(ring.query(LogQuery(cursor=START + timedelta(seconds=1), limit=2))) == ["b", "c"]


def test_backward_gives_the_newest_first_up_to_the_cursor() -> None:
    ring = ring_of("a", "b", "c", "d")
    query = LogQuery(cursor=START + timedelta(seconds=2), limit=2, direction=LogDirection.BACKWARD)
    assert texts(ring.query(query)) == ["c", "b"]
    assert texts(ring.query(LogQuery(limit=1, direction=LogDirection.BACKWARD))) == ["d"]


def test_limit_counts_matches_only() -> None:
    ring = ring_of("x1", "y", "x2", "y", "x3")
    assert texts(ring.query(LogQuery(search="x", limit=2))) == ["x1", "x2"]
    assert ring.query(LogQuery(limit=0)) == []


def test_level_is_the_lowest_one_wanted() -> None:
    ring = LogRing()
    for level in LogLevel:
        ring.append(level.value, level=level)
    assert texts(ring.query(LogQuery(level=LogLevel.WARN))) == ["warn", "error"]


def test_search_is_case_sensitive_and_literal() -> None:
    ring = ring_of("Error .*", "error", "a")
    assert texts(ring.query(LogQuery(search="Error"))) == ["Error .*"]
    assert texts(ring.query(LogQuery(search=".*"))) == ["Error .*"]


def test_oldest_entries_make_room_by_number_and_by_size() -> None:
    by_number = LogRing(max_entries=2)
    by_size = LogRing(max_size=25)
    for letter in "abcd":
        by_number.append(letter * 10)
        by_size.append(letter * 10)
    assert texts(by_number.query(LogQuery())) == ["c" * 10, "d" * 10]
    assert texts(by_size.query(LogQuery())) == ["c" * 10, "d" * 10]


def test_one_line_larger_than_the_ring_is_kept_alone() -> None:
    ring = LogRing(max_size=5)
    ring.append("small")
    ring.append("too large for it")
    assert texts(ring.query(LogQuery())) == ["too large for it"]


def test_fields_count_for_the_size() -> None:
    ring = LogRing(max_size=50)
    for _ in range(10):
        ring.append("", fields={"k": "v" * 20})
    assert len(ring) == 2


def test_clock_set_back_keeps_the_order() -> None:
    ring = LogRing()
    ring.append("first", timestamp=START)
    second = ring.append("second", timestamp=START - timedelta(hours=1))
    assert second.timestamp == START + SPACING
    assert texts(ring.query(LogQuery())) == ["first", "second"]


@given(st.text(alphabet=st.characters(codec=None)))
def test_any_text_of_a_guest_can_be_encoded(message: str) -> None:
    entry = LogRing().append(message)
    entry.message.encode("utf-8")
    assert len(entry.message) <= MAX_MESSAGE


def test_long_line_is_cut() -> None:
    assert len(LogRing().append("x" * (MAX_MESSAGE + 1)).message) == MAX_MESSAGE


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=300), st.integers(51, 150))
@example([0] * 300, 51)
def test_paging_by_milliseconds_loses_nothing(offsets: list[int], limit: int) -> None:
    """A client that continues at the millisecond of the last entry, and drops what it has, sees every line once."""
    ring = LogRing()
    for number, offset in enumerate(sorted(offsets)):
        ring.append(str(number), timestamp=START + timedelta(microseconds=offset))
    seen: dict[datetime, str] = {}
    cursor: datetime | None = None
    for _ in range(len(offsets) + 1):
        page = ring.query(LogQuery(cursor=cursor, limit=limit))
        fresh = [entry for entry in page if entry.timestamp not in seen]
        seen.update((entry.timestamp, entry.message) for entry in fresh)
        if not fresh:
            break
        cursor = fresh[-1].timestamp.replace(microsecond=fresh[-1].timestamp.microsecond // 1000 * 1000)
    assert list(seen.values()) == [str(number) for number in range(len(offsets))]


def test_store_keeps_sandboxes_apart_and_forgets() -> None:
    store = LogStore()
    store.ring("a").append("of a")
    store.ring("b").append("of b")
    assert texts(store.query("a", LogQuery())) == ["of a"]
    store.forget("a")
    assert store.query("a", LogQuery()) == []
    assert texts(store.query("b", LogQuery())) == ["of b"]
    assert store.query("never seen", LogQuery()) == []


@pytest.mark.parametrize("event", list(events.Event))
def test_every_event_has_a_sentence_and_its_name(event: events.Event) -> None:
    ring = LogRing()
    entry = events.record(ring, event, "because")
    assert entry.message.endswith(": because")
    assert entry.fields == {"source": "event", "event": event.value}
    assert entry.level is (LogLevel.ERROR if event is events.Event.FAILED else LogLevel.INFO)
    assert ring.query(LogQuery()) == [entry]
    assert not events.record(ring, event).message.endswith(":")
