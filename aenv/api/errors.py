"""From exceptions to answers: `{"code": <status>, "message": …}`, the only form both SDKs parse."""

from __future__ import annotations

from aenv.api.models import ErrorBody
from aenv.errors import (
    AenvError,
    ConflictError,
    GuestError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.http.message import HttpError, Response

# The Python SDK sends a request again after 429 and 503, creates included, unless it is told not to.
NO_RETRY = ("Should-Retry", "false")

_STATUS: tuple[tuple[type[AenvError], int], ...] = (
    (InvalidInputError, 400),
    (NotFoundError, 404),
    (ConflictError, 409),
    (LimitError, 429),
    (UnavailableError, 503),
    (GuestError, 500),
    (VmmError, 500),
)


class CodedError(HttpError):
    """An error with a machine-readable reason, in the body as `error_code`."""

    def __init__(self, status: int, message: str, error_code: str) -> None:
        super().__init__(status, message)
        self.error_code = error_code


def status_of(error: AenvError) -> int:
    if isinstance(error, HttpError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_response(error: AenvError) -> Response:
    """The answer for an error that is meant for the user."""
    part = error_part(error)
    headers: list[tuple[str, str]] = list(error.headers) if isinstance(error, HttpError) else []
    if part.code in (429, 502, 503, 504):
        headers.append(NO_RETRY)
    return Response.json(part.code, part, headers)


def error_part(error: AenvError) -> ErrorBody:
    """An error as a part of an answer."""
    return ErrorBody(status_of(error), _clean(str(error)), error.error_code if isinstance(error, CodedError) else None)


def error_body(status: int, message: str) -> Response:
    return Response.json(status, ErrorBody(status, _clean(message)))


def _clean(message: str) -> str:
    """A message may quote what a client or a guest sent, in any encoding."""
    return message.encode("utf-8", "replace").decode("utf-8")
