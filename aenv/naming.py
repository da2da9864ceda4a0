"""Names of templates and snapshots: `name`, or `name:tag` when the tag is not the default one."""

from __future__ import annotations

import re

from aenv.errors import InvalidInputError

DEFAULT_TAG = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def split_name(text: str, field: str = "template") -> str:
    """A name as it is stored: without the default tag. Raises InvalidInputError naming `field`."""
    name, colon, tag = text.partition(":")
    if not _NAME.fullmatch(name) or ".." in name or (colon and not _TAG.fullmatch(tag)):
        raise InvalidInputError(field, f"{text!r} is not a template name")
    return name if not colon or tag == DEFAULT_TAG else text
