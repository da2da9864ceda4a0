"""The errors that cross package borders.

Every error a caller can act on is one of these. `message` is a sentence for a person; `hint`, where there is one, says
what to do. Nothing here knows HTTP: `aenv.api` maps the classes to status codes.
"""

from __future__ import annotations


class AenvError(Exception):
    """Base of all errors with a message for the user."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidInputError(AenvError):
    """A value from outside is wrong; `field` names it and nothing was changed."""

    def __init__(self, field: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{field}: {message}", hint=hint)
        self.field = field


class NotFoundError(AenvError):
    """The named thing does not exist (any more)."""


class ConflictError(AenvError):
    """The thing exists but is in a state that does not allow the operation."""


class UnavailableError(AenvError):
    """The host cannot do this now or at all: a tool, a permission or a resource is missing."""


class LimitError(AenvError):
    """A configured limit is reached (`sandbox.max`, say); asking again later may succeed."""


class GuestError(AenvError):
    """The guest did not answer, died, or answered nonsense."""


class VmmError(AenvError):
    """The VMM refused a command, died, or could not be started."""
