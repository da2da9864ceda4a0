from typing import TypedDict

NO_UUID: str
MEMORY_LIMIT: int

class LayerError(ValueError): ...

class Stats(TypedDict):
    dirty_pages: int
    stored_pages: int
    zero_pages: int
    equal_pages: int
    segments: int
    file_bytes: int

Region = tuple[int, int, int]

def capture(
    pid: int,
    regions: list[Region],
    size: int,
    parent_fds: list[int],
    parent_extents: bytes,
    out_fd: int,
    *,
    threads: int = 2,
    uuid: str = ...,
    scan_by_ioctl: bool = True,
) -> tuple[Stats, bytes]: ...
def home(written: bytes, content: bytes, limit: int) -> bytes: ...
def written_bytes(pid: int, regions: list[Region], size: int) -> int: ...
def pages(
    pid: int, regions: list[Region], size: int, *, written: bool, scan_by_ioctl: bool = True
) -> list[tuple[int, int]]: ...
def apply(layer_fd: int, pid: int, regions: list[Region], size: int, *, threads: int = 2) -> int: ...
def write_image(layer_fds: list[int], size: int, parent_fd: int, out_fd: int) -> None: ...
def segments(layer_fd: int, size: int) -> list[tuple[int, int, int | None]]: ...
