"""Types of the layer library."""

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import NamedTuple

from typing_extensions import Buffer

MAX_ENTRIES: int
FORMS: dict[str, int]

_Path = str | PathLike[str]

class LayerInfo(NamedTuple):
    kind: str
    virtual_size: int
    uuid: str
    parent_uuid: str
    user_tag: str
    entries: int
    data_bytes: int

class Segment(NamedTuple):
    offset: int
    length: int
    moffset: int
    zeroed: bool
    layer: int

class CommitResult(NamedTuple):
    entries: int
    data_bytes: int
    zero_bytes: int
    same_bytes: int
    file_size: int

class Recovery(NamedTuple):
    records: int
    cut_records: int
    cut_data_bytes: int

class Stats(NamedTuple):
    reads: int
    read_bytes: int
    writes: int
    write_bytes: int
    discards: int
    flushes: int
    restacks: int
    errors: int

def crc32c(data: Buffer, crc: int = 0) -> int: ...
def create_writable(data: _Path, index_path: _Path, virtual_size: int, *, uuid: str, parent_uuid: str = "") -> None: ...
def lookup_nanoseconds(
    segments: int, rounds: int, seed: int = 1, *, scattered: bool = False
) -> tuple[float, float]: ...
def load_nanoseconds(size: int, rounds: int, seed: int = 1) -> float: ...
def time_reads(image: Image | None, fd: int, size: int, length: int, rounds: int, seed: int = 1) -> memoryview: ...
def time_faults(region: Buffer, rounds: int, seed: int = 1) -> memoryview: ...

class CacheStats(NamedTuple):
    hits: int
    misses: int
    joined: int
    fetches: int
    fetched_chunks: int
    fetched_bytes: int
    prefetched_chunks: int
    failed_chunks: int
    expired: int
    stored_chunks: int
    evicted_chunks: int
    evicted_bytes: int
    damaged_chunks: int
    not_stored: int
    used_bytes: int
    limit: int
    waiting: int
    queued: int
    in_flight: int
    layers: int

class ChunkCache:
    directory: _Path
    def release(self) -> None: ...
    def __init__(
        self,
        directory: _Path,
        limit: int,
        *,
        chunk_size: int = ...,
        fetch_bytes: int = ...,
        readahead: int = ...,
        wait_seconds: float = 30,
        prefetch_rate: int = 0,
        prefetch_most: int = 2,
    ) -> None: ...
    @property
    def stats(self) -> CacheStats: ...

class Origin:
    cache: ChunkCache
    def __init__(self, cache: ChunkCache) -> None: ...
    def take(self, seconds: float) -> Fetch | None: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...

class Fetch:
    name: str
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def prefetch(self) -> bool: ...
    @property
    def delivered(self) -> int: ...
    def deliver(self) -> None: ...
    def end(self, code: int = 0) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Remote:
    name: str
    size: int
    origin: Origin
    def __init__(self, origin: Origin, name: str, size: int, chunk_size: int = 0) -> None: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def stats(self) -> CacheStats: ...
    def read(self, offset: int, length: int, *, direct: bool = False) -> bytes: ...
    def prefetch(self, chunks: Sequence[int], *, urgent: bool = False, direct: bool = False) -> int: ...

class Recording:
    remotes: list[Remote]
    def __init__(self, remotes: Sequence[Remote], most: int = 65536) -> None: ...
    def entries(self) -> list[tuple[int, int]]: ...

class Layer:
    path: str
    def __init__(self, path: _Path | Remote, index_path: _Path | None = None) -> None: ...
    @property
    def info(self) -> LayerInfo: ...
    def segments(self) -> Iterator[Segment]: ...
    def verify(self, progress: Callable[[int], None] | None = None) -> None: ...

class Stack:
    def __init__(self, layers: Sequence[Layer]) -> None: ...
    def push(self, layer: Layer) -> Stack: ...
    @property
    def virtual_size(self) -> int: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def level_count(self) -> int: ...
    @property
    def segment_count(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    def read(self, offset: int, length: int) -> bytes: ...
    def segments(self) -> Iterator[Segment]: ...
    def memory_extents(
        self,
        size: int,
        *,
        base: int = -1,
        layers: int = 0,
        zero: int = -1,
        limit: int | None = None,
    ) -> bytes | None: ...
    def commit(
        self,
        fd: int,
        *,
        form: str = "plain",
        block_size: int = 4096,
        tar: bool = False,
        uuid: str = "",
        parent_uuid: str = "",
        user_tag: str = "",
        parent: Stack | None = None,
        keep_zeros: bool = False,
        max_entries: int = ...,
        virtual_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CommitResult: ...
    def commit_in_background(
        self,
        fd: int,
        stop: Stop,
        *,
        uuid: str = "",
        user_tag: str = "",
        parent: Stack | None = None,
        keep_zeros: bool = False,
        max_entries: int = ...,
    ) -> CommitResult: ...

class Stop:
    def set(self) -> None: ...

class Writer:
    def __init__(
        self,
        fd: int,
        virtual_size: int,
        *,
        form: str = "plain",
        block_size: int = 4096,
        tar: bool = False,
        uuid: str = "",
        parent_uuid: str = "",
        user_tag: str = "",
    ) -> None: ...
    def add(self, offset: int, data: Buffer) -> None: ...
    def add_zeros(self, offset: int, length: int) -> None: ...
    @property
    def entries(self) -> int: ...
    def finish(self) -> int: ...

class Sealing:
    data_path: str
    def __init__(self, data: _Path, index_path: _Path) -> None: ...
    def finish(self) -> None: ...

class Image:
    data_path: str | None
    index_path: str | None
    recovery: Recovery | None
    def __init__(
        self,
        stack: Stack | None = None,
        data: _Path | None = None,
        index_path: _Path | None = None,
        *,
        direct: bool = False,
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def stack(self) -> Stack | None: ...
    @property
    def segments(self) -> tuple[int, int]: ...
    @property
    def stats(self) -> Stats: ...
    def read(self, offset: int, length: int) -> bytes: ...
    def write(self, offset: int, data: Buffer) -> None: ...
    def discard(self, offset: int, length: int) -> None: ...
    def flush(self) -> None: ...
    def resize(self, virtual_size: int) -> None: ...
    def restack(self, data: _Path, index_path: _Path) -> Sealing: ...
    def replace(self, stack: Stack) -> None: ...
