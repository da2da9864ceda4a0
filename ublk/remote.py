"""Remote layers of a server: their chunk cache, and the threads that fetch what is missing in it.

Readers are C threads: a hit never comes here, a miss sleeps in C until a fetcher has brought its chunk or its time is
over. So a source that hangs holds up its own fetchers and readers, and nobody else.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv._native.lsmt import ChunkCache, Fetch, Layer, Origin, Recording, Remote
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from ublk.ranges import FileRanges, FileSpec, HttpSpec, RangeError, RangeSource, RemoteSpec, absolute_path
from ublk.trace import Trace, runs

log = logging.getLogger("aenv.blockd")

CHUNK_SIZE = 256 << 10  # bytes, of layers without a list of chunks; docs/blocks.md has the measurement
ATTEMPTS = 5  # of one fetch
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds between attempts
IDLE_SECONDS = 10  # then a fetcher ends, but for the last one of an origin
CLOSE_SECONDS = 2  # for fetchers to end
LOG_SECONDS = 10  # between two complaints about one origin
SHA256 = 32  # bytes
_DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}"), "sha512": re.compile(r"[0-9a-f]{128}")}


@dataclass(frozen=True)
class RemoteOptions:
    directory: Path
    size: int  # bytes of chunks
    chunk_size: int = CHUNK_SIZE
    wait_seconds: float = 30  # a reader waits so long for a chunk, then gets EIO; a fetch ends after it, too
    fetchers: int = 8  # threads for each origin
    prefetch_rate: int = 0  # bytes a second of each origin; 0: no bound
    prefetch_most: int = 2  # fetchers of an origin that may work on prefetches


def cache_name(digest: str) -> str:
    """Raises InvalidInputError."""
    algorithm, _, value = digest.partition(":")
    pattern = _DIGESTS.get(algorithm)
    if pattern is None or not pattern.fullmatch(value):
        raise InvalidInputError("layers.digest", f"{digest!r} is neither sha256:… nor sha512:…")
    return f"{algorithm}-{value}"


def chunk_digests(spec: RemoteSpec) -> bytes | None:
    """The list of SHA-256 digests, checked. Raises InvalidInputError, NotFoundError."""
    chunks = spec.chunks
    if chunks is None:
        return None
    if (chunks.digests is None) == (chunks.path is None):
        raise InvalidInputError("layers.chunks", "needs either digests or path")
    if chunks.size <= 0:
        raise InvalidInputError("layers.chunks.size", f"{chunks.size}")
    wanted = -(-spec.size // chunks.size) * SHA256
    found = chunks.digests
    if chunks.path is not None:
        try:
            with absolute_path("layers.chunks.path", chunks.path).open("rb") as file:
                found = file.read(wanted + 1)
        except OSError as error:
            raise NotFoundError(f"layers.chunks: {chunks.path}: {error.strerror}") from error
    assert found is not None
    if len(found) != wanted:
        raise InvalidInputError("layers.chunks", f"{len(found)} bytes of digests instead of {wanted}")
    return found


def origin_name(spec: RemoteSpec) -> str:
    """What fails together has one queue and one set of fetchers."""
    source = spec.source
    if isinstance(source, FileSpec):
        return f"file:{Path(source.path).parent}"
    if isinstance(source, HttpSpec):
        return "/".join(source.url.split("/", 3)[:3])
    return f"s3:{source.endpoint or source.region or ''}/{source.bucket}"


class RemoteLayer:
    """One layer, held by each image that reads it. Without it nothing of the layer is fetched."""

    remote: Remote  # set when its source can be found: a fetch may begin at once

    def __init__(self, spec: RemoteSpec, source: RangeSource, digests: bytes | None) -> None:
        self.spec = spec
        self.source = source
        self.digests = digests

    def check(self, number: int, chunk: memoryview) -> None:
        """Raises RangeError if this is not what the list says."""
        if self.digests is not None:
            at = number * SHA256
            if hashlib.sha256(chunk).digest() != self.digests[at : at + SHA256]:
                raise RangeError(f"chunk {number} of {self.spec.digest} has another digest than its list says")


class RemoteLayers:
    """Methods but `close` are called from threads that may block: `attach` makes files, `open` reads a layer."""

    def __init__(self, options: RemoteOptions) -> None:
        """Raises UnavailableError, ConflictError if another process uses the directory, InvalidInputError."""
        try:
            options.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(f"cache {options.directory}: {error.strerror}") from error
        self._options = options
        self._cache = ChunkCache(
            options.directory, options.size, chunk_size=options.chunk_size, wait_seconds=options.wait_seconds,
            prefetch_rate=options.prefetch_rate, prefetch_most=options.prefetch_most,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._layers: dict[str, list[weakref.ref[RemoteLayer]]] = {}  # by name in the cache, the newest last
        self._origins: dict[str, _Fetchers] = {}
        self._shared: dict[type, Callable[[Any, int], RangeSource]] = {}
        self._closing = threading.Event()

    def attach(self, spec: RemoteSpec) -> RemoteLayer:
        """Raises InvalidInputError naming what is wrong, NotFoundError, UnavailableError."""
        name = cache_name(spec.digest)
        if not 0 < spec.size < 1 << 60:
            raise InvalidInputError("layers.size", f"{spec.size} bytes")
        digests = chunk_digests(spec)
        source = self._source(spec)
        layer = RemoteLayer(spec, source, digests)
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the server ends")
            origin = self._origins.get(origin_name(spec))
            if origin is None:
                origin = self._origins[origin_name(spec)] = _Fetchers(self, origin_name(spec), self._options)
            known = [ref for ref in self._layers.get(name, []) if ref() is not None]
            self._layers[name] = [*known, weakref.ref(layer)]
        try:
            layer.remote = Remote(origin.origin, name, spec.size, spec.chunks.size if spec.chunks else 0)
        except InvalidInputError as error:
            raise InvalidInputError(f"layers.{error.field}", error.message.partition(": ")[2]) from error
        return layer

    def open(self, layers: Sequence[RemoteLayer]) -> list[Layer]:
        """Read headers and indexes. The ends of all layers, where those are, come at the same time."""
        for layer in layers:
            last = (layer.spec.size - 1) // layer.remote.chunk_size
            layer.remote.prefetch([0, last], urgent=True)
        return [Layer(layer.remote) for layer in layers]

    def find(self, name: str) -> RemoteLayer | None:
        with self._lock:
            for ref in reversed(self._layers.get(name, [])):
                layer = ref()
                if layer is not None:
                    return layer
        return None

    @property
    def stats(self) -> dict[str, int]:
        with self._lock:
            threads = sum(origin.threads for origin in self._origins.values())
            found = {"origins": len(self._origins), "fetchers": threads}
        return self._cache.stats._asdict() | found

    def close(self) -> None:
        """End the fetchers. Those that hang in a system call are left to the end of the process."""
        with self._lock:
            self._closing.set()
            origins = list(self._origins.values())
        deadline = time.monotonic() + CLOSE_SECONDS
        for origin in origins:
            origin.close(deadline)
        self._cache.release()

    def _source(self, spec: RemoteSpec) -> RangeSource:
        source = spec.source
        if isinstance(source, FileSpec):
            return FileRanges(source, spec.size)
        with self._lock:
            shared = self._shared.get(type(source))
            if shared is None:
                shared = self._shared[type(source)] = _shared_of(type(source), self._options.fetchers)
        try:
            return shared(source, spec.size)
        except (RangeError, ValueError) as error:
            raise InvalidInputError("layers.source", str(error)) from error


def _shared_of(kind: type, connections: int) -> Callable[[Any, int], RangeSource]:
    """Makes sources of this kind, which share connections. The libraries take tenths of a second to load: only servers
    that use them pay for it."""
    if kind is HttpSpec:
        from ublk.ranges_http import HttpRanges, HttpShared  # noqa: PLC0415

        web = HttpShared(connections)
        return lambda source, size: HttpRanges(source, size, web)
    from ublk.ranges_s3 import S3Clients, S3Ranges  # noqa: PLC0415

    clients = S3Clients(connections)
    return lambda source, size: S3Ranges(source, size, clients)


class _Fetchers:
    """The threads of one origin: one waits always, more come as long as all are busy."""

    def __init__(self, layers: RemoteLayers, name: str, options: RemoteOptions) -> None:
        self.origin = Origin(layers._cache)
        self.threads = 0
        self._layers = layers
        self._name = name
        self._options = options
        self._idle = 0
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()
        self._complained = 0.0
        with self._lock:
            self._start()

    def close(self, deadline: float) -> None:
        self.origin.close()
        with self._lock:
            running = list(self._running)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        """Under the lock."""
        thread = threading.Thread(target=self._run, name=f"fetch {self._name}", daemon=True)
        thread.start()
        self.threads += 1
        self._idle += 1
        self._running.add(thread)

    def _run(self) -> None:
        while (fetch := self._next()) is not None:
            try:
                self._bring(fetch)
            except Exception:
                log.exception("fetching from %s", self._name)
            finally:
                fetch.end(errno.EIO)  # if anything is left
                del fetch  # its buffer
                with self._lock:
                    self._idle += 1

    def _next(self) -> Fetch | None:
        """None: this thread is not needed any longer. One waits always: who asks next would wait for nobody else."""
        while True:
            fetch = self.origin.take(IDLE_SECONDS)
            with self._lock:
                if fetch is not None:
                    self._idle -= 1
                    if not self._idle and self.threads < self._options.fetchers:
                        self._start_another()
                    return fetch
                if self._idle > 1 or self.origin.closed:
                    self._idle -= 1
                    self.threads -= 1
                    self._running.discard(threading.current_thread())
                    return None

    def _start_another(self) -> None:
        try:
            self._start()
        except RuntimeError as error:  # it is only slower without
            log.warning("no more threads for %s: %s", self._name, error)

    def _bring(self, fetch: Fetch) -> None:
        layer = self._layers.find(fetch.name)
        if layer is None:
            return
        deadline = time.monotonic() + self._options.wait_seconds
        view = memoryview(fetch)
        for attempt in range(1, ATTEMPTS + 1):
            start = fetch.delivered
            try:
                layer.source.read_into(
                    fetch.offset + start, view[start:], lambda filled, start=start: _deliver(  # type: ignore[misc]
                        layer, fetch, view, start + filled), deadline,
                )  # fmt: skip
            except (RangeError, OSError) as error:
                if not self._again(error, attempt, deadline, layer):
                    return
            else:
                return

    def _again(self, error: RangeError | OSError, attempt: int, deadline: float, layer: RemoteLayer) -> bool:
        """Wait before the next attempt; false if there is none."""
        permanent = isinstance(error, RangeError) and error.permanent
        pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1)
        if isinstance(error, RangeError):
            pause = max(pause, error.after)
        over = permanent or attempt == ATTEMPTS or time.monotonic() + pause > deadline
        if over or attempt == 1:
            self._complain(layer, error, "given up" if over else "trying again")
        return not over and not self._layers._closing.wait(pause)

    def _complain(self, layer: RemoteLayer, error: Exception, what: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._complained + LOG_SECONDS:
                return
            self._complained = now
        log.warning("layer %s: %s (%s)", layer.spec.digest, error, what)


def _deliver(layer: RemoteLayer, fetch: Fetch, view: memoryview, filled: int) -> None:
    """Hand over the chunks that are whole now. Raises RangeError for one that is wrong."""
    while (at := fetch.delivered) < min(filled, fetch.length):
        end = min(at + fetch.chunk_size, fetch.length)
        if end > filled:
            return
        layer.check(fetch.first + at // fetch.chunk_size, view[at:end])
        fetch.deliver()


def prefetch(trace: Trace, layers: Sequence[RemoteLayer], *, direct: bool = False) -> int:
    """Queue what the trace says, in its order. Gives the number of chunks that were missing."""
    known = [(layer.spec.digest, layer.remote.chunk_size) for layer in layers]
    return sum(layers[at].remote.prefetch(chunks, direct=direct) for at, chunks in runs(trace, known))


class TraceRecording:
    """What is read first of some layers, from now on."""

    def __init__(self, layers: Sequence[RemoteLayer], most: int) -> None:
        self._layers = [(layer.spec.digest, layer.remote.chunk_size) for layer in layers]
        self._recording = Recording([layer.remote for layer in layers], most)

    def trace(self) -> Trace:
        return Trace(tuple(self._layers), tuple(self._recording.entries()))
