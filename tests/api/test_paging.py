from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.api.paging import Cursor, page
from aenv.errors import InvalidInputError

START = datetime(2026, 1, 1, tzinfo=UTC)
ITEMS = st.lists(
    st.tuples(
        st.integers(0, 5).map(lambda n: START + timedelta(microseconds=n)),
        st.from_regex(r"[a-z0-9]{1,5}", fullmatch=True),
    ),
    unique=True,
    max_size=30,
)


def key(item: tuple[datetime, str]) -> tuple[datetime, str]:
    return item


@given(ITEMS, st.integers(1, 7), st.booleans())
def test_pages_hold_every_item_once_in_order(items: list[tuple[datetime, str]], limit: int, up: bool) -> None:
    seen: list[tuple[datetime, str]] = []
    token: str | None = None
    for _ in range(len(items) + 1):
        found, token = page(items, key, limit=limit, ascending=up, token=token)
        seen += found
        if token is None:
            break
    assert seen == sorted(items, reverse=not up)


def test_items_made_between_pages_do_not_shift_them() -> None:
    items = [(START + timedelta(seconds=n), f"i{n}") for n in range(4)]
    first, token = page(items, key, limit=2)
    items.append((START + timedelta(seconds=9), "new"))
    items.remove(first[1])  # the cursor's own item may be gone
    second, token = page(items, key, limit=2, token=token)
    assert [item[1] for item in first + second] == ["i3", "i2", "i1", "i0"]
    assert token is None


@given(st.datetimes(timezones=st.just(UTC)), st.from_regex(r"[a-z0-9_]{1,20}", fullmatch=True), st.booleans())
def test_a_cursor_is_read_as_it_was_written(moment: datetime, item: str, ascending: bool) -> None:
    if item.endswith("__asc"):
        item += "0"
    cursor = Cursor(moment, item, ascending)
    assert Cursor.decode(cursor.encode()) == cursor


def test_form_of_the_cursor() -> None:
    text = base64.urlsafe_b64decode(Cursor(START, "abc", True).encode() + "==")
    assert text == b"2026-01-01T00:00:00Z__abc__asc"
    nanoseconds = base64.urlsafe_b64encode(b"2026-01-01T00:00:00.123456789Z__abc").decode()
    assert Cursor.decode(nanoseconds).moment == START + timedelta(microseconds=123456)


@pytest.mark.parametrize(
    "text",
    ["", "!", "AAAA", "é", "a" * 2000, "====", *(
        base64.urlsafe_b64encode(raw).decode()
        for raw in (b"x", b"__", b"2026-01-01T00:00:00Z", b"2026-01-01T00:00:00Z__", b"__abc", b"2026__abc",
                    b"2026-01-01T00:00:00Z__\xff", b"2026-01-01T00:00:00Z____asc")
    )],
)  # fmt: skip
def test_wrong_cursor(text: str) -> None:
    with pytest.raises(InvalidInputError, match="Invalid next token"):
        Cursor.decode(text)


def test_cursor_of_the_other_order() -> None:
    token = Cursor(START, "abc", True).encode()
    with pytest.raises(InvalidInputError, match="order"):
        page([(START, "x")], key, limit=1, ascending=False, token=token)
    assert page([(START, "x")], key, limit=1, token=token) == ([(START, "x")], None)


@given(st.text(max_size=60))
def test_any_text_as_cursor(text: str) -> None:
    try:
        Cursor.decode(text)
    except InvalidInputError:
        pass
