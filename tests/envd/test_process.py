"""process.Process: what a command is given, what its streams carry, and how it ends."""

from __future__ import annotations

import base64
import getpass
import os
import signal
import time
from pathlib import Path

import pytest

from tests.envd.client import Agent, Stream, basic, shell


def wait_gone(pid: int) -> None:
    """Until the process is no more than a zombie."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} still lives")


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# ---- output and end ----


def test_events_are_start_data_end(agent: Agent) -> None:
    stream = agent.start(shell("echo out; echo err >&2"))
    events = [message["event"] for message in stream.frames()]
    assert list(events[0]) == ["start"]
    assert {"data": {"stdout": base64.b64encode(b"out\n").decode()}} in events
    assert {"data": {"stderr": base64.b64encode(b"err\n").decode()}} in events
    assert events[-1] == {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}
    assert stream.end == {}


@pytest.mark.parametrize("code", [1, 3, 127, 255])
def test_exit_status(agent: Agent, code: int) -> None:
    ended = agent.run(f"exit {code}").ended
    text = f"exit status {code}"
    assert ended == {"exitCode": code, "exited": True, "status": text, "error": text}


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, "killed"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hangup"), (40, "signal 40")],
)
def test_end_by_signal(agent: Agent, number: int, text: str) -> None:
    ended = agent.run(f"kill -{int(number)} $$").ended
    assert ended == {"exitCode": -1, "exited": False, "status": f"signal: {text}", "error": f"signal: {text}"}


def test_output_is_complete_and_in_pieces_of_32_kib(agent: Agent) -> None:
    stream = agent.run("head -c 3000000 /dev/zero | tr '\\0' x")
    assert stream.output["stdout"] == b"x" * 3000000
    assert max(map(len, stream.chunks)) <= 32 * 1024


def test_output_is_bytes(agent: Agent) -> None:
    assert agent.run(r"printf '\000\377\200\n'").output["stdout"] == b"\x00\xff\x80\n"


def test_output_comes_at_once(agent: Agent) -> None:
    stream = agent.start(shell("echo first; read line; echo second"))
    pid = stream.start()
    stream.until("stdout", b"first\n")
    agent.stdin(pid, b"\n")
    stream.finish()
    assert stream.output["stdout"] == b"first\nsecond\n"


# ---- what a process is given ----


def environment(stream_output: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in stream_output.decode().split("\0") if line)


def env_of(agent: Agent, **envs: str) -> dict[str, str]:
    stream = agent.start({"process": {"cmd": "env", "args": ["-0"], "envs": envs}})
    stream.start()
    stream.finish()
    return environment(stream.output["stdout"])


def test_environment(agent: Agent) -> None:
    agent.init(envVars={"FROM_INIT": "1", "BOTH": "init"}, sandboxId="sbx", templateId="tpl")
    env = env_of(agent, BOTH="request", EMPTY="", QUOTED="a\"b'c\n$d")
    assert env["FROM_INIT"] == "1"
    assert env["BOTH"] == "request"
    assert env["EMPTY"] == ""
    assert env["QUOTED"] == "a\"b'c\n$d"
    assert env["E2B_SANDBOX"] == "true"
    assert env["E2B_SANDBOX_ID"] == "sbx"
    assert env["E2B_TEMPLATE_ID"] == "tpl"
    assert env["HOME"] == os.path.expanduser(f"~{getpass.getuser()}")
    assert env["USER"] == env["LOGNAME"] == getpass.getuser()
    assert "PATH" in env
    assert set(env) <= {"FROM_INIT", "BOTH", "EMPTY", "QUOTED", "E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID",
                        "HOME", "USER", "LOGNAME", "PATH"}  # fmt: skip


def test_path_of_the_request_finds_the_command(agent: Agent, tmp_path: Path) -> None:
    tool = tmp_path / "a-tool-of-this-test"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    stream = agent.start({"process": {"cmd": tool.name, "envs": {"PATH": f"/nowhere::{tmp_path}"}, "cwd": "/"}})
    stream.start()
    stream.finish()
    assert stream.output["stdout"] == b"found\n"


def test_working_directory(agent: Agent, tmp_path: Path) -> None:
    home = os.path.realpath(os.path.expanduser(f"~{getpass.getuser()}"))
    assert agent.run("pwd -P", cwd=str(tmp_path)).output["stdout"].decode() == f"{os.path.realpath(tmp_path)}\n"
    assert agent.run("pwd -P", cwd="~").output["stdout"].decode() == f"{home}\n"
    assert agent.run("pwd -P").output["stdout"].decode() == f"{home}\n"
    agent.init(defaultWorkdir=str(tmp_path))
    assert agent.run("pwd -P").output["stdout"].decode() == f"{os.path.realpath(tmp_path)}\n"


def test_missing_working_directory(agent: Agent, tmp_path: Path) -> None:
    code, message = agent.start(shell("true", cwd=str(tmp_path / "none"))).error
    assert (code, message) == ("invalid_argument", f"cwd '{tmp_path}/none' does not exist")
    (tmp_path / "file").touch()
    code, message = agent.start(shell("true", cwd=str(tmp_path / "file"))).error
    assert code == "invalid_argument"
    assert "not a directory" in message


def test_missing_default_working_directory(agent: Agent, tmp_path: Path) -> None:
    agent.init(defaultWorkdir=str(tmp_path / "gone"))
    assert agent.start(shell("true")).error == ("invalid_argument", f"cwd '{tmp_path}/gone' does not exist")


def test_unknown_user(agent: Agent) -> None:
    for name in ("nobody-of-that-name", "../x", "root\n", "#", "0"):
        assert agent.start(shell("true"), basic(name)).error[0] == "unauthenticated"
    assert agent.start(shell("true"), basic("who")).error == ("unauthenticated", "invalid username: 'who'")


@pytest.mark.root
def test_identity_of_a_user(agent: Agent) -> None:
    stream = agent.run("id -un; id -gn; id -u; echo $HOME $USER", basic("daemon"), cwd="/")
    assert stream.output["stdout"] == b"daemon\ndaemon\n1\n/usr/sbin daemon\n"
    groups = agent.run("id -G", basic("daemon"), cwd="/").output["stdout"]
    assert groups == b"1\n"  # not those of root, whom the agent runs as


@pytest.mark.root
def test_user_cannot_enter_the_directory(agent: Agent, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    code, message = agent.start(shell("true", cwd=str(closed)), basic("daemon")).error
    assert code == "invalid_argument"
    assert "cannot be entered" in message


def test_nothing_of_the_agent_is_inherited(agent: Agent) -> None:
    keep = agent.raw()  # a connection that the child must not hold
    stream = agent.run("ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status; umask")
    lines = stream.output["stdout"].decode().split("\n")
    assert lines[:4] == ["0", "1", "2", "3"]  # 3 is ls's own
    assert [line.split()[1] for line in lines[4:6]] == ["0" * 16] * 2
    assert lines[6] == "0022"
    keep.close()


def test_process_leads_a_session(agent: Agent) -> None:
    pid, sid, pgid = agent.run("cat /proc/self/stat | cut -d' ' -f4,5,6").output["stdout"].split()
    assert pid == sid == pgid


def test_missing_command(agent: Agent) -> None:
    code, message = agent.start({"process": {"cmd": "no-such-command"}}).error
    assert code == "not_found"
    assert message == "error starting process 'no-such-command': No such file or directory"


def test_command_that_cannot_run(agent: Agent, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    code, message = agent.start({"process": {"cmd": str(plain)}}).error
    assert (code, "Permission denied" in message) == ("invalid_argument", True)
    plain.chmod(0o755)
    code, message = agent.start({"process": {"cmd": str(plain)}}).error
    assert (code, "Exec format error" in message) == ("invalid_argument", True)
    assert agent.call("List", {}) == {"processes": []}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({}, "process"),
        ({"process": None}, "process"),
        ({"process": []}, "process"),
        ({"process": {}}, "process.cmd"),
        ({"process": {"cmd": ""}}, "process.cmd"),
        ({"process": {"cmd": 3}}, "process.cmd"),
        ({"process": {"cmd": "true", "args": "x"}}, "process.args"),
        ({"process": {"cmd": "true", "args": [1]}}, "process.args"),
        ({"process": {"cmd": "true", "envs": {"A": 1}}}, "process.envs"),
        ({"process": {"cmd": "true", "envs": {"": "x"}}}, "process.envs"),
        ({"process": {"cmd": "true", "envs": {"A=B": "x"}}}, "process.envs"),
        ({"process": {"cmd": "true", "cwd": 1}}, "process.cwd"),
        ({"process": {"cmd": "true", "cwd": "/" + "x" * 5000}}, "process.cwd"),
        ({"process": {"cmd": "true"}, "tag": 1}, "tag"),
        ({"process": {"cmd": "true"}, "stdin": "yes"}, "stdin"),
        ({"process": {"cmd": "true"}, "pty": 1}, "pty"),
        ({"process": {"cmd": "true"}, "pty": {"size": 1}}, "pty.size"),
        ({"process": {"cmd": "true"}, "pty": {"size": {"cols": -1}}}, "pty.size.cols"),
        ({"process": {"cmd": "true"}, "pty": {"size": {"rows": 65536}}}, "pty.size.rows"),
    ],
)
def test_bad_start_names_the_field(agent: Agent, message: object, field: str) -> None:
    code, text = agent.start(message).error
    assert code == "invalid_argument"
    assert text.startswith(f"{field}: ")


def test_unknown_fields_are_ignored(agent: Agent) -> None:
    stream = agent.start({"process": {"cmd": "true", "later": {"x": 1}}, "more": [1]})
    stream.start()
    assert stream.finish()["exitCode"] == 0


# ---- deadlines, disconnects, late connects ----


def test_deadline_kills(agent: Agent) -> None:
    stream = agent.start(shell("echo $$; exec sleep 100"), {"Connect-Timeout-Ms": "300"})
    pid = stream.start()
    watcher = agent.connect(pid=pid)
    assert watcher.start() == pid
    assert stream.error[0] == "deadline_exceeded"
    assert watcher.finish()["status"] == "signal: killed"
    wait_gone(pid)


def test_deadline_holds_after_the_client_has_gone(agent: Agent) -> None:
    stream = agent.start(shell("exec sleep 100"), {"Connect-Timeout-Ms": "300"})
    pid = stream.start()
    stream.close()
    watcher = agent.connect(pid=pid)
    watcher.start()
    assert watcher.finish()["status"] == "signal: killed"


@pytest.mark.parametrize("value", ["0", "abc", "-5", "99999999999", ""])
def test_no_deadline(agent: Agent, value: str) -> None:
    assert agent.run("sleep 0.2; echo done", {"Connect-Timeout-Ms": value}).output["stdout"] == b"done\n"


def test_deadline_of_connect_ends_the_stream_only(agent: Agent) -> None:
    stream = agent.start(shell("read line; echo $line"))
    pid = stream.start()
    assert agent.connect({"Connect-Timeout-Ms": "100"}, pid=pid).error[0] == "deadline_exceeded"
    agent.stdin(pid, b"still here\n")
    stream.finish()
    assert stream.output["stdout"] == b"still here\n"


def test_disconnect_does_not_kill(agent: Agent) -> None:
    stream = agent.start(shell("echo one; read line; echo two"))
    pid = stream.start()
    stream.until("stdout", b"one\n")
    stream.close()
    again = agent.connect(pid=pid)
    assert again.start() == pid
    agent.stdin(pid, b"\n")
    again.finish()
    assert again.output["stdout"] == b"two\n"


def test_output_without_listener_is_dropped_and_blocks_nobody(agent: Agent, tmp_path: Path) -> None:
    done = tmp_path / "done"
    stream = agent.start(shell(f"read line; head -c 4000000 /dev/zero; touch {done}; read line; echo end"))
    pid = stream.start()
    stream.close()
    agent.stdin(pid, b"\n")
    deadline = time.monotonic() + 20
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done.exists()
    again = agent.connect(pid=pid)
    again.start()
    agent.stdin(pid, b"\n")
    again.finish()
    assert again.output["stdout"].replace(b"\0", b"") == b"end\n"
    assert len(again.output["stdout"]) < 200000


def test_late_connect_gets_start_and_end(agent: Agent) -> None:
    stream = agent.start(shell("exit 5") | {"tag": "late"})
    pid = stream.start()
    stream.finish()
    for selector in ({"pid": pid}, {"tag": "late"}):
        again = agent.connect(**selector)
        assert again.start() == pid
        assert again.finish()["exitCode"] == 5
    assert agent.call("List", {}) == {"processes": []}
    assert agent.failure("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})[1] == "not_found"


def test_all_subscribers_get_everything(agent: Agent) -> None:
    first = agent.start(shell("read line; echo $line; exit 2"))
    pid = first.start()
    others = [agent.connect(pid=pid) for _ in range(5)]
    for other in others:
        other.start()
    agent.stdin(pid, b"to all\n")
    for stream in (first, *others):
        assert stream.finish()["exitCode"] == 2
        assert stream.output["stdout"] == b"to all\n"


def test_keepalive_interval(agent: Agent) -> None:
    stream = agent.start(shell("read line"), {"Keepalive-Ping-Interval": "1"})
    pid = stream.start()
    assert stream.next() == {"event": {"keepalive": {}}}
    agent.stdin(pid, b"\n")
    stream.finish()


# ---- pipes that others hold ----


def test_background_child_does_not_hold_the_stream(agent: Agent) -> None:
    stream = agent.run("sleep 100 & echo $!")
    child = int(stream.output["stdout"])
    assert stream.ended is not None
    assert stream.ended["exitCode"] == 0
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_background_child_may_write_on(agent: Agent, tmp_path: Path) -> None:
    """Its pipe stays open: a write must not end it with SIGPIPE."""
    done, go = tmp_path / "done", tmp_path / "go"
    script = f"(while [ ! -e {go} ]; do sleep 0.05; done; head -c 300000 /dev/zero && touch {done}) &"
    agent.run(script)
    go.touch()
    deadline = time.monotonic() + 20
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done.exists()


def test_output_shortly_after_exit_is_not_lost(agent: Agent) -> None:
    stream = agent.run("(sleep 0.05; echo late) & echo early")
    assert stream.output["stdout"] == b"early\nlate\n"


def test_killed_shell_with_grandchildren_ends_the_stream(agent: Agent) -> None:
    for name in ("SIGNAL_SIGTERM", "SIGNAL_SIGKILL"):
        stream = agent.start(shell("sleep 100 & echo $!; wait"))
        pid = stream.start()
        stream.until("stdout", b"\n")
        agent.call("SendSignal", {"process": {"pid": pid}, "signal": name})
        assert stream.finish()["exitCode"] == -1
        os.kill(int(stream.output["stdout"]), signal.SIGKILL)


def test_last_output_before_a_kill_is_delivered(agent: Agent) -> None:
    stream = agent.start(shell("head -c 60000 /dev/zero; kill -STOP $$; echo never"))
    pid = stream.start()
    stream.until("stdout", b"\0")
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":  # it stops itself once all is in the pipe
        time.sleep(0.01)
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": 9})
    assert stream.finish()["error"] == "signal: killed"
    assert stream.output["stdout"] == b"\0" * 60000


# ---- List, signals, selectors ----


def test_list(agent: Agent) -> None:
    config = {"cmd": "/bin/sh", "args": ["-c", "read x"], "envs": {"A": "1"}, "cwd": "/"}
    first = agent.start({"process": config, "tag": "one"})
    second = agent.start({"process": {"cmd": "cat"}})
    pids = first.start(), second.start()
    listed = agent.call("List", {})["processes"]
    assert listed == [{"config": config, "pid": pids[0], "tag": "one"}, {"config": {"cmd": "cat"}, "pid": pids[1]}]
    for pid in pids:
        agent.call("CloseStdin", {"process": {"pid": pid}})
    first.finish()
    second.finish()
    assert agent.call("List", {}) == {"processes": []}


def test_signals(agent: Agent) -> None:
    stream = agent.start(shell("trap 'echo caught; exit 4' TERM; echo ready; while :; do sleep 0.05; done"))
    pid = stream.start()
    stream.until("stdout", b"ready\n")
    agent.call("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})
    assert stream.finish()["exitCode"] == 4
    assert stream.output["stdout"] == b"ready\ncaught\n"


@pytest.mark.parametrize("value", ["SIGNAL_SIGINT", "SIGNAL_UNSPECIFIED", 0, 1, -9, "", None, {}])
def test_bad_signal(agent: Agent, value: object) -> None:
    stream = agent.start({"process": {"cmd": "cat"}})
    pid = stream.start()
    status, code, message = agent.failure("SendSignal", {"process": {"pid": pid}, "signal": value})
    assert (status, code) == (400, "invalid_argument")
    assert message.startswith("signal: ")
    agent.call("CloseStdin", {"process": {"pid": pid}})
    assert stream.finish()["exitCode"] == 0


@pytest.mark.parametrize("method", ["Update", "SendInput", "SendSignal", "CloseStdin"])
def test_unknown_process(agent: Agent, method: str) -> None:
    rest = {"signal": 9, "input": {"stdin": ""}, "pty": {"size": {"cols": 1, "rows": 1}}}
    for pid in (4999999, 1, os.getpid(), "4999999"):
        message = f"process with pid {pid} not found"
        assert agent.failure(method, {"process": {"pid": pid}, **rest}) == (404, "not_found", message)
    found = agent.failure(method, {"process": {"tag": "none"}, **rest})
    assert found == (404, "not_found", "process with tag none not found")


def test_connect_to_unknown_process(agent: Agent) -> None:
    assert agent.connect(pid=4999999).error == ("not_found", "process with pid 4999999 not found")


@pytest.mark.parametrize("selector", [None, {}, {"pid": -1}, {"pid": "x"}, {"pid": 2**32}, {"pid": 1.5},
                                      {"pid": 1, "tag": "a"}, {"tag": 1}, [], "1"])  # fmt: skip
def test_bad_selector(agent: Agent, selector: object) -> None:
    status, code, message = agent.failure("SendSignal", {"process": selector, "signal": 9})
    assert (status, code) == (400, "invalid_argument")
    assert message.startswith("process: ")
    stream = Stream(agent.port, "/process.Process/Connect", {"process": selector}, {})
    assert stream.error[0] == "invalid_argument"


def test_agent_ends_cleanly_with_processes_and_streams(envd_binary: Path, tmp_path: Path) -> None:
    agent = Agent(envd_binary, stderr=tmp_path / "log")
    streams = [agent.start(shell("exec cat")) for _ in range(5)]
    pids = [stream.start() for stream in streams]
    streams[0].close()
    agent.stop()
    for pid in pids:  # their input has ended with the agent
        wait_gone(pid)
