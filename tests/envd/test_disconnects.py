"""Clients that vanish at any point of any request, against an agent with AddressSanitizer: nothing is used after its
end, nothing is left. AENV_ENVD_STRESS_SECONDS runs longer than the usual number of rounds."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.envd.client import CONNECT_JSON, JSON, Agent, frame, post, shell
from tests.envd.conftest import build

ROUNDS = 100  # for each of the clients
CLIENTS = 4
SECONDS = float(os.environ.get("AENV_ENVD_STRESS_SECONDS", "0"))
SHORT_LIFE = CONNECT_JSON | {"Connect-Timeout-Ms": "300"}


@pytest.fixture
def checked_agent(tmp_path: Path) -> Iterator[Agent]:
    options = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    agent = Agent(build(tmp_path / "envd", *options), stderr=tmp_path / "envd.log")
    yield agent
    agent.stop()


def start(script: str, **fields: object) -> bytes:
    return post("/process.Process/Start", frame(shell(script) | fields), SHORT_LIFE)


def requests(rng: random.Random, folder: Path, port: int) -> bytes:
    """One request, or some on the same connection, of every kind that has a life of its own."""
    tag = f"t{rng.randrange(8)}"
    target = folder / f"file-{rng.randrange(4)}"
    octets = {"Content-Type": "application/octet-stream"}
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n' % str(target).encode()
        + os.urandom(rng.randrange(100_000))
        + b"\r\n--b--\r\n"
    )
    selector = {"process": {"tag": tag}}
    data = {"input": {"stdin": "QUFB" * rng.choice([1, 1000, 60_000])}}
    kinds = [
        start("echo early; (sleep 0.05; echo late) &", tag=tag),
        start("head -c 2000000 /dev/zero", tag=tag),
        start("cat >/dev/null", tag=tag, stdin=True),
        start("sleep 0.2", tag=tag, stdin=True),
        start("head -c 300000 /dev/zero", tag=tag, pty={"size": {"cols": 80, "rows": 24}}),
        post("/process.Process/Connect", frame(selector), CONNECT_JSON),
        post("/process.Process/SendInput", json.dumps(selector | data).encode(), JSON),
        post("/process.Process/StreamInput", frame({"start": selector}) + frame({"data": data}) * 8, CONNECT_JSON),
        post("/process.Process/SendSignal", json.dumps(selector | {"signal": 9}).encode(), JSON),
        post("/process.Process/CloseStdin", json.dumps(selector).encode(), JSON),
        post(f"/files?path={target}", os.urandom(rng.randrange(200_000)), octets),
        post(f"/files?path={target}", gzip.compress(bytes(2_000_000)), octets | {"Content-Encoding": "gzip"}),
        post("/files", form, {"Content-Type": "multipart/form-data; boundary=b"}),
        f"GET /files?path={folder}/large HTTP/1.1\r\nHost: a\r\n\r\n".encode() * 2,
        f"GET /files?path={folder}/large HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\n\r\n".encode(),
        post("/files/compose", json.dumps({"source_paths": [str(target)], "destination": f"{target}+"}).encode(), JSON),
        post("/filesystem.Filesystem/WatchDir", frame({"path": str(folder), "recursive": True}), CONNECT_JSON),
        post("/filesystem.Filesystem/ListDir", json.dumps({"path": str(folder), "depth": 2}).encode(), JSON),
        post("/init", json.dumps({"envVars": {"A": "b"}}).encode(), JSON),
        f"GET /dial?port={port} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: aenv-dial\r\n\r\n".encode()
        + b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    return b"".join(rng.choices(kinds, k=rng.choice([1, 1, 2])))


def vanish(rng: random.Random, connection: socket.socket) -> None:
    match rng.randrange(3):
        case 0:  # RST
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        case 1:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(rng.choice([1, 100_000]))
        case _:
            pass
    connection.close()


def one_client(agent: Agent, folder: Path, seed: int, until: float) -> int:
    rng = random.Random(seed)
    rounds = 0
    while rounds < ROUNDS or time.monotonic() < until:
        rounds += 1
        data = requests(rng, folder, agent.port)
        if rng.random() < 0.6:
            data = data[: rng.randrange(1, len(data))]
        connection = socket.create_connection(("127.0.0.1", agent.port), timeout=rng.choice([0.01, 0.05, 0.3]))
        try:
            while data:
                size = rng.choice([1, 50, 5_000, len(data)])
                connection.sendall(data[:size] if rng.random() < 0.9 else data)
                data = data[size:] if size > 50 or rng.random() < 0.2 else b""
            if rng.random() < 0.7:
                connection.recv(rng.choice([1, 200, 70_000]))
            vanish(rng, connection)
        except OSError:  # a time-out, or the agent has refused the rest
            connection.close()
    return rounds


def comes_true(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (true := check()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return true


@pytest.mark.timeout(300 + 2 * int(SECONDS))
def test_clients_that_vanish_anywhere(checked_agent: Agent, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "large").write_bytes(os.urandom(3_000_000))
    before = checked_agent.descriptors()
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS) as pool:
        runs = [pool.submit(one_client, checked_agent, folder, seed, until) for seed in range(CLIENTS)]
        assert all(run.result() >= ROUNDS for run in runs)
    assert comes_true(lambda: checked_agent.call("List", {}) == {"processes": []})
    assert comes_true(lambda: checked_agent.descriptors() == before)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".envd")] == []
    assert checked_agent.errors() == ""
