"""Range sources against real servers that misbehave, the fetchers above them, and the trace file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv._native.lsmt import crc32c
from aenv.errors import AenvError, InvalidInputError, NotFoundError, UnavailableError
from tests.blocks import range_server
from ublk.ranges import ChunkList, FileSpec, HttpSpec, RangeError, RemoteSpec, S3Spec
from ublk.ranges_http import HttpRanges, HttpShared, parse_challenge
from ublk.remote import RemoteLayers, RemoteOptions, TraceRecording, prefetch
from ublk.trace import Trace, runs

CHUNK = 64 << 10
BLOB = random.Random(5).randbytes(12 * CHUNK + 777)
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"


def options(folder: Path, **changes: Any) -> RemoteOptions:
    values: dict[str, Any] = {"directory": folder / "cache", "size": 1 << 30, "chunk_size": CHUNK, "wait_seconds": 20}
    return RemoteOptions(**(values | changes))


@contextlib.contextmanager
def layers(folder: Path, **changes: Any) -> Iterator[RemoteLayers]:
    made = RemoteLayers(options(folder, **changes))
    try:
        yield made
    finally:
        made.close()


def spec(source: Any, *, listed: bool = False) -> RemoteSpec:
    chunks = None
    if listed:
        digests = [hashlib.sha256(BLOB[at : at + CHUNK]).digest() for at in range(0, len(BLOB), CHUNK)]
        chunks = ChunkList(CHUNK, b"".join(digests))
    return RemoteSpec(source, len(BLOB), DIGEST, chunks)


def read_whole(made: RemoteLayers, what: RemoteSpec) -> bytes:
    layer = made.attach(what)  # its source lives as long as it
    return layer.remote.read(0, len(BLOB))


def read_range(source: HttpRanges, offset: int = 100, length: int = 5000, seconds: float = 20) -> bytes:
    buffer = bytearray(length)
    told: list[int] = []
    source.read_into(offset, memoryview(buffer), told.append, time.monotonic() + seconds)
    assert told[-1] == length
    assert told == sorted(told)
    return bytes(buffer)


# --- HTTP ----------------------------------------------------------------------------------------------------------


def test_ranges(tmp_path: Path) -> None:
    with range_server.serve(BLOB) as (url, behaviour):
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        assert read_range(source) == BLOB[100:5100]
        assert read_range(source, len(BLOB) - 5, 5) == BLOB[-5:]
        assert read_range(source, 0, len(BLOB)) == BLOB
        assert behaviour.ranges() == [(100, 5099), (len(BLOB) - 5, len(BLOB) - 1), (0, len(BLOB) - 1)]


@pytest.mark.parametrize(
    ("fault", "permanent"),
    [
        ("cut", False), ("short", False), ("shifted", False), ("other size", False), ("no content-range", False),
        ("encoded", True), ("reset", False), ("whole", True), ("404", True), ("410", True), ("416", True),
        ("500", False), ("503", False), ("429", False),
    ],
)  # fmt: skip
def test_wrong_answers_are_errors(fault: str, permanent: bool) -> None:
    with range_server.serve(BLOB, always=fault) as (url, behaviour):
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        with pytest.raises(RangeError) as caught:
            read_range(source)
        assert caught.value.permanent is permanent
        behaviour.always = ""
        assert read_range(source) == BLOB[100:5100], "a broken connection is not used again"


def test_server_without_ranges_serves_whole_layers() -> None:
    with range_server.serve(BLOB, always="whole") as (url, _):
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        assert read_range(source, 0, len(BLOB)) == BLOB


@pytest.mark.parametrize("where", [range_server.refusing, range_server.silent])
def test_dead_servers_are_errors_by_the_deadline(where: Any) -> None:
    with where() as url:
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        with pytest.raises(RangeError) as caught:
            read_range(source, seconds=0.3)
        assert not caught.value.permanent


def test_answer_that_drips_is_an_error_by_the_deadline() -> None:
    with range_server.serve(BLOB, always="drip") as (url, _):
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        with pytest.raises(RangeError, match="too long"):
            read_range(source, seconds=0.3)


def test_token_is_got_once_and_used_again(tmp_path: Path) -> None:
    with range_server.serve(BLOB, token="t1") as (url, behaviour):
        shared = HttpShared(4)
        source = HttpRanges(HttpSpec(url), len(BLOB), shared)
        for _ in range(3):
            assert read_range(source) == BLOB[100:5100]
        assert read_range(HttpRanges(HttpSpec(url), len(BLOB), shared)) == BLOB[100:5100]
        assert behaviour.tokens_given == 1
        behaviour.token = "t2"  # the old one is refused from now on
        assert read_range(source) == BLOB[100:5100]
        assert behaviour.tokens_given == 2


def test_token_is_renewed_before_it_ends() -> None:
    with range_server.serve(BLOB, token="t", token_seconds=0) as (url, behaviour):
        shared = HttpShared(4)
        source = HttpRanges(HttpSpec(url), len(BLOB), shared)
        read_range(source)
        while shared.tokens.get(source._challenge or ()) is not None:  # a second
            time.sleep(0.05)
        assert read_range(source) == BLOB[100:5100]
        assert behaviour.tokens_given == 2


def test_credentials_are_read_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    with range_server.serve(BLOB, token="t", password="secret") as (url, behaviour):
        source = HttpRanges(HttpSpec(url, credentials=str(file)), len(BLOB), HttpShared(4))
        for content in (None, "no json", '["list"]', '{"username": 7}', '{"username": "user", "password": "wrong"}'):
            if content is not None:
                file.write_text(content)
            with pytest.raises(RangeError) as caught:
                read_range(source)
            assert caught.value.permanent
            assert "secret" not in str(caught.value)
        file.write_text(json.dumps({"username": "user", "password": "secret"}))
        assert read_range(source) == BLOB[100:5100]
        file.write_text(json.dumps({"token": "t"}))
        assert read_range(HttpRanges(HttpSpec(url, credentials=str(file)), len(BLOB), HttpShared(4))) == BLOB[100:5100]
        assert behaviour.tokens_given == 1


def test_redirect_is_followed_without_the_token_and_kept() -> None:
    with range_server.serve(BLOB, token="t") as (url, behaviour):
        behaviour.redirect = url.replace("/blob", "/storage?signed=1")
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        assert read_range(source) == BLOB[100:5100]
        assert read_range(source) == BLOB[100:5100]
        assert [path for path, *_ in behaviour.requests] == ["/blob", "/token", "/blob", "/storage", "/storage"]
        assert all("Authorization" not in h for h, r in zip(behaviour.seen, behaviour.requests, strict=True)
                   if r[0] == "/storage")  # fmt: skip


def test_signed_address_that_ended_is_asked_for_again() -> None:
    with range_server.serve(BLOB) as (url, behaviour):
        behaviour.redirect = url.replace("/blob", "/storage")
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        read_range(source)
        behaviour.faults = ["403"]
        assert read_range(source) == BLOB[100:5100]
        assert [path for path, *_ in behaviour.requests] == ["/blob", "/storage", "/storage", "/blob", "/storage"]


@pytest.mark.parametrize("target", ["/blob", "ftp://127.0.0.1/x", "file:///etc/passwd", "http://"])
def test_bad_redirects_are_errors(target: str) -> None:
    with range_server.serve(BLOB, redirect=target) as (url, behaviour):
        source = HttpRanges(HttpSpec(url), len(BLOB), HttpShared(4))
        with pytest.raises(RangeError) as caught:
            read_range(source)
        assert caught.value.permanent
        assert len(behaviour.requests) < 10


@pytest.mark.parametrize(
    ("header", "scheme", "given"),
    [
        ('Bearer realm="https://a/t",service="s",scope="r:x:pull"', "bearer",
         {"realm": "https://a/t", "service": "s", "scope": "r:x:pull"}),
        ('bearer realm="a\\"b", error=invalid_token', "bearer", {"realm": 'a"b', "error": "invalid_token"}),
        ("Basic", "basic", {}),
        ("", "", {}),
        ('Bearer realm="open', "bearer", {}),
    ],
)  # fmt: skip
def test_challenges(header: str, scheme: str, given: dict[str, str]) -> None:
    found = parse_challenge(header)
    assert found[0] == scheme
    assert given.items() <= found[1].items()


@given(st.text())
def test_no_challenge_is_a_crash(header: str) -> None:
    parse_challenge(header)


# --- fetchers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "short", "shifted", "reset", "500", "503", "wrong", "other size"])
def test_a_fault_now_and_then_is_tried_again(tmp_path: Path, fault: str) -> None:
    with range_server.serve(BLOB, faults=[fault, "", fault]) as (url, _), layers(tmp_path) as made:
        assert read_whole(made, spec(HttpSpec(url), listed=True)) == BLOB
        assert made.stats["failed_chunks"] == 0


@pytest.mark.parametrize("fault", ["wrong", "404", "cut"])
def test_lasting_faults_are_errors_and_nothing_of_them_is_kept(tmp_path: Path, fault: str) -> None:
    with range_server.serve(BLOB, always=fault) as (url, behaviour), layers(tmp_path) as made:
        layer = made.attach(spec(HttpSpec(url), listed=True))
        with pytest.raises(UnavailableError):
            layer.remote.read(3 * CHUNK, 100)
        asked = len(behaviour.requests)
        assert asked == (1 if fault == "404" else 5)
        assert made.stats["stored_chunks"] == 0
        behaviour.always = ""
        assert layer.remote.read(3 * CHUNK, 100) == BLOB[3 * CHUNK :][:100]


def test_without_a_list_wrong_bytes_cannot_be_known(tmp_path: Path) -> None:
    with range_server.serve(BLOB, faults=["wrong"]) as (url, _), layers(tmp_path) as made:
        layer = made.attach(spec(HttpSpec(url)))
        assert layer.remote.read(0, 10) == bytes(x ^ 0x55 for x in BLOB[:10])


def test_list_of_digests_can_be_a_file(tmp_path: Path) -> None:
    whole = spec(HttpSpec("http://127.0.0.1:9/x"), listed=True)
    assert whole.chunks is not None
    assert whole.chunks.digests is not None
    file = tmp_path / "digests"
    file.write_bytes(whole.chunks.digests)
    (tmp_path / "blob").write_bytes(BLOB)
    with layers(tmp_path) as made:
        good = RemoteSpec(FileSpec(str(tmp_path / "blob")), len(BLOB), DIGEST, ChunkList(CHUNK, path=str(file)))
        assert read_whole(made, good) == BLOB
        for content in (b"", whole.chunks.digests[:-1], whole.chunks.digests + b"x"):
            file.write_bytes(content)
            with pytest.raises(InvalidInputError) as caught:
                made.attach(good)
            assert caught.value.field == "layers.chunks"


def test_sixteen_readers_make_one_request(tmp_path: Path) -> None:
    hold = threading.Event()
    with range_server.serve(BLOB, hold=hold) as (url, behaviour), layers(tmp_path) as made:
        layer = made.attach(spec(HttpSpec(url)))
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(layer.remote.read(70, 1000))) for _ in range(16)]
        for thread in threads:
            thread.start()
        while made.stats["waiting"] < 16:
            time.sleep(0.001)
        hold.set()
        for thread in threads:
            thread.join()
        assert found == [BLOB[70:1070]] * 16
        assert behaviour.ranges() == [(0, CHUNK - 1)]


def test_fetchers_are_bounded_and_end(tmp_path: Path) -> None:
    hold = threading.Event()
    with range_server.serve(BLOB, hold=hold) as (url, behaviour), layers(tmp_path, fetchers=3) as made:
        layer = made.attach(spec(HttpSpec(url)))
        threads = [threading.Thread(target=layer.remote.read, args=(number * 2 * CHUNK, 1)) for number in range(6)]
        for thread in threads:
            thread.start()
        while made.stats["waiting"] < 6 or len(behaviour.ranges()) < 3:
            time.sleep(0.001)
        assert made.stats["in_flight"] == 3
        assert made.stats["fetchers"] == 3
        hold.set()
        for thread in threads:
            thread.join()


def test_idle_fetchers_end_but_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ublk.remote.IDLE_SECONDS", 0.02)
    (tmp_path / "blob").write_bytes(BLOB)
    with layers(tmp_path) as made:
        layer = made.attach(spec(FileSpec(str(tmp_path / "blob"))))
        for round_ in range(3):
            threads = [
                threading.Thread(target=layer.remote.read, args=((number * 3 + round_) * CHUNK, 1))
                for number in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while made.stats["fetchers"] > 1:
                time.sleep(0.01)
            time.sleep(0.1)  # in which the last one must not end, too
            assert made.stats["fetchers"] == 1


def test_token_that_cannot_be_sent_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    with range_server.serve(BLOB, token="t") as (url, _):
        for token in ("", "se\ncret", "secr\u00e9t"):
            file.write_text(json.dumps({"token": token}))
            with pytest.raises(RangeError) as caught:
                read_range(HttpRanges(HttpSpec(url, credentials=str(file)), len(BLOB), HttpShared(4)))
            assert "cret" not in str(caught.value)


def test_file_that_changed_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(BLOB)
    with layers(tmp_path) as made:
        layer = made.attach(spec(FileSpec(str(path))))
        assert layer.remote.read(0, 10) == BLOB[:10]
        path.write_bytes(BLOB + b"x")
        with pytest.raises(UnavailableError):
            layer.remote.read(2 * CHUNK, 10)
        path.unlink()
        with pytest.raises(UnavailableError):
            layer.remote.read(2 * CHUNK, 10)
        path.write_bytes(BLOB)
        assert layer.remote.read(0, len(BLOB)) == BLOB


def test_newest_source_of_a_layer_is_asked(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(BLOB)
    with range_server.refusing() as url, layers(tmp_path, wait_seconds=0.5) as made:
        old = made.attach(spec(HttpSpec(url)))
        with pytest.raises(UnavailableError):
            old.remote.read(0, 1)
        new = made.attach(spec(FileSpec(str(tmp_path / "blob"))))
        assert new.remote.read(0, CHUNK) == BLOB[:CHUNK]
        assert old.remote.read(5 * CHUNK, 10) == BLOB[5 * CHUNK :][:10]
        gone = weakref.ref(new)
        del new
        while gone() is not None:  # a fetcher has it for a moment longer
            time.sleep(0.001)
        with pytest.raises(UnavailableError):
            old.remote.read(9 * CHUNK, 10)


# --- S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Spec]:
    """The object BLOB in a server of its own."""
    credentials = tmp_path_factory.mktemp("s3") / "credentials"
    credentials.write_text(json.dumps({"access_key": "k", "secret_key": "s"}))
    command = [
        sys.executable, "-c",
        "from moto.server import ThreadedMotoServer as S\n"
        "s = S('127.0.0.1', 0, verbose=False)\ns.start()\n"
        "print(s.get_host_and_port()[1], flush=True)\ninput()\ns.stop()",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            client = boto3.client(
                "s3", endpoint_url=endpoint, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
            )
            client.create_bucket(Bucket="layers")
            client.put_object(Bucket="layers", Key="a/blob", Body=BLOB)
            yield S3Spec("layers", "a/blob", endpoint, "us-east-1", str(credentials))
        finally:
            process.communicate("\n")


def test_s3_object(tmp_path: Path, s3: S3Spec) -> None:
    with layers(tmp_path) as made:
        assert read_whole(made, spec(s3, listed=True)) == BLOB
        assert made.stats["failed_chunks"] == 0


@pytest.mark.parametrize("change", [{"key": "nothing"}, {"bucket": "nowhere"}])
def test_s3_object_that_is_not_there(tmp_path: Path, s3: S3Spec, change: dict[str, str]) -> None:
    values = {name: getattr(s3, name) for name in ("bucket", "key", "endpoint", "region", "credentials")} | change
    with layers(tmp_path) as made:
        with pytest.raises(UnavailableError):
            read_whole(made, spec(S3Spec(**values)))


def test_s3_object_of_another_size(tmp_path: Path, s3: S3Spec) -> None:
    with layers(tmp_path) as made:
        layer = made.attach(RemoteSpec(s3, len(BLOB) - CHUNK, DIGEST))
        with pytest.raises(UnavailableError):
            layer.remote.read(0, 1)


@pytest.mark.parametrize(
    "source",
    [
        S3Spec("b", "k", "no address", "us-east-1"),
        S3Spec("b", "k", "http://127.0.0.1:1", "us-east-1", "relative"),
        S3Spec("b", "k", "http://127.0.0.1:1", "us-east-1", "/no/such/file"),
    ],
)
def test_s3_arguments_that_are_wrong(tmp_path: Path, source: S3Spec) -> None:
    with layers(tmp_path) as made, pytest.raises(InvalidInputError):
        made.attach(spec(source))


def test_s3_server_that_is_gone(tmp_path: Path, s3: S3Spec) -> None:
    with range_server.refusing() as url, layers(tmp_path, wait_seconds=0.5) as made:
        gone = S3Spec(s3.bucket, s3.key, url.removesuffix("/blob"), s3.region, s3.credentials)
        with pytest.raises(UnavailableError):
            read_whole(made, spec(gone))


# --- kill -9 -------------------------------------------------------------------------------------------------------

_VICTIM = """
import random, sys
from pathlib import Path
from tests.blocks.test_remote_sources import BLOB, CHUNK, HttpSpec, options, spec, RemoteLayers
made = RemoteLayers(options(Path(sys.argv[1]), size=5 * CHUNK))
layer = made.attach(spec(HttpSpec(sys.argv[2]), listed=True))
print("ready", flush=True)
while True:
    at = random.randrange(len(BLOB) - 100)
    assert layer.remote.read(at, 100) == BLOB[at : at + 100]
"""


def test_killed_in_the_middle_of_fetches_over_http(tmp_path: Path) -> None:
    with range_server.serve(BLOB) as (url, behaviour):
        for round_ in range(5):
            with subprocess.Popen(
                [sys.executable, "-c", _VICTIM, tmp_path, url], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                wanted = len(behaviour.requests) + 20 + 7 * round_
                while len(behaviour.requests) < wanted:
                    assert process.poll() is None
                    time.sleep(0.001)
                os.kill(process.pid, signal.SIGKILL)
            with layers(tmp_path, size=5 * CHUNK) as made:
                assert read_whole(made, spec(HttpSpec(url), listed=True)) == BLOB
                assert made.stats["damaged_chunks"] == 0, "a killed process loses nothing of the page cache"
            del made


# --- traces --------------------------------------------------------------------------------------------------------

TRACE = Trace((("sha256:a", CHUNK), ("sha256:b", 2 * CHUNK)), ((0, 5), (1, 0), (0, 1), (1, 7), (0, 2)))


def test_trace_is_what_was_saved(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace") == TRACE
    assert os.listdir(tmp_path) == ["trace"]
    with pytest.raises(UnavailableError):
        TRACE.save(tmp_path / "no" / "trace")
    with pytest.raises(NotFoundError):
        Trace.load(tmp_path / "other")


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace")
    whole = (tmp_path / "trace").read_bytes()
    for at in range(len(whole)):
        with pytest.raises(InvalidInputError):
            Trace.parse(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InvalidInputError):
            Trace.parse(whole[:at])


@given(st.binary(max_size=200))
def test_hostile_traces_with_a_right_checksum(body: bytes) -> None:
    for start in (b"", b"AENVTRC1", b"AENVTRC1\1\0\0\0\1\0\0\0"):
        whole = start + body
        with contextlib.suppress(InvalidInputError):
            found = Trace.parse(whole + crc32c(whole, 0xFFFFFFFF).to_bytes(4, "little"))
            assert all(layer < len(found.layers) for layer, _ in found.entries)


def test_chunks_of_another_size_are_translated() -> None:
    assert runs(TRACE, [("sha256:a", CHUNK), ("sha256:b", 2 * CHUNK)]) == [
        (0, [5]), (1, [0]), (0, [1]), (1, [7]), (0, [2]),
    ]  # fmt: skip
    assert runs(TRACE, [("sha256:b", CHUNK), ("sha256:a", 4 * CHUNK)]) == [
        (1, [1]),
        (0, [0, 1]),
        (1, [0]),
        (0, [14, 15]),
    ]
    assert runs(TRACE, [("sha256:c", CHUNK)]) == []


def test_recorded_layers_are_prefetched(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(BLOB)
    what = spec(FileSpec(str(tmp_path / "blob")))
    with layers(tmp_path) as made:
        layer = made.attach(what)
        recording = TraceRecording([layer], 100)
        for chunk in (7, 2, 7, 11):
            layer.remote.read(chunk * CHUNK, 1)
        trace = recording.trace()
        assert trace.entries == ((0, 7), (0, 2), (0, 11))
    (tmp_path / "second").mkdir()
    with layers(tmp_path / "second", chunk_size=2 * CHUNK) as made:
        layer = made.attach(what)
        assert prefetch(trace, [layer]) == 3
        while made.stats["stored_chunks"] < 3:
            time.sleep(0.001)
        for chunk in (7, 2, 11):
            assert layer.remote.read(chunk * CHUNK, 1) == BLOB[chunk * CHUNK :][:1]
        assert (made.stats["misses"], made.stats["prefetched_chunks"]) == (0, 3)


def test_closed_layers_refuse_to_attach(tmp_path: Path) -> None:
    made = RemoteLayers(options(tmp_path))
    made.close()
    with pytest.raises(AenvError):
        made.attach(spec(FileSpec("/x")))
