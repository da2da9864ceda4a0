"""Types of the FUSE front end."""

from collections.abc import Sequence
from os import PathLike

from aenv._native.lsmt import Image

class Mount:
    directory: str
    def __init__(
        self, directory: str | PathLike[str], record: str | PathLike[str], kept: Sequence[int] = ()
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def is_open(self) -> bool: ...
    def serve(self) -> None: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def connection_id(self) -> str: ...
    @property
    def descriptors(self) -> list[int]: ...
    def add(
        self,
        name: str,
        image: Image,
        *,
        cached: bool,
        uid: int = 0,
        gid: int = 0,
        mode: int = 0o600,
        ino: int = 0,
        made_at: int = 0,
    ) -> int: ...
    def remove(self, name: str, patience: int = 500) -> None: ...
    def opens(self, name: str) -> int: ...
    def resized(self, name: str) -> None: ...
