"""Checks of everything a client can send. Each function returns the clean value or raises `InvalidInputError` with the
name the client used for the field; nothing else happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar
from urllib.parse import unquote_plus

import msgspec

from aenv.api.models import IamBody, NewSandbox, VolumeMount
from aenv.api.network import network_options
from aenv.errors import InvalidInputError
from aenv.naming import split_name
from aenv.sandbox.service import CreateOptions, OnTimeout

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

MAX_IAM_TOKENS = 5
MAX_TEMPLATE_NAME = 256
MIN_REFRESH = 15  # seconds; E2B lengthens shorter ones
MAX_REFRESH = 3600
MAX_SEARCH = 256
# Milliseconds since 1970 that a datetime can still hold (year 9999).
MAX_MILLISECONDS = 253_402_300_799_999

_SANDBOX_ID = re.compile(r"([a-z0-9]{1,64})(?:-[A-Za-z0-9_-]{0,64})?")
_IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")
_WHOLE = re.compile(r"-?[0-9]{1,19}")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?P<rest>.*)", re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$")


def parse_body(body: bytes, model: type[T], *, optional: bool = False) -> T:
    """Decode a JSON object. An `optional` body may be empty, which means `{}`."""
    if not body.strip():
        if not optional:
            raise InvalidInputError("body", "a JSON object is required")
        body = b"{}"
    try:
        return msgspec.json.decode(body, type=model)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError("body", f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidInputError("body", "nested too deeply") from error


def _named(message: str) -> InvalidInputError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.timeout`" into an error that begins with the field."""
    path = _PATH.search(message)
    name = path["path"] if path else ""
    text = message[: path.start()] if path else message
    missing = _MISSING.match(text)
    if missing:
        return InvalidInputError(f"{name}.{missing['name']}" if name else missing["name"], "is required")
    return InvalidInputError(name or "body", text[:1].lower() + text[1:].replace(" | null", ""))


def sandbox_id(text: str) -> str:
    """`<id>` or `<id>-<clientID>`; older SDKs send the second form."""
    match = _SANDBOX_ID.fullmatch(text)
    if match is None:
        raise InvalidInputError("sandboxID", "may hold lower-case letters and digits only")
    return match[1]


def template_name(text: str, field: str = "templateID") -> str:
    """An id, a name, `namespace/name` or one of these with `:tag`. Whether it exists is for others to say."""
    if not text or len(text) > MAX_TEMPLATE_NAME or _CONTROL.search(text):
        raise InvalidInputError(field, f"expected 1 to {MAX_TEMPLATE_NAME} printable characters")
    return text


def snapshot_name(text: str | None) -> str | None:
    """`name`, `namespace/name` or one of these with `:tag`, as it is stored; what templates may be called, too."""
    return None if text is None else split_name(text, "name")


def count(value: int, field: str, *, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidInputError(field, f"expected {low} to {high}, got {value}")
    return value


def seconds(value: int, field: str, *, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidInputError(field, f"expected {low} to {high} seconds, got {value}")
    return value


def idempotency_key(text: str | None) -> str | None:
    if text is not None and not _IDEMPOTENCY_KEY.fullmatch(text):
        raise InvalidInputError("Idempotency-Key", "expected 1 to 255 characters of a-z, 0-9 and -")
    return text


def create_options(body: NewSandbox, *, generation: int, default_timeout: int, max_timeout: int) -> CreateOptions:
    """The options of a create request. `generation` 1 is open unless `secure` is set, 2 is always secure."""
    auto_pause = bool(body.auto_pause)
    auto_resume = body.auto_resume is not None and bool(body.auto_resume.enabled)
    pause_memory = body.auto_pause_memory is not False
    if not pause_memory and not auto_pause:
        raise InvalidInputError("autoPauseMemory", "false needs autoPause")
    if not pause_memory and auto_resume:
        raise InvalidInputError("autoPauseMemory", "false cannot be combined with autoResume: such a resume is a boot")
    _no_volumes(body.volume_mounts)
    _no_identity(body.iam)
    return CreateOptions(
        template=template_name(body.template_id),
        timeout=seconds(default_timeout if body.timeout is None else body.timeout, "timeout", low=1, high=max_timeout),
        metadata=body.metadata or {},
        env=environment(body.env_vars or {}),
        secure=generation >= 2 or bool(body.secure),
        on_timeout=OnTimeout.PAUSE if auto_pause else OnTimeout.KILL,
        auto_resume=auto_resume,
        pause_memory=pause_memory,
        network=network_options(body.network, body.allow_internet_access),
    )


def environment(variables: Mapping[str, str]) -> Mapping[str, str]:
    """execve(2) takes NAME=VALUE strings that end at a NUL: these cannot be passed on."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidInputError("envVars", f"{name!r} is not a name: it must not be empty or hold '=' or NUL")
        if "\0" in value:
            raise InvalidInputError(f"envVars.{name}", "the value must not hold NUL")
    return variables


def _no_volumes(mounts: list[VolumeMount] | None) -> None:
    if mounts:
        raise InvalidInputError("volumeMounts", "this server has no volumes")


def _no_identity(iam: IamBody | None) -> None:
    if iam is None or not iam.tokens:
        return
    if len(iam.tokens) > MAX_IAM_TOKENS:
        raise InvalidInputError("iam.tokens", f"at most {MAX_IAM_TOKENS} tokens")
    raise InvalidInputError("iam.tokens", "this server issues no workload identities")


# --- query parameters -------------------------------------------------------------------------------------------------


def whole(text: str | None, field: str, *, low: int, high: int, default: T) -> int | T:
    """A whole number in ASCII digits; absent or empty gives `default`."""
    if not text:
        return default
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        raise InvalidInputError(field, f"expected a whole number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def choice(text: str | None, field: str, kind: type[E], default: E) -> E:
    if not text:
        return default
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidInputError(field, f"expected one of {', '.join(kind)}, got {text[:40]!r}") from error


def choices(text: str | None, field: str, allowed: frozenset[str]) -> frozenset[str]:
    """A comma list; absent or empty means all."""
    names = frozenset(part for part in (text or "").split(",") if part)
    if not names <= allowed:
        raise InvalidInputError(field, f"expected some of {', '.join(sorted(allowed))}, got {(text or '')[:40]!r}")
    return names or allowed


def search(text: str | None) -> str:
    if text is not None and len(text) > MAX_SEARCH:
        raise InvalidInputError("search", f"at most {MAX_SEARCH} characters")
    return text or ""


def metadata_filter(text: str | None) -> dict[str, str]:
    """Pairs that a sandbox's metadata must hold.

    The SDKs encode three times: each key and value, the list of pairs, and the query string. `text` is what is left
    after the query was decoded, so the list is decoded once as a whole and its parts once more.
    """
    if not text:
        return {}
    pairs: dict[str, str] = {}
    for pair in _unescape(text).split("&"):
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidInputError("metadata", "expected key=value pairs joined by &")
        pairs[_unescape(key)] = _unescape(value)
    return pairs


def _unescape(text: str) -> str:
    if _BROKEN_ESCAPE.search(text):
        raise InvalidInputError("metadata", "a % is not followed by two hexadecimal digits")
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidInputError("metadata", "escaped bytes are not UTF-8") from error


def moment(text: str | None, field: str) -> datetime | None:
    """RFC 3339 with a time zone, to the microsecond (more digits are cut)."""
    if not text:
        return None
    # A client that forgets to escape the plus of "+01:00" sends a space.
    match = _RFC3339.fullmatch(text[:-6] + text[-6:].replace(" ", "+"))
    if match is not None:
        try:
            return datetime.fromisoformat(match[0].upper()).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise InvalidInputError(field, f"expected a date and time like 2026-01-31T12:00:00Z, got {text[:40]!r}")


def from_unix(value: int | None, divisor: int = 1) -> datetime | None:
    """Seconds (or, with `divisor` 1000, milliseconds) since 1970, already known to be in range."""
    return None if value is None else datetime.fromtimestamp(value / divisor, UTC)


def header(values: list[str], field: str, check: Callable[[str | None], T]) -> T:
    """One value of a header that must not be sent twice."""
    if len(values) > 1:
        raise InvalidInputError(field, "sent more than once")
    return check(values[0] if values else None)
