"""Where the bytes of remote layers come from: what a source is, and the one for files.

A source reads ranges of one immutable file. It runs in fetcher threads and blocks; each call ends by its deadline, as
far as the operating system lets it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from aenv.errors import InvalidInputError

PIECE = 256 << 10  # bytes read at a time, between two looks at the clock

Arrived = Callable[[int], None]  # told how many bytes of the view are filled by now


class RangeError(Exception):
    """A range could not be read. `permanent`: asking again is no use; `after`: seconds until it may be."""

    def __init__(self, message: str, *, permanent: bool = False, after: float = 0) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.after = after


class RangeSource(Protocol):
    def read_into(self, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        """Fill the view from `offset` on, by `deadline` (of time.monotonic). Raises RangeError or OSError."""
        ...


# --- how they are named in requests ------------------------------------------------------------------------------


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class FileSpec(_Spec, frozen=True, tag="file"):
    """A file of this machine, or of one that it mounts."""

    path: str


class HttpSpec(_Spec, frozen=True, tag="http"):
    """An URL that answers range requests: the blob of a registry (`https://host/v2/NAME/blobs/DIGEST`), for example.

    `credentials`: a JSON file with `username` and `password`, or `token`; it is read each time it is needed.
    `ca`: a file of certificates to trust instead of the system's.
    """

    url: str
    credentials: str | None = None
    ca: str | None = None


class S3Spec(_Spec, frozen=True, tag="s3"):
    """An object. `credentials`: a JSON file with `access_key`, `secret_key` and maybe `session_token`; else boto3 looks
    in its usual places."""

    bucket: str
    key: str
    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None


class ChunkList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 digests of a layer's chunks of `size` bytes, 32 bytes each: here, or in the file `path`, which must stay
    as long as the image is open."""

    size: int
    digests: bytes | None = None
    path: str | None = None


class RemoteSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer that is read on demand. `size` and `digest` are those of the file at the source."""

    source: FileSpec | HttpSpec | S3Spec
    size: int
    digest: str
    chunks: ChunkList | None = None

    def brief(self) -> RemoteSpec:
        """For lists of what is open, which must fit in a frame: without the digests."""
        if self.chunks is None or self.chunks.digests is None:
            return self
        return msgspec.structs.replace(self, chunks=ChunkList(self.chunks.size))


def check_deadline(deadline: float) -> float:
    """Seconds left. Raises RangeError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise RangeError("it took too long")
    return left


def absolute_path(name: str, path: str) -> Path:
    """Raises InvalidInputError naming the argument."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidInputError(name, f"{path!r} is not an absolute path")
    return Path(path)


class FileRanges:
    """Opened for each fetch: a file system that was away and came back is no problem then."""

    def __init__(self, spec: FileSpec, size: int) -> None:
        self._path = absolute_path("layers.source.path", spec.path)
        self._size = size

    def read_into(self, offset: int, view: memoryview, arrived: Arrived, deadline: float) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != self._size:
                raise RangeError(f"{self._path} has {size} bytes instead of {self._size}", permanent=True)
            done = 0
            while done < len(view):
                check_deadline(deadline)
                count = os.preadv(fd, [view[done : done + PIECE]], offset + done)
                if not count:
                    raise RangeError(f"{self._path} ended at byte {offset + done}")
                done += count
                arrived(done)
        finally:
            os.close(fd)
