"""What a server serves, on disk: one small file for each image and for each layer that is being sealed.

Files are replaced atomically, and each step of an operation is written before it can be seen from outside, so a server
that was killed at any point is followed by one that goes on from there. The folder is per boot of the machine: after a
crash of the host nobody has the images open any longer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec

from ublk.ranges import RemoteSpec

log = logging.getLogger("aenv.blockd")

State = TypeVar("State", bound=msgspec.Struct)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ImageState(msgspec.Struct, kw_only=True):
    """An image as `open` got it and as `restack` changed it. Unknown fields of a newer server are ignored."""

    image: str
    layers: list[str | RemoteSpec]  # lowest first
    data: str | None  # the writable layer
    index: str | None
    cached: bool
    uid: int
    gid: int
    mode: int
    ino: int = 0  # FUSE: the kernel knows the file by it
    made_at: int = 0  # FUSE: nanoseconds since 1970, the time stamps of the file
    front_end: str = "fuse"
    device: int | None = None  # ublk: its number


class SealState(msgspec.Struct, kw_only=True):
    """A layer that no longer takes writes and whose trailer may not be on disk yet."""

    data: str
    index: str


class StateFolder:
    """Methods raise OSError if the folder cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        boot_id = BOOT_ID.read_text().strip()
        marker = folder / "boot"
        if not marker.exists() or marker.read_text() != boot_id:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
            marker.write_text(boot_id)

    @property
    def fuse_record(self) -> Path:
        """The file for what must outlive a FUSE front end."""
        return self._folder / "fuse"

    def images(self) -> list[ImageState]:
        """All images, in the order of their inodes."""
        return sorted(self._load("image", ImageState), key=lambda state: state.ino)

    def seals(self) -> list[SealState]:
        return self._load("seal", SealState)

    def save_image(self, state: ImageState) -> None:
        self._save(self._path("image", state.image), state)

    def remove_image(self, name: str) -> None:
        self._path("image", name).unlink(missing_ok=True)

    def save_seal(self, state: SealState) -> None:
        self._save(self._path("seal", state.data), state)

    def remove_seal(self, data: str) -> None:
        self._path("seal", data).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget all: the server ends for good."""
        shutil.rmtree(self._folder)

    def _path(self, kind: str, name: str) -> Path:
        # Names of images may be as long as names of files may be.
        return self._folder / f"{kind}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:40]}.json"

    @staticmethod
    def _save(path: Path, state: msgspec.Struct) -> None:
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(state))
        draft.rename(path)

    def _load(self, kind: str, of: type[State]) -> list[State]:
        found = []
        for path in sorted(self._folder.glob(f"{kind}-*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=of))
            except msgspec.MsgspecError as error:
                log.error("%s: is damaged and ignored: %s", path, error)
        return found
