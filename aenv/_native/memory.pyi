from typing import TypedDict

NO_UUID: str
MEMORY_LIMIT: int

class ParentError(ValueError): ...

class Stats(TypedDict):
    dirty_pages: int
    stored_pages: int
    zero_pages: int
    equal_pages: int
    segments: int
    file_bytes: int

Region = tuple[int, int, int]

class Room:
    def __init__(self, fd: int, size: int, *, threads: int = 2) -> None: ...
    @property
    def length(self) -> int: ...
    def close(self) -> None: ...

def capture(
    pid: int,
    regions: list[Region],
    size: int,
    parent_fds: list[int],
    parent_extents: bytes,
    out_fd: int,
    *,
    room: Room | None = None,
    threads: int = 2,
    uuid: str = ...,
    scan_by_ioctl: bool = True,
) -> tuple[Stats, bytes]: ...
def home(written: bytes, content: bytes, limit: int) -> bytes: ...
def written_bytes(pid: int, regions: list[Region], size: int) -> int: ...
def pages(
    pid: int, regions: list[Region], size: int, *, written: bool, scan_by_ioctl: bool = True
) -> list[tuple[int, int]]: ...
def prefetch(fd: int, offset: int, length: int) -> int: ...
