"""process.Process: standard input, terminals, and the client stream StreamInput."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.envd.client import CONNECT_JSON, TIMEOUT, Agent, Answer, ProcessStream, basic, frame, shell


def terminal(agent: Agent, script: str, cols: int = 80, rows: int = 24, **process: Any) -> ProcessStream:
    return agent.start(shell(script, **process) | {"pty": {"size": {"cols": cols, "rows": rows}}})


def stream_input(agent: Agent, *messages: Any) -> tuple[list[Any], Any]:
    """Sends one StreamInput; returns the messages and the end frame of its answer."""
    connection = HTTPConnection("127.0.0.1", agent.port, timeout=TIMEOUT)
    try:
        connection.request(
            "POST", "/process.Process/StreamInput", (frame(message) for message in messages), CONNECT_JSON,
            encode_chunked=True,
        )  # fmt: skip
        response = connection.getresponse()
        answer = Answer(response.status, {}, response.read())
    finally:
        connection.close()
    assert answer.status == 200
    frames, rest = [], answer.body
    while rest:
        size = int.from_bytes(rest[1:5], "big")
        frames.append(Answer(rest[0], {}, rest[5 : 5 + size]).json)
        rest = rest[5 + size :]
    return frames[:-1], frames[-1]


def data(content: bytes, kind: str = "stdin") -> dict[str, Any]:
    return {"data": {"input": {kind: base64.b64encode(content).decode()}}}


# ---- SendInput and CloseStdin ----


def test_input_and_its_end(agent: Agent) -> None:
    stream = agent.start(shell("cat; echo end"))
    pid = stream.start()
    for piece in (b"one\n", b"", b"two\n"):
        assert agent.stdin(pid, piece).json == {}
    assert agent.call("CloseStdin", {"process": {"pid": pid}}) == {}
    stream.finish()
    assert stream.output["stdout"] == b"one\ntwo\nend\n"


def test_input_by_tag_and_snake_case(agent: Agent) -> None:
    stream = agent.start(shell("head -n1") | {"tag": "t"})
    stream.start()
    agent.call("SendInput", {"process": {"tag": "t"}, "input": {"stdin": "aGkK"}})
    stream.finish()
    assert stream.output["stdout"] == b"hi\n"


def test_without_stdin_input_is_at_its_end(agent: Agent) -> None:
    stream = agent.start(shell("cat; echo end; exec sleep 100") | {"stdin": False})
    pid = stream.start()
    stream.until("stdout", b"end\n")
    answer = agent.stdin(pid, b"x")
    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert "stdin not enabled or closed" in answer.json["message"]
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    stream.finish()


def test_input_after_its_end(agent: Agent) -> None:
    stream = agent.start(shell("cat; exec sleep 100"))
    pid = stream.start()
    agent.call("CloseStdin", {"process": {"pid": pid}})
    agent.call("CloseStdin", {"process": {"pid": pid}})
    assert agent.stdin(pid, b"x").json["code"] == "internal"
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    stream.finish()


def test_input_that_the_process_has_closed(agent: Agent) -> None:
    stream = agent.start(shell("exec <&-; echo closed; exec sleep 100"))
    pid = stream.start()
    stream.until("stdout", b"closed\n")
    answer = agent.stdin(pid, b"x")
    assert (answer.json["code"], "stdin" in answer.json["message"]) == ("internal", True)
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    stream.finish()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        "x",
        {"stdin": 1},
        {"stdin": "%%%"},
        {"stdin": "a"},
        {"stdin": "aGkK="},
        {"stdin": "aG=k"},
        {"stdin": "aGk=K"},
    ],
)
def test_bad_input(agent: Agent, value: object) -> None:
    stream = agent.start({"process": {"cmd": "cat"}})
    pid = stream.start()
    status, code, message = agent.failure("SendInput", {"process": {"pid": pid}, "input": value})
    assert (status, code) == (400, "invalid_argument")
    assert message.startswith("input: ")
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()
    assert stream.output["stdout"] == b""


@pytest.mark.parametrize("text", ["_-8", "/+8", "_-8=", "/+8="])
def test_both_alphabets_of_base64(agent: Agent, text: str) -> None:
    stream = agent.start({"process": {"cmd": "cat"}})
    pid = stream.start()
    agent.call("SendInput", {"process": {"pid": pid}, "input": {"stdin": text}})
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()
    assert stream.output["stdout"] == b"\xff\xef"


def test_answer_waits_until_the_process_reads(agent: Agent) -> None:
    """What does not fit into the pipe is held with its answer; nothing else waits for it."""
    content = bytes(range(256)) * 4096
    stream = agent.start(shell("read line; cat | sha256sum"))
    pid = stream.start()
    answers: list[Answer] = []
    sender = threading.Thread(target=lambda: answers.append(agent.stdin(pid, b"\n" + content)))
    # The shell reads byte by byte and then waits in cat; stop it before so that the pipe fills up.
    agent.run(f"kill -STOP {pid}")
    sender.start()
    assert agent.run("echo others").output["stdout"] == b"others\n"
    assert not answers
    agent.run(f"kill -CONT {pid}")
    sender.join(TIMEOUT)
    assert answers[0].json == {}
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()
    assert stream.output["stdout"].split()[0].decode() == hashlib.sha256(content).hexdigest()


def test_close_stdin_behind_waiting_input(agent: Agent) -> None:
    stream = agent.start(shell("read line; wc -c"))
    pid = stream.start()
    agent.run(f"kill -STOP {pid}")
    sender = threading.Thread(target=lambda: agent.stdin(pid, b"\n" + b"x" * 500000))
    sender.start()
    # The pipe holds 64 KiB, the rest is queued: the call that closes must not overtake it.
    deadline = time.monotonic() + TIMEOUT
    while b"\t" not in agent.run(f"cut -c1-1 /proc/{pid}/stat; printf '\\t'").output["stdout"]:
        assert time.monotonic() < deadline
    agent.run("true")
    agent.call("CloseStdin", {"process": {"pid": pid}})
    agent.run(f"kill -CONT {pid}")
    sender.join(TIMEOUT)
    stream.finish()
    assert int(stream.output["stdout"]) in (500000, 0)  # 0: the close came first


def test_waiting_input_ends_with_the_process(agent: Agent) -> None:
    stream = agent.start(shell("kill -STOP $$"))
    pid = stream.start()
    answers: list[Answer] = []
    sender = threading.Thread(target=lambda: answers.append(agent.stdin(pid, b"x" * 500000)))
    sender.start()
    agent.run("true")
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    stream.finish()
    sender.join(TIMEOUT)
    assert answers[0].json["code"] in ("internal", "not_found")


def test_sender_that_vanishes_while_it_waits(agent: Agent) -> None:
    stream = agent.start(shell("kill -STOP $$; wc -c"))
    pid = stream.start()
    connection = HTTPConnection("127.0.0.1", agent.port, timeout=TIMEOUT)
    body = b'{"process": {"pid": %d}, "input": {"stdin": "%b"}}' % (pid, base64.b64encode(b"x" * 300000))
    connection.request("POST", "/process.Process/SendInput", body, {"Content-Type": "application/json"})
    agent.run("true")
    connection.close()
    agent.run(f"kill -CONT {pid}")
    agent.run("true")
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()
    assert stream.output["stdout"] in (b"300000\n", b"0\n")  # 0: the request was gone before it was read


# ---- StreamInput ----


def test_stream_input(agent: Agent) -> None:
    stream = agent.start(shell("head -n 3"))
    pid = stream.start()
    start = {"start": {"process": {"pid": pid}}}
    assert stream_input(agent, start, data(b"a\n"), {"keepalive": {}}, data(b"b\nc\n")) == ([{}], {})
    stream.finish()
    assert stream.output["stdout"] == b"a\nb\nc\n"


def test_stream_input_is_slowed_down_by_the_process(agent: Agent) -> None:
    content = b"0123456789abcdef" * 2048
    stream = agent.start(shell("sha256sum"))
    pid = stream.start()
    answer = stream_input(agent, {"start": {"process": {"pid": pid}}}, *[data(content)] * 200)
    assert answer == ([{}], {})
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()
    assert stream.output["stdout"].split()[0].decode() == hashlib.sha256(content * 200).hexdigest()


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "invalid_argument"),
        ([data(b"x")], "invalid_argument"),
        ([{}], "invalid_argument"),
        ([{"start": {}}], "invalid_argument"),
        ([{"start": {"process": {"pid": 4999999}}}], "not_found"),
        ([{"keepalive": {}}], "invalid_argument"),
    ],
)
def test_bad_stream_input(agent: Agent, messages: list[Any], code: str) -> None:
    messages_out, end = stream_input(agent, *messages)
    assert messages_out == []
    assert end["error"]["code"] == code


def test_stream_input_to_a_process_that_ends(agent: Agent) -> None:
    stream = agent.start(shell("exit 0"))
    pid = stream.start()
    stream.finish()
    assert stream_input(agent, {"start": {"process": {"pid": pid}}})[1]["error"]["code"] == "not_found"


# ---- terminals ----


def test_terminal(agent: Agent) -> None:
    stream = terminal(agent, "tty; stty size; test -t 0 && test -t 1 && test -t 2 && echo all", cols=101, rows=37)
    stream.start()
    assert stream.finish()["exitCode"] == 0
    lines = stream.output["pty"].decode().split("\r\n")
    assert lines[0].startswith("/dev/pts/")
    assert lines[1:3] == ["37 101", "all"]
    assert stream.output["stdout"] == stream.output["stderr"] == b""


def test_terminal_input_resize_and_interrupt(agent: Agent) -> None:
    stream = terminal(agent, "trap 'echo interrupted' INT; read a; stty size; read b; echo end")
    pid = stream.start()
    agent.call("Update", {"process": {"pid": pid}, "pty": {"size": {"cols": 55, "rows": 11}}})
    assert agent.stdin(pid, b"x\n", "pty").json == {}
    stream.until("pty", b"11 55")
    agent.stdin(pid, b"\x03", "pty")
    stream.until("pty", b"interrupted")
    agent.stdin(pid, b"\n", "pty")
    stream.finish()
    assert b"end" in stream.output["pty"]


def test_terminal_output_is_complete_and_in_pieces_of_16_kib(agent: Agent) -> None:
    stream = terminal(agent, "stty -opost; head -c 500000 /dev/zero | tr '\\0' y")
    stream.start()
    stream.finish()
    assert stream.output["pty"] == b"y" * 500000
    assert max(map(len, stream.chunks)) <= 16 * 1024


def test_terminal_is_killed(agent: Agent) -> None:
    stream = terminal(agent, "sleep 100 & echo up; wait")
    pid = stream.start()
    stream.until("pty", b"up")
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    assert stream.finish()["error"] == "signal: killed"


def test_terminal_refuses_what_is_for_pipes(agent: Agent) -> None:
    stream = terminal(agent, "read line")
    pid = stream.start()
    assert agent.failure("CloseStdin", {"process": {"pid": pid}})[1] == "unknown"
    assert agent.stdin(pid, b"x").json["code"] == "internal"
    agent.stdin(pid, b"\n", "pty")
    stream.finish()


def test_pipe_refuses_what_is_for_terminals(agent: Agent) -> None:
    stream = agent.start({"process": {"cmd": "cat"}})
    pid = stream.start()
    assert agent.stdin(pid, b"x", "pty").json["code"] == "internal"
    size = {"size": {"cols": 1, "rows": 1}}
    assert agent.failure("Update", {"process": {"pid": pid}, "pty": size})[1] == "internal"
    agent.call("CloseStdin", {"process": {"pid": pid}})
    stream.finish()


@pytest.mark.root
def test_terminal_belongs_to_its_user(agent: Agent) -> None:
    message = shell("stat -c %U $(tty); echo > $(tty)", cwd="/") | {"pty": {"size": {"cols": 80, "rows": 24}}}
    stream = agent.start(message, basic("daemon"))
    stream.start()
    assert stream.finish()["exitCode"] == 0
    assert stream.output["pty"].startswith(b"daemon\r\n")
