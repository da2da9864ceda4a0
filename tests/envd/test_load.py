"""Many clients, slow clients, vanished clients: nobody waits for another, and nothing is left behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from tests.envd.client import CONNECT_JSON, TIMEOUT, Agent, frame, post, shell

START = "/process.Process/Start"
RSS_LIMIT_KIB = 3 * 1024


def wait_until(condition: object, seconds: float = TIMEOUT) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def run_many(agent: Agent, count: int) -> None:
    """`count` commands over one connection."""
    connection = HTTPConnection("127.0.0.1", agent.port, timeout=TIMEOUT)
    body = frame({"process": {"cmd": "/bin/true"}})
    for _ in range(count):
        connection.request("POST", START, body, CONNECT_JSON)
        assert connection.getresponse().read().endswith(b"\x02\0\0\0\x02{}")
    connection.close()


def test_dropped_connections_leave_no_descriptor(agent: Agent) -> None:
    agent.request("GET", "/health")
    before = agent.descriptors()
    cut = post("/process.Process/List", b"{}", {"Content-Type": "application/json"})
    for i in range(10000):
        connection = agent.raw(
            (b"", b"GET /hea", cut[:-1], b"\xff\xff", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")[i % 5]
        )
        if i % 3 == 0:  # RST instead of FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until(lambda: agent.descriptors() <= before)
    assert agent.request("GET", "/health").status == 204


def test_open_connections_that_say_nothing(agent: Agent) -> None:
    with ExitStack() as stack:
        for i in range(1000):
            stack.enter_context(agent.raw((b"", b"POST /in")[i % 2]))
        assert agent.run("echo served").output["stdout"] == b"served\n"
    agent.request("GET", "/health")
    wait_until(lambda: agent.descriptors() < 50)


def test_three_hundred_streams(agent: Agent) -> None:
    streams = [agent.start(shell("read line; echo $line; exit 6")) for _ in range(300)]
    pids = [stream.start() for stream in streams]
    assert len(agent.call("List", {})["processes"]) == 300
    assert agent.run("echo others").output["stdout"] == b"others\n"
    for pid in reversed(pids):
        agent.stdin(pid, b"%d\n" % pid)
    for stream, pid in zip(streams, pids, strict=True):
        assert stream.finish()["exitCode"] == 6
        assert stream.output["stdout"] == b"%d\n" % pid
        stream.close()
    assert agent.call("List", {}) == {"processes": []}
    wait_until(lambda: agent.descriptors() < 50)


def test_memory_stays_small(agent: Agent, sanitized: bool) -> None:
    run_many(agent, 200 if sanitized else 2000)
    for _ in range(100 if sanitized else 500):
        agent.start(shell("echo; exec cat")).close()
    for process in agent.call("List", {})["processes"]:
        agent.unary("SendSignal", {"process": {"pid": process["pid"]}, "signal": "SIGNAL_SIGKILL"})
    wait_until(lambda: agent.call("List", {}) == {"processes": []})
    wait_until(lambda: agent.descriptors() < 50)
    if not sanitized:
        wait_until(lambda: agent.rss_kib() <= RSS_LIMIT_KIB)


def endless(agent: Agent) -> tuple[socket.socket, int]:
    """A stream of endless output whose client has read only its start."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(TIMEOUT)
    connection.connect(("127.0.0.1", agent.port))
    connection.sendall(post(START, frame(shell("exec cat /dev/zero")), CONNECT_JSON))
    received = b""
    while b'"pid":' not in received or not received.split(b'"pid":')[1].strip(b"0123456789"):
        received += connection.recv(64)
    return connection, int(received.split(b'"pid":')[1].split(b"}")[0])


def kill(agent: Agent, pid: int) -> None:
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})


def test_stuck_reader_costs_bounded_memory_and_stops_nobody(agent: Agent, sanitized: bool) -> None:
    readers = [endless(agent) for _ in range(10)]
    assert agent.run("head -c 2000000 /dev/zero").output["stdout"] == b"\0" * 2000000
    if not sanitized:
        assert agent.rss_kib() < 16 * 1024
    for connection, pid in readers:
        kill(agent, pid)
        connection.close()
    wait_until(lambda: agent.descriptors() < 50)
    if not sanitized:
        wait_until(lambda: agent.rss_kib() <= RSS_LIMIT_KIB)


def test_stuck_reader_is_cut_off_and_told_and_others_get_on(agent: Agent) -> None:
    """Two streams of one process: the one that reads nothing holds the other up only for a while."""
    stuck, pid = endless(agent)
    other = agent.connect(pid=pid)
    other.start()
    while len(other.output["stdout"]) < 20_000_000:
        other.take(other.next())
    kill(agent, pid)
    tail = b""
    while piece := stuck.recv(1 << 20):
        tail = (tail + piece)[-400:]
        if tail.endswith(b"0\r\n\r\n"):
            break
    assert b"resource_exhausted" in tail
    stuck.close()
    other.close()


def test_slow_reader_loses_nothing(agent: Agent) -> None:
    size = 6_000_000
    stream = agent.start(shell(f"head -c {size} /dev/zero; exit 3"))
    stream.start()
    for _ in range(20):
        stream.take(stream.next())
        agent.run("true")
    assert stream.finish()["exitCode"] == 3
    assert len(stream.output["stdout"]) == size


def test_vanished_reader_does_not_block_the_process(agent: Agent, tmp_path: Path) -> None:
    done = tmp_path / "done"
    stream = agent.start(shell(f"head -c 20000000 /dev/zero; touch {done}"))
    stream.start()
    stream.close()
    wait_until(done.exists)


def test_parallel_clients(agent: Agent) -> None:
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(15):
                assert agent.run(f"echo {n} {i}; echo err >&2").output == {
                    "stdout": f"{n} {i}\n".encode(), "stderr": b"err\n", "pty": b"",
                }  # fmt: skip
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not failures


def test_descriptor_limit_is_survived(envd_binary: Path, tmp_path: Path) -> None:
    """At the limit new connections wait, and commands fail with a clear error; then all goes on."""
    wrapper = tmp_path / "limited"
    wrapper.write_text(f'#!/bin/sh\nulimit -n 40\nexec {envd_binary} "$@"\n')
    wrapper.chmod(0o755)
    agent = Agent(wrapper, stderr=tmp_path / "log")
    with ExitStack() as stack:
        connections = [stack.enter_context(agent.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")) for _ in range(60)]
        assert connections[0].recv(12) == b"HTTP/1.1 204"
        wait_until(lambda: agent.descriptors() == 40)
        connections[0].sendall(post(START, frame(shell("true")), CONNECT_JSON))
        received = b""
        while b"resource_exhausted" not in received:
            piece = connections[0].recv(4096)
            assert piece, received
            received += piece
    assert agent.run("echo again; ulimit -n").output["stdout"] == b"again\n40\n"
    agent.stop()


def test_commands_get_the_limit_that_the_agent_got(agent: Agent) -> None:
    expected = Path("/proc/self/limits").read_text().split("Max open files")[1].split()[0]
    assert agent.run("ulimit -Sn").output["stdout"].decode().strip() == expected


def test_end_is_found_behind_many_others(agent: Agent) -> None:
    run_many(agent, 200)
    stream = agent.start(shell("exit 9"))
    pid = stream.start()
    stream.finish()
    late = agent.connect(pid=pid)
    late.start()
    assert late.finish()["exitCode"] == 9
    assert json.dumps(agent.call("List", {})) == '{"processes": []}'
