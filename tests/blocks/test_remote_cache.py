"""The chunk cache: single flight, eviction, what a killed process leaves, disks that are full, readers that wait."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv._native.lsmt import (
    CacheStats,
    ChunkCache,
    Fetch,
    Image,
    Layer,
    Origin,
    Recording,
    Remote,
    Stack,
    Writer,
    create_writable,
)
from aenv.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from tests.blocks.test_sanitizers import build, run

CHUNK = 64 << 10
BLOB = random.Random(1).randbytes(40 * CHUNK + 1234)
PARTS = ("cache", "source", "zfile", "scratch", "util", "view")


class Source:
    """Fetchers of one origin, which tests hold up or let fail."""

    def __init__(self, cache: ChunkCache, blob: bytes = BLOB, threads: int = 3) -> None:
        self.origin = Origin(cache)
        self.blob = blob
        self.fetched: list[tuple[int, int]] = []  # first chunk, bytes
        self.go = threading.Event()
        self.go.set()
        self.taken = threading.Semaphore(0)
        self.fail = 0  # fetches from now on
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        origin = self.origin
        while not origin.closed:
            fetch = origin.take(5)
            if fetch is not None:
                self._bring(fetch)

    def _bring(self, fetch: Fetch) -> None:
        self.fetched.append((fetch.first, fetch.length))
        self.taken.release()
        self.go.wait(30)
        if self.fail:
            self.fail -= 1
            fetch.end(5)
            return
        view = memoryview(fetch)
        view[:] = self.blob[fetch.offset : fetch.offset + fetch.length]
        while fetch.delivered < fetch.length:
            fetch.deliver()
        fetch.end()

    def close(self) -> None:
        self.go.set()
        self.origin.close()
        for thread in self._threads:
            thread.join()
        del self.origin  # the directory is free when nobody has the cache any longer


@contextlib.contextmanager
def opened(folder: Path, limit: int = 1 << 30, blob: bytes = BLOB, **options: Any) -> Iterator[tuple[Remote, Source]]:
    folder.mkdir(exist_ok=True)
    threads = options.pop("threads", 3)
    cache = ChunkCache(folder, limit, **{"chunk_size": CHUNK, "readahead": 0, "wait_seconds": 60} | options)
    source = Source(cache, blob, threads)
    try:
        yield Remote(source.origin, "sha256-x", len(blob)), source
    finally:
        source.close()


def stats(remote: Remote) -> CacheStats:
    return remote.origin.cache.stats


def in_threads(count: int, body: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def until(condition: Callable[[], bool]) -> None:
    """Others work meanwhile; the test's time-out ends it."""
    event = threading.Event()
    while not condition():
        event.wait(0.001)


def test_one_chunk_is_fetched_once_for_all_its_readers(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as (remote, source):
        source.go.clear()
        found: list[bytes] = []
        threads = in_threads(16, lambda i: found.append(remote.read(5 * CHUNK + i * 100, 100)))
        until(lambda: stats(remote).waiting == 16)
        source.go.set()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(BLOB[5 * CHUNK + i * 100 :][:100] for i in range(16))
        assert source.fetched == [(5, CHUNK)]
        assert (stats(remote).misses, stats(remote).joined) == (1, 15)


def test_neighbours_are_fetched_together_up_to_a_bound(tmp_path: Path) -> None:
    with opened(tmp_path / "c", fetch_bytes=4 * CHUNK, threads=1) as (remote, source):
        assert remote.read(0, 10 * CHUNK) == BLOB[: 10 * CHUNK]
        assert source.fetched == [(0, 4 * CHUNK), (4, 4 * CHUNK), (8, 2 * CHUNK)]
        assert remote.read(39 * CHUNK, CHUNK + 1234) == BLOB[39 * CHUNK :]
        assert source.fetched[3:] == [(39, CHUNK + 1234)]


def test_demand_overtakes_prefetch(tmp_path: Path) -> None:
    with opened(tmp_path / "c", fetch_bytes=CHUNK, threads=1, prefetch_most=1) as (remote, source):
        source.go.clear()
        assert remote.prefetch([9, 3, 4, 3, 1000]) == 3
        source.taken.acquire()  # the first one is under way
        thread = in_threads(1, lambda _: remote.read(20 * CHUNK, 1))[0]
        until(lambda: stats(remote).waiting == 1)
        joining = in_threads(1, lambda _: remote.read(4 * CHUNK, 1))[0]
        until(lambda: stats(remote).waiting == 2)
        source.go.set()
        thread.join()
        joining.join()
        until(lambda: stats(remote).queued + stats(remote).in_flight == 0)
        assert [first for first, _ in source.fetched] == [9, 20, 4, 3]
        assert stats(remote).prefetched_chunks == 2, "one of them was wanted meanwhile"


def test_prefetch_leaves_fetchers_for_demand(tmp_path: Path) -> None:
    with opened(tmp_path / "c", fetch_bytes=CHUNK, threads=3, prefetch_most=2) as (remote, source):
        source.go.clear()
        remote.prefetch(range(10, 20))
        source.taken.acquire()
        source.taken.acquire()
        assert not source.taken.acquire(timeout=0.05)
        thread = in_threads(1, lambda _: remote.read(0, 1))[0]
        source.taken.acquire()
        assert source.fetched[2][0] == 0
        source.go.set()
        thread.join()


def test_prefetch_rate_is_a_bound(tmp_path: Path) -> None:
    """One chunk in 1000 s: the second must still be queued when everything else has been done."""
    with opened(tmp_path / "c", fetch_bytes=CHUNK, prefetch_rate=CHUNK // 1000) as (remote, source):
        remote.prefetch([1, 5])
        source.taken.acquire()
        assert remote.read(8 * CHUNK, 10) == BLOB[8 * CHUNK :][:10]
        until(lambda: stats(remote).in_flight == 0)
        assert stats(remote).queued == 1
        assert [first for first, _ in source.fetched] == [1, 8]
        assert remote.read(5 * CHUNK, 10) == BLOB[5 * CHUNK :][:10], "a reader does not wait for its turn"


def test_sequential_reader_is_read_ahead_of(tmp_path: Path) -> None:
    with opened(tmp_path / "c", fetch_bytes=CHUNK, readahead=8 * CHUNK) as (remote, source):
        for at in range(0, 12 * CHUNK, CHUNK // 4):
            assert remote.read(at, CHUNK // 4) == BLOB[at : at + CHUNK // 4]
        until(lambda: stats(remote).queued + stats(remote).in_flight == 0)
        demanded = stats(remote).misses
        assert demanded < 6
        assert max(first for first, _ in source.fetched) > 12
        fetched = len(source.fetched)
        for chunk in (30, 36, 28, 39):
            remote.read(chunk * CHUNK, 1)
        assert len(source.fetched) <= fetched + 4, "a random reader is not"


def test_failed_fetch_is_an_error_and_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as (remote, source):
        source.fail = 1
        with pytest.raises(UnavailableError):
            remote.read(0, 10)
        assert stats(remote).failed_chunks == 1
        assert remote.read(0, 10) == BLOB[:10]
        with pytest.raises(UnavailableError):
            remote.read(len(BLOB) - 5, 6)


def test_chunks_before_the_failing_one_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "c", threads=0) as (remote, source):

        def half(_: int) -> None:
            fetch = source.origin.take(10)
            assert fetch is not None
            assert (fetch.first, fetch.length) == (0, 2 * CHUNK)
            memoryview(fetch)[:CHUNK] = BLOB[:CHUNK]
            fetch.deliver()
            until(lambda: stats(remote).joined == 1)  # the reader has come to the second one
            fetch.end(5)
            with pytest.raises(ConflictError):
                fetch.deliver()

        thread = in_threads(1, half)[0]
        with pytest.raises(UnavailableError):
            remote.read(0, 2 * CHUNK)
        thread.join()
        assert remote.read(0, CHUNK) == BLOB[:CHUNK]


def test_fetcher_that_forgets_its_fetch_fails_its_readers(tmp_path: Path) -> None:
    with opened(tmp_path / "c", threads=0) as (remote, source):
        thread = in_threads(1, lambda _: source.origin.take(10))[0]
        with pytest.raises(UnavailableError):
            remote.read(0, 1)
        thread.join()


def test_readers_of_an_origin_that_hangs_get_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "c", wait_seconds=0.05) as (remote, source):
        source.go.clear()
        with pytest.raises(UnavailableError):
            remote.read(0, 1)
        assert stats(remote).expired == 1
        source.go.set()
        until(lambda: stats(remote).in_flight == 0)
        assert remote.read(0, 1) == BLOB[:1], "the next one tries again"


def test_wants_of_a_dead_origin_do_not_pile_up(tmp_path: Path) -> None:
    with opened(tmp_path / "c", threads=0, wait_seconds=0.01) as (remote, _):
        for chunk in range(20):
            with pytest.raises(UnavailableError):
                remote.read(chunk * CHUNK, 1)
        assert stats(remote).queued == 0


def test_other_origins_go_on(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as (remote, source):
        remote.read(0, 1)
        source.go.clear()
        stuck = in_threads(5, lambda i: remote.read((10 + i) * CHUNK, 1))
        until(lambda: stats(remote).waiting == 5)
        other = Source(remote.origin.cache)
        try:
            second = Remote(other.origin, "sha256-y", len(BLOB))
            assert second.read(0, len(BLOB)) == BLOB
            assert remote.read(0, CHUNK) == BLOB[:CHUNK]
        finally:
            other.close()
        source.go.set()
        for thread in stuck:
            thread.join()


def test_closing_an_origin_wakes_its_readers(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as (remote, source):
        source.go.clear()
        errors: list[Exception] = []

        def reader(number: int) -> None:
            with pytest.raises(UnavailableError) as caught:
                remote.read(number * CHUNK, 1)
            errors.append(caught.value)

        threads = in_threads(8, reader)
        until(lambda: stats(remote).waiting == 8)
        source.origin.close()
        for thread in threads:
            thread.join()
        assert len(errors) == 8


def test_new_source_of_a_layer_takes_over(tmp_path: Path) -> None:
    """Who opens a layer with a source that works is not told the failures of the one before."""
    with opened(tmp_path / "c") as (remote, source):
        source.go.clear()
        source.fail = 1
        first = in_threads(1, lambda _: _read(remote))[0]
        source.taken.acquire()
        other = Source(remote.origin.cache)
        try:
            again = Remote(other.origin, "sha256-x", len(BLOB))
            second = in_threads(1, lambda _: _read(again))[0]
            until(lambda: stats(remote).waiting == 2)
            source.go.set()
            second.join()
            first.join()
            assert again.read(0, 1) == BLOB[:1]
            assert other.fetched == [(0, CHUNK)]
        finally:
            other.close()


def _read(remote: Remote) -> None:
    assert remote.read(0, 1) == BLOB[:1]


# --- eviction ------------------------------------------------------------------------------------------------------


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path / "c", limit=16 * CHUNK, fetch_bytes=CHUNK, threads=1) as (remote, source):
        for chunk in range(14):
            remote.read(chunk * CHUNK, 1)
            remote.read(0, 1)  # stays in use
        for chunk in range(20, 30):
            remote.read(chunk * CHUNK, 1)
            remote.read(0, 1)
        source.fetched.clear()
        remote.read(0, 1)
        for chunk in range(25, 30):
            remote.read(chunk * CHUNK, 1)
        assert source.fetched == []
        remote.read(CHUNK, 1)
        assert source.fetched == [(1, CHUNK)]
        assert stats(remote).evicted_chunks > 0
        until(lambda: stats(remote).used_bytes <= 16 * CHUNK)
        assert size_on_disk(tmp_path / "c") <= 16 * CHUNK


def test_eviction_is_over_all_layers(tmp_path: Path) -> None:
    with opened(tmp_path / "c", limit=16 * CHUNK, fetch_bytes=CHUNK) as (remote, source):
        remote.read(0, 8 * CHUNK)
        other = Remote(source.origin, "sha256-y", len(BLOB))
        for chunk in range(40):
            assert other.read(chunk * CHUNK, 100) == BLOB[chunk * CHUNK :][:100]
        source.fetched.clear()
        remote.read(0, CHUNK)
        assert source.fetched == [(0, CHUNK)]
        del other
        name = tmp_path / "c" / "sha256-y.map"
        assert name.exists()
        for chunk in range(20, 40):
            remote.read(chunk * CHUNK, 1)
        until(lambda: not name.exists())  # nothing of it was left


@pytest.mark.parametrize("limit", [3 * CHUNK, CHUNK, CHUNK - 1, 0])
def test_reads_are_right_in_a_cache_that_is_too_small(tmp_path: Path, limit: int) -> None:
    with opened(tmp_path / "c", limit=limit, fetch_bytes=4 * CHUNK, readahead=8 * CHUNK) as (remote, _):
        failures: list[int] = []

        def reader(seed: int) -> None:
            generator = random.Random(seed)
            for _ in range(60):
                at = generator.randrange(len(BLOB))
                length = min(generator.randrange(1, 3 * CHUNK), len(BLOB) - at)
                if remote.read(at, length, direct=seed % 2) != BLOB[at : at + length]:
                    failures.append(at)

        for thread in in_threads(8, reader):
            thread.join()
        assert not failures
        until(lambda: stats(remote).queued + stats(remote).in_flight == 0)
        assert stats(remote).used_bytes <= limit


@pytest.mark.root
def test_full_disk_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], check=True)
    try:
        read_twice(folder)
        read_twice(folder)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.root
def test_layer_that_is_new_on_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], check=True)
    try:
        open_on_full_disk(folder)
    finally:
        subprocess.run(["umount", folder], check=True)


def open_on_full_disk(folder: Path) -> None:
    with opened(folder, fetch_bytes=CHUNK, blob=BLOB[: 4 * CHUNK]) as (remote, source):
        remote.read(0, 4 * CHUNK)
        until(lambda: stats(remote).stored_chunks == 4)
        other = folder / "other"
        with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
            for _page in range(1000):
                file.write(bytes(4096))
        second = Remote(source.origin, "sha256-y", CHUNK)  # chunks give way
        assert second.read(0, CHUNK) == BLOB[:CHUNK]
        assert stats(remote).evicted_chunks > 0


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ChunkCache(tmp_path / "nothing", 1 << 20)
    with pytest.raises((NotFoundError, UnavailableError)):  # no file can be made there
        ChunkCache("/proc/self", 1 << 20)


def read_twice(folder: Path) -> None:
    with opened(folder, fetch_bytes=CHUNK) as (remote, _):
        for _round in range(2):
            assert remote.read(0, len(BLOB)) == BLOB
        until(lambda: stats(remote).in_flight == 0)
        assert stats(remote).not_stored + stats(remote).evicted_chunks > 0


def fill(folder: Path) -> None:
    """A cache that holds all of the layer."""
    with opened(folder) as (remote, _):
        assert remote.read(0, len(BLOB)) == BLOB
        until(lambda: stats(remote).stored_chunks == 41)


# --- what is on disk -----------------------------------------------------------------------------------------------


def test_chunks_are_there_after_a_restart(tmp_path: Path) -> None:
    fill(tmp_path / "c")
    with opened(tmp_path / "c") as (remote, source):
        assert stats(remote).used_bytes == len(BLOB)
        assert remote.read(0, len(BLOB)) == BLOB
        assert source.fetched == []


@pytest.mark.parametrize(
    "damage", ["data byte", "data hole", "data end", "record", "header", "no data", "no map", "swap"]
)
def test_damage_is_found_and_fetched_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    fill(folder)
    data, table = folder / "sha256-x.data", folder / "sha256-x.map"
    with data.open("r+b") as file, table.open("r+b") as records:
        match damage:
            case "data byte":
                os.pwrite(file.fileno(), bytes([BLOB[5 * CHUNK + 7] ^ 1]), 5 * CHUNK + 7)
            case "data hole":
                os.pwrite(file.fileno(), bytes(4096), 5 * CHUNK)
            case "data end":
                file.truncate(5 * CHUNK)
            case "record":
                os.pwrite(records.fileno(), b"\xff", 4096 + 5 * 8)
            case "header":
                os.pwrite(records.fileno(), b"\xff", 8)
            case "swap":  # a chunk where another one belongs, with its record
                os.pwrite(file.fileno(), BLOB[6 * CHUNK : 7 * CHUNK], 5 * CHUNK)
                os.pwrite(records.fileno(), os.pread(records.fileno(), 8, 4096 + 6 * 8), 4096 + 5 * 8)
    if damage.startswith("no "):
        (data if damage == "no data" else table).unlink()
    with opened(folder) as (remote, source):
        for direct in (False, True):
            assert remote.read(0, len(BLOB), direct=direct) == BLOB
        whole = damage in ("data end", "header", "no data", "no map")
        assert sum(length for _, length in source.fetched) == (len(BLOB) if whole else CHUNK)


def test_layer_of_another_size_begins_anew(tmp_path: Path) -> None:
    fill(tmp_path / "c")
    with opened(tmp_path / "c") as (remote, source):
        with pytest.raises(InvalidInputError) as caught:
            Remote(source.origin, "sha256-x", len(BLOB) - 1)
        assert caught.value.field == "size"
        with pytest.raises(InvalidInputError) as caught:
            Remote(source.origin, "sha256-x", len(BLOB), 2 * CHUNK)
        assert caught.value.field == "chunks.size"
        assert remote.chunk_size == CHUNK
        del remote
        again = Remote(source.origin, "sha256-x", len(BLOB), 2 * CHUNK)
        assert again.read(0, len(BLOB)) == BLOB
        until(lambda: stats(again).stored_chunks == 21)
        assert stats(again).used_bytes == len(BLOB)


def test_directory_has_one_user(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 1 << 20)
    with pytest.raises(ConflictError):
        ChunkCache(tmp_path, 1 << 20)
    del cache
    ChunkCache(tmp_path, 1 << 20)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chunk_size": 100_000}, "chunk_size"),
        ({"chunk_size": 32 << 10}, "chunk_size"),
        ({"chunk_size": 32 << 20}, "chunk_size"),
        ({"wait_seconds": 0}, "wait_seconds"),
        ({"prefetch_most": 0}, "prefetch_most"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ChunkCache(tmp_path, 1 << 20, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["", ".x", "a/b", "../x", "x" * 200, "a\0b"])
def test_names_stay_in_the_directory(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "c") as (_, source):
        with pytest.raises(InvalidInputError) as caught:
            Remote(source.origin, name, 100)
        assert caught.value.field == "digest"


# --- images --------------------------------------------------------------------------------------------------------


def test_restack_does_not_wait_for_a_source_that_hangs(tmp_path: Path) -> None:
    size = 32 * CHUNK
    path = tmp_path / "layer"
    with path.open("wb") as file:
        writer = Writer(file.fileno(), size)
        writer.add(0, BLOB[: 30 * CHUNK])
        writer.finish()
    with opened(tmp_path / "c", blob=path.read_bytes()) as (remote, source):
        stack = Stack([Layer(remote)])
        pairs = [(tmp_path / f"{n}.data", tmp_path / f"{n}.index") for n in "ab"]
        create_writable(*pairs[0], size, uuid=str(uuid.uuid4()))
        create_writable(*pairs[1], size, uuid=str(uuid.uuid4()))
        image = Image(stack, *pairs[0])
        image.write(8 * CHUNK, b"w" * 512)
        source.go.clear()
        found: list[bytes] = []
        threads = in_threads(4, lambda _: found.append(image.read(4 * CHUNK, 8 * CHUNK)))
        until(lambda: stats(remote).waiting == 4)
        image.write(20 * CHUNK, b"v" * 512)
        image.flush()
        image.restack(*pairs[1]).finish()
        image.resize(size)
        assert image.read(20 * CHUNK, 512) == b"v" * 512
        assert not found
        source.go.set()
        for thread in threads:
            thread.join()
        expected = bytearray(BLOB[4 * CHUNK : 12 * CHUNK])
        expected[4 * CHUNK : 4 * CHUNK + 512] = b"w" * 512
        assert found == [bytes(expected)] * 4
        image.close()


def test_recording_has_the_first_reads_in_order(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as (remote, source):
        other = Remote(source.origin, "sha256-y", len(BLOB))
        remote.read(0, 1)
        recording = Recording([remote, other], 5)
        for chunk in (7, 7, 0, 3):
            remote.read(chunk * CHUNK, 1)
        other.read(0, 1)
        other.read(CHUNK, 2 * CHUNK)
        assert recording.entries() == [(0, 7), (0, 0), (0, 3), (1, 0), (1, 1)]
        for layers, most in (([], 5), ([remote], 0), ([remote] * 256, 5)):
            with pytest.raises(InvalidInputError):
                Recording(layers, most)


# --- the C core under sanitizers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build") / "cache", "address,undefined", "c_cache.c", PARTS)


@pytest.fixture(scope="module")
def with_thread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build") / "cache", "thread", "c_cache.c", PARTS)


@pytest.mark.parametrize("limit", [64 << 20, 400_000, 70_000, 0])
def test_concurrent_use(with_address: Path, tmp_path: Path, limit: int) -> None:
    run(with_address, "threads", tmp_path, limit, 10)


@pytest.mark.parametrize("limit", [64 << 20, 400_000])
def test_concurrent_use_without_races(with_thread: Path, tmp_path: Path, limit: int) -> None:
    run(with_thread, "threads", tmp_path, limit, 2)


@pytest.mark.parametrize("limit", [64 << 20, 400_000])
def test_kill_in_the_middle_of_fetches_and_evictions(with_address: Path, tmp_path: Path, limit: int) -> None:
    run(with_address, "kill", tmp_path, limit, 12)


def test_damaged_files(with_address: Path, tmp_path: Path) -> None:
    run(with_address, "damage", tmp_path, 30)
