"""A checkpoint: what a machine is restored from. Files in one directory: disk layers, memory layers, device state."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aenv.vmm.base import Machine

LAYER_SUFFIX = ".lsmt"
INDEX_SUFFIX = ".index"
STATE_SUFFIX = ".state"


def new_layer_id() -> str:
    """Unique in the world: layers are linked from directory to directory under the same name."""
    return secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`disk` and `memory` are file names, lowest layer first; `disk_size` is in bytes.

    Without `memory` (and `state`) only the file system was kept: a machine boots from it. A disk layer whose index
    file is still there was not sealed yet.
    """

    directory: Path
    machine: Machine
    disk: tuple[str, ...]
    disk_size: int
    memory: tuple[str, ...] = ()
    state: str | None = None

    @property
    def disk_layers(self) -> list[Path]:
        return [self.directory / name for name in self.disk]

    @property
    def memory_layers(self) -> list[Path]:
        return [self.directory / name for name in self.memory]

    @property
    def state_file(self) -> Path | None:
        return None if self.state is None else self.directory / self.state

    @property
    def files(self) -> set[str]:
        """The names of all its files."""
        return {*self.disk, *self.memory, *([] if self.state is None else [self.state])}

    def link_into(self, directory: Path) -> Checkpoint:
        """The same checkpoint in another directory of the same file system: hard links, no copies.

        What is there already stays. Raises OSError.
        """
        for name in self.files:
            try:
                os.link(self.directory / name, directory / name)
            except FileExistsError:
                if not os.path.samefile(self.directory / name, directory / name):
                    raise
        for name in self.disk:  # after the layers: one that is sealed meanwhile needs it no more
            with suppress(FileNotFoundError, FileExistsError):
                os.link(index_of(self.directory / name), index_of(directory / name))
        return Checkpoint(directory, self.machine, self.disk, self.disk_size, self.memory, self.state)


def index_of(layer: Path) -> Path:
    """The index file of a layer that is not sealed."""
    return layer.with_suffix(INDEX_SUFFIX)
