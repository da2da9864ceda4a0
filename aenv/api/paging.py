"""Pages of lists that are ordered by a moment, and the cursor between them.

A cursor is base64url of `<RFC 3339 time>__<id>`, with `__asc` behind it when the order is ascending: the form E2B uses,
so a client may keep one across servers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from aenv.api import validate
from aenv.errors import InvalidInputError

T = TypeVar("T")

_ASCENDING = "__asc"
_MAX_CURSOR = 1024  # characters


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last item of a page; the next page begins behind it."""

    moment: datetime
    id: str
    ascending: bool = False

    def encode(self) -> str:
        stamp = self.moment.isoformat().replace("+00:00", "Z")
        text = f"{stamp}__{self.id}{_ASCENDING if self.ascending else ''}"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, token: str) -> Cursor:
        """Padding is optional. Raises `InvalidInputError`."""
        try:
            if len(token) > _MAX_CURSOR:
                raise ValueError("too long")
            bare = token.rstrip("=").encode("ascii")
            raw = base64.b64decode(bare + b"=" * (-len(bare) % 4), altchars=b"-_", validate=True)
            stamp, separator, rest = raw.decode("utf-8").partition("__")
            moment = validate.moment(stamp, "nextToken")
        except (ValueError, binascii.Error, InvalidInputError) as error:
            raise InvalidInputError("nextToken", "Invalid next token") from error
        ascending = rest.endswith(_ASCENDING)
        item = rest.removesuffix(_ASCENDING)
        if not separator or not item or moment is None:
            raise InvalidInputError("nextToken", "Invalid next token")
        return cls(moment, item, ascending)


def page(
    items: Iterable[T],
    key: Callable[[T], tuple[datetime, str]],
    *,
    limit: int,
    ascending: bool | None = None,
    token: str | None = None,
) -> tuple[list[T], str | None]:
    """The page behind `token`, and the token of the next one (None at the end).

    `ascending=None` means what the token says, else newest first. Raises `InvalidInputError` for a token of the other
    order.
    """
    cursor = Cursor.decode(token) if token else None
    if cursor is not None:
        if ascending is not None and ascending != cursor.ascending:
            raise InvalidInputError("nextToken", "Invalid next token: it belongs to the other order")
        ascending = cursor.ascending
    up = bool(ascending)
    ordered = sorted(items, key=key, reverse=not up)
    if cursor is not None:
        last = (cursor.moment, cursor.id)
        ordered = [item for item in ordered if (key(item) > last if up else key(item) < last)]
    found = ordered[:limit]
    if len(ordered) <= limit:
        return found, None
    return found, Cursor(*key(found[-1]), up).encode()
