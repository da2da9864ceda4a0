"""The committed repository in a POSIX directory: one directory a template or snapshot, and one file that names them.

A template's directory is made under `staging` and moved here when it is whole; its manifest is its proof. Several
processes may use a repository at once (the daemon and a build on the command line): nothing is cached but manifests,
which never change.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aenv.errors import ConflictError, InvalidInputError, NotFoundError
from aenv.naming import split_name
from aenv.snapshot.checkpoint import Checkpoint
from aenv.snapshot.manifest import Manifest, SnapshotKind, sync_directory, write_atomically
from aenv.vmm.base import Machine

log = logging.getLogger("aenv.storage")

NAMES_FILE = "names.json"
_ID = re.compile(r"[a-z0-9]{1,64}")


@dataclass(frozen=True, slots=True)
class Template:
    """A committed template or snapshot: its manifest, where its files are, and the names that lead to it now."""

    directory: Path
    manifest: Manifest
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.manifest.id

    @property
    def title(self) -> str:
        """What to call it in a sentence."""
        return self.names[0] if self.names else self.id

    @property
    def machine(self) -> Machine:
        return self.manifest.machine

    @property
    def kind(self) -> SnapshotKind:
        return self.manifest.kind

    @property
    def checkpoint(self) -> Checkpoint:
        """What its machines are restored from."""
        manifest = self.manifest
        return Checkpoint(
            self.directory,
            manifest.machine,
            tuple(manifest.disk.layers),
            manifest.disk.size,
            tuple(manifest.memory),
            manifest.state,
        )

    @property
    def disk_size(self) -> int:
        """Bytes."""
        return self.manifest.disk.size


def new_template_id() -> str:
    """20 lower-case letters or digits, the form of E2B's ids."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(20))


class Repository:
    """All templates of a home."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifests: dict[str, Manifest] = {}

    def find(self, text: str) -> Template:
        """By id, `name` or `name:tag`. Raises NotFoundError, InvalidInputError for what can be neither."""
        names = self._names()
        return self._template(self._identify(text, names), names)

    def _identify(self, text: str, names: dict[str, str]) -> str:
        name = split_name(text)
        identity = names.get(name, name)
        if _ID.fullmatch(identity) and (self._directory / identity).is_dir():
            return identity
        raise NotFoundError(f"template {text!r} does not exist", hint="aenv template ls shows what there is")

    def templates(self) -> list[Template]:
        """All that are whole, oldest first. A damaged one must not hide the others: the log says what is wrong."""
        names = self._names()
        found = []
        for entry in self._directory.iterdir():
            if entry.is_dir() and _ID.fullmatch(entry.name):
                try:
                    found.append(self._template(entry.name, names))
                except NotFoundError:
                    continue  # another process deleted it just now
                except InvalidInputError as error:
                    log.error("template %s is left out: %s", entry.name, error)
        return sorted(found, key=lambda t: t.manifest.created)

    def commit(self, staged: Path, names: Sequence[str] = ()) -> Template:
        """Move a directory with a saved manifest into the repository and point `names` at it.

        Raises ConflictError when its id is taken, when a name is an id of something else, or when a snapshot is to get
        the name of a template.
        """
        manifest = Manifest.load(staged)
        if not _ID.fullmatch(manifest.id):
            raise InvalidInputError("manifest.id", f"{manifest.id!r} is no template")
        stored = [split_name(name) for name in names]
        target = self._directory / manifest.id
        with self._changing_names() as table:  # first, so that nothing moves when the names are damaged
            if target.exists():
                raise ConflictError(f"template {manifest.id} exists already")
            self._refuse_ids(stored)
            if manifest.kind is SnapshotKind.SNAPSHOT:
                self._refuse_names_of_templates(stored, table)
            staged.chmod(0o711)
            sync_directory(staged)
            staged.rename(target)
            sync_directory(self._directory)
            table.update(dict.fromkeys(stored, manifest.id))
        return self.find(manifest.id)

    def delete(self, text: str) -> None:
        """Forget its names, then remove its files, whether it is whole or not. Raises what `find` does."""
        with self._changing_names() as table:
            doomed_id = self._identify(text, table)
            self._manifests.pop(doomed_id, None)
            for name in [n for n, identity in table.items() if identity == doomed_id]:
                del table[name]
            (self._directory / doomed_id).rename(self._directory / f".deleted-{doomed_id}")  # half removed: not found
        for doomed in self._directory.glob(".deleted-*"):  # those of a killed process too
            shutil.rmtree(doomed, ignore_errors=True)

    def check_snapshot_name(self, name: str) -> None:
        """Raise ConflictError when a template has the name or it is an id, InvalidInputError when it cannot be one."""
        stored = [split_name(name)]
        self._refuse_ids(stored)
        self._refuse_names_of_templates(stored, self._names())

    def _refuse_ids(self, names: Sequence[str]) -> None:
        """A name is looked up before an id, so such a name would hide what has the id."""
        for name in names:
            if _ID.fullmatch(name) and (self._directory / name).is_dir():
                raise ConflictError(f"the name {name} is the id of a template or snapshot")

    def _refuse_names_of_templates(self, names: Sequence[str], table: dict[str, str]) -> None:
        for name in names:
            if (identity := table.get(name)) is None:
                continue
            try:
                kind = self._template(identity, table).kind
            except NotFoundError:
                continue  # a name that leads nowhere is free
            if kind is SnapshotKind.TEMPLATE:
                raise ConflictError(f"the name {name} belongs to a template")

    def _template(self, identity: str, names: dict[str, str]) -> Template:
        directory = self._directory / identity
        manifest = self._manifests.get(identity)
        if manifest is None:
            manifest = Manifest.load(directory)
            if manifest.id != identity:
                raise InvalidInputError("manifest.id", f"{manifest.id!r} lies in {directory}")
            self._manifests[identity] = manifest
        return Template(directory, manifest, tuple(sorted(n for n, i in names.items() if i == identity)))

    def _names(self) -> dict[str, str]:
        try:
            return msgspec.json.decode((self._directory / NAMES_FILE).read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise InvalidInputError(str(self._directory / NAMES_FILE), f"is damaged: {error}") from error

    @contextmanager
    def _changing_names(self) -> Iterator[dict[str, str]]:
        """Read, change and write the names under a lock that holds across processes."""
        fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            table = self._names()
            yield table
            write_atomically(self._directory / NAMES_FILE, msgspec.json.encode(table))
        finally:
            os.close(fd)
