from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import AenvError, ConflictError, NotFoundError
from aenv.sandbox.service import CreateOptions, EgressProxy, NetworkOptions, OnTimeout, SandboxState
from aenv.sandbox.store import Machine, Record, Store, boot_id

FULL = CreateOptions(
    template="base:v1",
    timeout=300,
    metadata={"user": "ä\u0000\U0001f600", "": ""},
    env={"A": "1"},
    secure=False,
    on_timeout=OnTimeout.PAUSE,
    auto_resume=True,
    pause_memory=False,
    network=NetworkOptions(
        allow_out=("8.8.8.8/32", "*.example.com"),
        deny_out=("0.0.0.0/0",),
        allow_internet_access=False,
        rules={"example.com": {"X-Key": "value"}},
        egress_proxy=EgressProxy("127.0.0.1:1080", "me", "secret"),
        dns_servers=(),
        allow_public_traffic=False,
        mask_request_host="localhost:${PORT}",
        https_ports=(443, 8443),
    ),
)


def record(identity: str = "i1", **changes: object) -> Record:
    fields: dict[str, object] = {
        "id": identity, "template_id": "t1", "options": FULL, "started_at": 1.5, "end_at": 2.25,
    }  # fmt: skip
    return Record(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "aenv.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


def reload(store: Store, path: Path) -> list[Record]:
    store.close()
    again = Store(path)
    try:
        return again.load()
    finally:
        again.close()


def test_a_record_comes_back_equal(store: Store, path: Path) -> None:
    full = record(
        machine=Machine(10, 2**62, "/run/aenv/x", 3, "disk", "abc"), machine_id="m", disk=["d1.lsmt", "d2.lsmt"],
        upper="u.lsmt", memory=["m1.lsmt"], state_file="a.state", lineage=["s2", "t1"], unsettled="boot",
    )  # fmt: skip
    plain = record("i2", options=CreateOptions("base", 1))
    store.insert(full)
    store.insert(plain)
    assert reload(store, path) == [full, plain]
    assert isinstance(reload(store, path)[0].options.network.egress_proxy, EgressProxy)


texts = st.text(max_size=20).filter(lambda t: t.isprintable())
maps = st.dictionaries(texts, texts, max_size=3)
networks = st.builds(
    NetworkOptions,
    allow_out=st.tuples(texts),
    allow_internet_access=st.none() | st.booleans(),
    rules=st.dictionaries(texts, maps, max_size=2),
    egress_proxy=st.none() | st.builds(EgressProxy, texts, texts, texts),
    dns_servers=st.none() | st.tuples(texts, texts),
    https_ports=st.tuples(st.integers(1, 65535)),
)
every_options = st.builds(
    CreateOptions,
    template=texts,
    timeout=st.integers(0, 10**9),
    metadata=maps,
    env=maps,
    on_timeout=st.sampled_from(OnTimeout),
    network=networks,
)


@settings(deadline=None)
@given(every_options)
def test_all_options_survive_the_way_through_json(options: CreateOptions) -> None:
    back = msgspec.json.decode(msgspec.json.encode(record(options=options)), type=Record)
    assert back == record(options=options)
    assert isinstance(back.options.network.allow_out, tuple)


@pytest.mark.parametrize("state", list(SandboxState))
def test_every_state_round_trips(store: Store, path: Path, state: SandboxState) -> None:
    r = record()
    store.insert(r)
    store.transition(r, (SandboxState.STARTING,), state)
    (found,) = reload(store, path)
    assert found.state is state


def test_transition_is_a_compare_and_set(store: Store, path: Path) -> None:
    r = record()
    store.insert(r)
    with pytest.raises(ConflictError, match="starting"):
        store.transition(r, (SandboxState.RUNNING, SandboxState.PAUSED), SandboxState.KILLING)
    assert r.state is SandboxState.STARTING
    other = Store(path)
    (seen,) = other.load()
    other.transition(seen, (SandboxState.STARTING,), SandboxState.KILLING)
    with pytest.raises(ConflictError, match="no longer"):
        store.transition(r, (SandboxState.STARTING,), SandboxState.RUNNING)
    assert r.state is SandboxState.STARTING  # memory did not run ahead of the store
    with pytest.raises(NotFoundError):
        store.save(r)
    other.close()
    assert reload(store, path)[0].state is SandboxState.KILLING


def test_a_transition_that_cannot_be_written_changes_nothing(store: Store, path: Path) -> None:
    r = record()
    store.insert(r)
    store.close()
    with pytest.raises(sqlite3.Error):
        store.transition(r, (SandboxState.STARTING,), SandboxState.RUNNING)
    assert r.state is SandboxState.STARTING


def test_ids_are_unique_and_delete_is_final(store: Store, path: Path) -> None:
    r = record()
    store.insert(r)
    with pytest.raises(sqlite3.IntegrityError):
        store.insert(r)
    store.delete(r.id)
    store.delete(r.id)
    with pytest.raises(ConflictError):
        store.transition(r, (SandboxState.STARTING,), SandboxState.RUNNING)
    with pytest.raises(NotFoundError):
        store.save(r)
    assert reload(store, path) == []


@pytest.mark.parametrize("there_before", [False, True])
def test_records_are_private(path: Path, there_before: bool) -> None:
    if there_before:
        path.touch(0o644)
        path.chmod(0o644)
    store = Store(path)
    store.insert(record())
    assert {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {
        "aenv.db": 0o600, "aenv.db-wal": 0o600, "aenv.db-shm": 0o600,
    }  # fmt: skip
    store.close()


def test_a_durable_write_is_one_like_any_other(store: Store, path: Path) -> None:
    r = record()
    store.insert(r)
    r.upper = "u.lsmt"
    store.save(r, durable=True)
    with pytest.raises(NotFoundError):
        store.save(record("other"), durable=True)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (1,)  # the next one is quick again
    assert reload(store, path) == [r]


def test_boots_have_names() -> None:
    assert boot_id() == boot_id() != ""


@pytest.mark.parametrize("version", [1, 99])
def test_another_schema_version_is_refused_with_a_hint(path: Path, version: int) -> None:
    Store(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
        db.execute(f"PRAGMA user_version={version}")
    before = path.read_bytes()
    with pytest.raises(ConflictError, match=f"version {version}") as caught:
        Store(path)
    assert caught.value.hint
    assert path.read_bytes() == before


def test_what_is_no_data_base_is_refused(path: Path) -> None:
    for make in (lambda: path.write_bytes(b"this is not a data base" * 100), lambda: (path.unlink(), path.mkdir())):
        make()
        refused(path)


def refused(path: Path) -> None:
    with pytest.raises(AenvError, match=r"aenv\.db"):
        Store(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("record", b"{"),
        ("record", b"[]"),
        ("record", b'{"id": 5}'),
        ("state", "dancing"),
    ],
)
def test_a_damaged_row_is_refused_and_named(store: Store, path: Path, column: str, value: object) -> None:
    store.insert(record("i1"))
    store.insert(record("i2"))
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE sandboxes SET {column} = ? WHERE id = 'i2'", (value,))
    with pytest.raises(AenvError, match="i2"):
        reload(store, path)


WRITER = """
import sys
from pathlib import Path
from aenv.sandbox.service import SandboxState
from aenv.sandbox.store import Store
from tests.sandbox.test_store import record

store = Store(Path(sys.argv[1]))
for number in range(100000):
    r = record(f"i{number}")
    store.insert(r)
    store.transition(r, (SandboxState.STARTING,), SandboxState.RUNNING)
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": "."},
    ) as writer:
        assert writer.stdout is not None
        for _ in range(50):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
    acknowledged = 49 + len(rest)
    store = Store(path)
    found = {r.id: r.state for r in store.load()}
    store.close()
    assert set(found) >= {f"i{number}" for number in range(acknowledged)}
    assert len(found) <= acknowledged + 2  # the one under way, and one whose line was cut
    assert [s for s in found.values() if s is not SandboxState.RUNNING] in ([], [SandboxState.STARTING])


def test_the_state_column_is_the_one_that_counts(store: Store, path: Path) -> None:
    store.insert(record())
    store.close()
    with sqlite3.connect(path) as db:
        (blob,) = db.execute("SELECT record FROM sandboxes").fetchone()
        assert json.loads(blob)["state"] == "starting"
        db.execute("UPDATE sandboxes SET state = 'paused'")
    assert reload(store, path)[0].state is SandboxState.PAUSED
