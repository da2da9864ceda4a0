from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from aenv.agent.process import SIGNALS, Ended
from aenv.cli.main import COMMANDS, aenv
from aenv.daemon import Daemon, lock_home
from aenv.errors import ConflictError
from aenv.http.message import Response
from tests.cli.conftest import AENV, BOX, KEY, Fixture
from tests.storage.templates import committed

# --help


def every_command(
    group: click.Group = aenv, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    with click.Context(group) as ctx:
        for name in group.list_commands(ctx):
            if not path and importlib.util.find_spec(COMMANDS[name]) is None:
                continue
            command = group.get_command(ctx, name)
            assert command is not None
            yield (*path, name), command
            if isinstance(command, click.Group):
                yield from every_command(command, (*path, name))


EVERY = list(every_command())


def test_every_command_has_a_module() -> None:
    assert [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is None] == []


@pytest.mark.parametrize(("path", "command"), EVERY, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_help_teaches(path: tuple[str, ...], command: click.Command) -> None:
    result = CliRunner().invoke(aenv, [*path, "--help"])
    assert result.exit_code == 0
    assert f"Usage: aenv {' '.join(path)}" in result.output
    words = re.sub(r"\s+", " ", command.help or "")
    assert re.search(r"[A-Z].{15,}\.", words) or "aenv " in words, "a sentence or an example"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or isinstance(parameter.type, click.Choice), parameter.name


def test_the_first_page_shows_the_first_steps() -> None:
    result = CliRunner().invoke(aenv, ["-h"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"  {command} " in result.output
    assert "aenv serve" in result.output


def test_version_and_unknown_commands(daemon: Fixture) -> None:
    assert re.fullmatch(rb"aenv, version \d+\.\d+\.\d+\n", daemon.aenv("--version").stdout)
    for words in (["strat"], ["ls", "--nothing"], ["start"], ["exec"], ["rm"], ["start", "base", "-e", "novalue"]):
        done = daemon.aenv(*words)
        assert done.returncode == 2, words
        assert b"Traceback" not in done.stderr
        assert b"Usage:" in done.stderr


# Finding the daemon


def test_address_and_key_from_home_option_or_environment(daemon: Fixture, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    for words, environ in (
        ((), {}),
        (("--home", str(daemon.home)), {"AENV_HOME": elsewhere}),
        (("--url", daemon.url), {"AENV_HOME": elsewhere, "AENV_API_KEY": KEY}),
        ((), {"AENV_HOME": elsewhere, "AENV_URL": daemon.url + "/", "AENV_API_KEY": KEY}),
        ((), {"AENV_HOME": elsewhere, "E2B_API_URL": daemon.url, "E2B_API_KEY": KEY + "\n"}),
        ((), {"AENV_HOME": elsewhere, "AENV_URL": daemon.url, "E2B_API_URL": "http://no:1", "AENV_API_KEY": KEY}),
    ):
        done = daemon.aenv(*words, "ls", **environ)
        assert done.returncode == 0, done.stderr


def test_no_daemon_says_how_to_start_one(daemon: Fixture, tmp_path: Path) -> None:
    text = daemon.refused("ls", hint=True, AENV_HOME=str(tmp_path / "none"))
    assert "aenv serve" in text
    Daemon("http://127.0.0.1:1", 1).write(daemon.home)  # as kill -9 leaves it
    assert "aenv serve" in daemon.refused("ls", hint=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1",
        "127.0.0.1:3000",
        "http://",
        "http://h:99999",
        "http://h:x",
        "http://[::1",
        "ftp://h",
        "http://a b/",
        "http://h/path",
    ],
)
def test_a_bad_address_is_refused(daemon: Fixture, url: str) -> None:
    assert "http://HOST:PORT" in daemon.refused("--url", url, "ls", hint=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 5, "pid": 1}', '{"url": "nonsense", "pid": 1}'])
def test_a_damaged_record_of_the_daemon_is_an_error(daemon: Fixture, text: str) -> None:
    (daemon.home / "daemon.json").write_text(text)
    daemon.refused("ls", hint=True)


@pytest.mark.parametrize("key", ["", "with space", "with\nline", "ä", "e2b_wrong"])
def test_a_bad_key_is_refused(daemon: Fixture, key: str) -> None:
    (daemon.home / "secrets/api-key").write_text(key)
    assert "key" in daemon.refused("ls")


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b"[" * 100_000])
def test_something_else_that_answers_is_an_error(daemon: Fixture, body: bytes) -> None:
    for status in (200, 500):
        daemon.fake.answers["GET /v2/sandboxes"] = Response(status, body)
        daemon.refused("ls")


def test_the_daemons_words_are_shown(daemon: Fixture) -> None:
    daemon.fake.answers["POST /v2/sandboxes"] = Response.error(404, "template 'x' does not exist")
    assert daemon.refused("start", "-d", "x") == "aenv: template 'x' does not exist\n"


@pytest.mark.parametrize("identity", ["no-such", "a b", "a/../b", "a?b#c", "ä", "{}", "%2e", ""])
def test_strange_ids_do_not_exist(daemon: Fixture, identity: str) -> None:
    for words in (
        ("rm", identity), ("pause", identity), ("resume", identity), ("exec", identity, "true"), ("fork", identity),
        ("rollback", identity, "s1"), ("snapshot", "create", identity),
    ):  # fmt: skip
        daemon.refused(*words)
    assert all(call[1].startswith(("/sandboxes/", "/v2/sandboxes/")) for call in daemon.fake.calls)


def test_words_that_are_not_utf8(daemon: Fixture) -> None:
    for command in (("rm", "\udcff"), ("fork", "\udcff"), ("exec", "\udcff", "true")):
        daemon.refused(*command)
    daemon.fake.calls.clear()
    for words in (
        ("rollback", "i1", "\udcff"),
        ("start", "-d", "\udcff"),
        ("snapshot", "create", "i1", "--name", "\udcff"),
    ):
        assert daemon.refused(*words) == "aenv: '\\udcff': is not UTF-8\n"
    daemon.refused("snapshot", "rm", "\udcff")
    assert [call[0] for call in daemon.fake.calls if call[0] != "GET"] == []


# Lists


def test_ls_is_json_when_piped_and_has_all_pages(daemon: Fixture) -> None:
    daemon.fake.boxes = [BOX | {"sandboxID": f"i{n}"} for n in range(3)]
    for words in (("ls",), ("ls", "--json")):
        assert [b["sandboxID"] for b in json.loads(daemon.aenv(*words).stdout)] == ["i0", "i1", "i2"]
    daemon.fake.boxes = []
    assert json.loads(daemon.aenv("ls").stdout) == []


def test_templates_are_json_when_piped(daemon: Fixture, tmp_path: Path) -> None:
    from aenv.storage.repository import Repository

    assert json.loads(daemon.aenv("template", "ls").stdout) == []
    (daemon.home / "templates").mkdir()
    template = committed(Repository(daemon.home / "templates"), tmp_path / "staging", "base")
    (listed,) = json.loads(daemon.aenv("template", "ls").stdout)
    assert (listed["templateID"], listed["names"]) == (template.id, ["base"])
    (template.directory / "manifest.json").write_text("{}")
    done = daemon.aenv("template", "ls")
    assert json.loads(done.stdout) == []
    assert template.id in done.stderr.decode(), "it is left out, and that is said"


def test_a_reader_that_stops_reading_is_no_error(daemon: Fixture) -> None:
    daemon.fake.boxes = [BOX | {"metadata": {"k": "x" * 100_000}}]
    command = f"{' '.join(AENV)} ls | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=daemon.environ, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b""


# start, pause, resume, rm


def test_start_detached_prints_json_and_sends_what_was_asked(daemon: Fixture) -> None:
    done = daemon.aenv("start", "-d", "base", "-e", "A=1=2", "-m", "user=7", "--timeout", "60", "--auto-pause")
    assert json.loads(done.stdout)["sandboxID"] == "i1"
    assert daemon.fake.calls == [
        (
            "POST", "/v2/sandboxes",
            {"templateID": "base", "timeout": 60, "envVars": {"A": "1=2"}, "metadata": {"user": "7"},
             "autoPause": True},
        )
    ]  # fmt: skip


def test_start_without_a_terminal_starts_nothing(daemon: Fixture) -> None:
    assert "-d" in daemon.refused("start", "base", hint=True)
    assert daemon.fake.calls == []


def test_commands_on_many_sandboxes(daemon: Fixture) -> None:
    for words, call in (
        (("pause", "i1", "i1"), ("POST", "/sandboxes/i1/pause", {})),
        (("resume", "i1", "i1", "--timeout", "5"), ("POST", "/v2/sandboxes/i1/connect", {"timeout": 5})),
        (("rm", "i1", "i1"), ("DELETE", "/sandboxes/i1", None)),
    ):
        daemon.fake.calls.clear()
        done = daemon.aenv(*words)
        assert done.returncode == 0, done.stderr
        assert daemon.fake.calls == [call, call]


# exec


def test_exec_passes_output_and_exit_status(daemon: Fixture) -> None:
    done = daemon.aenv("exec", "i1", "--", "say", "to stdout", "to stderr")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"to stdout", b"to stderr")
    for status in (0, 1, 42, 255):
        assert daemon.aenv("exec", "i1", "exit", str(status)).returncode == status
    assert daemon.fake.headers[0]["x-access-token"] == "secret"
    assert daemon.fake.headers[0]["e2b-sandbox-port"] == "49983"


def test_exec_passes_options_of_the_command_untouched(daemon: Fixture) -> None:
    daemon.aenv("exec", "-e", "A=1", "-w", "/tmp", "-u", "root", "i1", "say", "-u", "--help", "--", "-x")
    (asked,) = daemon.fake.wait_asked("Start")
    assert asked["process"] == {"cmd": "say", "args": ["-u", "--help", "--", "-x"], "envs": {"A": "1"}, "cwd": "/tmp"}
    assert daemon.fake.headers[0]["authorization"].startswith("Basic ")


@pytest.mark.parametrize("size", [0, 1, 32768, 300_000])
def test_exec_passes_stdin_to_its_end(daemon: Fixture, size: int) -> None:
    sent = os.urandom(size)
    done = daemon.aenv("exec", "i1", "cat", stdin=sent)
    assert (done.returncode, done.stdout) == (0, sent)
    daemon.fake.wait_asked("CloseStdin")


def test_exec_ends_with_its_command_although_stdin_is_open(daemon: Fixture) -> None:
    with subprocess.Popen([*AENV, "exec", "i1", "exit", "3"], stdin=subprocess.PIPE, env=daemon.environ) as process:
        assert process.wait(30) == 3


def test_exec_without_any_stdin(daemon: Fixture) -> None:
    command = f"{' '.join(AENV)} exec i1 exit 4 <&-"
    assert subprocess.run(["bash", "-c", command], env=daemon.environ, timeout=60, check=False).returncode == 4


@pytest.mark.parametrize(
    ("text", "status"),
    [("killed", 137), ("terminated", 143), ("segmentation fault (core dumped)", 139), ("signal 34", 162), ("odd", 255)],
)
def test_exec_reports_signals_as_a_shell_does(daemon: Fixture, text: str, status: int) -> None:
    assert daemon.aenv("exec", "i1", "die", text).returncode == status


def test_every_signal_has_a_word() -> None:
    for number in range(1, 16):
        assert Ended(-1, f"signal: {SIGNALS[number]}").shell_status == 128 + number
    assert Ended(256, "").shell_status == 0
    assert Ended(-1, "").shell_status == 128 + 0 or Ended(-1, "").shell_status == 255
    assert Ended(-1, "signal: signal 99999").shell_status <= 255


@pytest.mark.parametrize(("command", "text"), [("missing", "missing: no such program"), ("cut", "ended in the middle")])
def test_exec_says_what_went_wrong(daemon: Fixture, command: str, text: str) -> None:
    assert text in daemon.refused("exec", "i1", command)


def test_ctrl_c_ends_the_command_in_the_sandbox_too(daemon: Fixture) -> None:
    with subprocess.Popen(
        [*AENV, "exec", "i1", "wait"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=daemon.environ
    ) as process:
        daemon.fake.wait_asked("CloseStdin")
        process.send_signal(signal.SIGINT)
        (asked,) = daemon.fake.wait_asked("SendSignal")
        assert asked == {"process": {"pid": 7}, "signal": "SIGNAL_SIGTERM"}
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_reader_that_goes_away_ends_the_command_too(daemon: Fixture) -> None:
    command = f"{' '.join(AENV)} exec i1 flood 1000 </dev/null | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=daemon.environ, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b""
    daemon.fake.wait_asked("SendSignal")


async def cut() -> AsyncIterator[bytes]:
    yield b"["
    raise ConnectionResetError


def test_a_daemon_that_goes_away_is_an_error(daemon: Fixture) -> None:
    daemon.fake.answers["GET /v2/sandboxes"] = Response(200, cut())
    assert "hung up" in daemon.refused("ls", hint=False)


# The other commands


def test_serve_refuses_bad_settings_and_half_a_tls(daemon: Fixture) -> None:
    assert "listen" in daemon.refused("serve", "--listen", "nonsense")
    assert "network.uplink" in daemon.refused("serve", "--uplink", "eth0")
    assert "--cert" in daemon.refused("serve", "--tls-listen", "127.0.0.1:0")
    (daemon.home / "config.toml").write_text("[sandbox]\nmaximum = 3\n")
    assert "sandbox.maximum" in daemon.refused("serve")


def test_a_template_that_cannot_be_built_is_refused(daemon: Fixture) -> None:
    assert "base" in daemon.refused("template", "build", "other")


def test_dev_cert(daemon: Fixture, tmp_path: Path) -> None:
    done = daemon.aenv("dev-cert", "aenv.test", "--out", str(tmp_path / "tls"), "--json")
    assert set(json.loads(done.stdout)) == {"ca", "cert", "key"}
    assert "domain" in daemon.refused("dev-cert", "Not A Domain", "--out", str(tmp_path / "tls"))
    (tmp_path / "file").touch()
    assert "file" in daemon.refused("dev-cert", "aenv.test", "--out", str(tmp_path / "file"))


def test_a_bad_home_is_one_line(daemon: Fixture, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    daemon.refused("--home", str(tmp_path / "file"), "ls")
    daemon.refused("--home", str(tmp_path / "file"), "template", "ls")


# The record of the daemon


def test_a_home_has_one_daemon(tmp_path: Path) -> None:
    first = lock_home(tmp_path)
    with pytest.raises(ConflictError) as caught:
        lock_home(tmp_path)
    assert caught.value.hint
    os.close(first)
    os.close(lock_home(tmp_path))


def test_the_record_is_replaced_at_once_and_removed(tmp_path: Path) -> None:
    Daemon("http://127.0.0.1:1", 1).write(tmp_path)
    Daemon("http://127.0.0.1:2", 2).write(tmp_path)
    assert Daemon.read(tmp_path) == Daemon("http://127.0.0.1:2", 2)
    assert os.listdir(tmp_path) == ["daemon.json"]
    Daemon.remove(tmp_path)
    Daemon.remove(tmp_path)
    with pytest.raises(FileNotFoundError):
        Daemon.read(tmp_path)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, aenv.daemon as d; d.lock_home(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [AENV[0], "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as p:
        assert p.stdout is not None
        p.stdout.readline()
        with pytest.raises(ConflictError):
            lock_home(tmp_path)
        p.kill()
    os.close(lock_home(tmp_path))
