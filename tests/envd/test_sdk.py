"""The official E2B SDK against one agent. In its debug mode the SDK needs no control plane."""

from __future__ import annotations

from pathlib import Path

import e2b
import pytest

from tests.envd.client import Agent


@pytest.fixture
def sandbox(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> e2b.Sandbox:
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setenv("E2B_SANDBOX_URL", f"http://127.0.0.1:{agent.port}")
    return e2b.Sandbox.create()


def test_commands(sandbox: e2b.Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2", envs={"A": "1"}, cwd="/")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(e2b.CommandExitException) as failure:
        sandbox.commands.run("exit 7")
    assert failure.value.exit_code == 7


def test_output_callbacks(sandbox: e2b.Sandbox) -> None:
    pieces: list[str] = []
    sandbox.commands.run("echo ä; echo b", on_stdout=pieces.append)
    assert "".join(pieces) == "ä\nb\n"


def test_timeout(sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 100", timeout=1)


def test_background_input_and_kill(sandbox: e2b.Sandbox) -> None:
    cat = sandbox.commands.run("head -n 1", background=True, stdin=True)
    sandbox.commands.send_stdin(cat.pid, "hello\n")
    assert cat.wait().stdout == "hello\n"
    sleeper = sandbox.commands.run("sleep 100 & sleep 100", background=True)
    assert [process.pid for process in sandbox.commands.list()] == [sleeper.pid]
    assert sandbox.commands.kill(sleeper.pid)
    with pytest.raises(e2b.CommandExitException) as failure:
        sleeper.wait()
    assert (failure.value.exit_code, failure.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(sleeper.pid)


def test_connect(sandbox: e2b.Sandbox) -> None:
    first = sandbox.commands.run("read line; echo $line", background=True, stdin=True)
    first.disconnect()
    again = sandbox.commands.connect(first.pid)
    sandbox.commands.send_stdin(first.pid, "again\n")
    assert again.wait().stdout == "again\n"


def test_terminal(sandbox: e2b.Sandbox) -> None:
    output = bytearray()
    terminal = sandbox.pty.create(e2b.PtySize(rows=24, cols=80))
    sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=31, cols=99))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 5\n")
    with pytest.raises(e2b.CommandExitException) as failure:
        terminal.wait(on_pty=output.extend)
    assert failure.value.exit_code == 5
    assert b"31 99" in output


def test_failures(sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.AuthenticationException):
        sandbox.commands.run("true", user="no-such-user")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.commands.run("true", cwd="/no/such/directory")
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(4999999)


def test_files(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    path = str(tmp_path / "folder" / "file")
    sandbox.files.write(path, "content")
    assert sandbox.files.read(path) == "content"
    assert [entry.name for entry in sandbox.files.list(str(tmp_path / "folder"))] == ["file"]
    assert sandbox.files.exists(path)
    sandbox.files.remove(path)
    assert not sandbox.files.exists(path)


def test_is_running(sandbox: e2b.Sandbox) -> None:
    assert sandbox.is_running()
