"""What snapshots are called outside.

E2B's identifier of a snapshot has the tag, also the default one: `name:tag`, or `<id>:default` when it has no name.
Its names there begin with the slug of a team. There are no teams here: a namespace is part of a name, and only when
whoever gave the name wrote one. Inside, the default tag is never written (`aenv.naming.split_name`).
"""

from __future__ import annotations

from aenv.naming import DEFAULT_TAG
from aenv.sandbox.service import SnapshotInfo


def with_tag(name: str) -> str:
    return name if ":" in name else f"{name}:{DEFAULT_TAG}"


def full_names(info: SnapshotInfo) -> list[str]:
    """All names, with tags."""
    return [with_tag(name) for name in info.names]


def snapshot_id(info: SnapshotInfo) -> str:
    """What a client creates from, rolls back to and deletes."""
    return with_tag(info.names[0] if info.names else info.id)


def is_called(info: SnapshotInfo, text: str) -> bool:
    """Whether `text` means this snapshot in a filter: its id or one of its names. Without a tag it stands for all tags
    of a name, without a namespace for that name in all of them."""
    wanted, colon, wanted_tag = text.partition(":")
    for full in (with_tag(info.id), *full_names(info)):
        name, _, tag = full.partition(":")
        if wanted in (name, name.rpartition("/")[2]) and (not colon or tag == wanted_tag):
            return True
    return False
