"""What the agent reads from and does to the system around it, in namespaces of the test: /etc, /run, the host name."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.envd.client import JSON, Agent, basic, post, read_all, shell, statuses
from tests.envd.empty_fuse import EmptyFuse

pytestmark = pytest.mark.root

PASSWD = """\
root:x:0:0:root:/:/bin/sh
# comment:x:1:1::/:/bin/sh
+nis
broken
short:x:5:5
letters:x:five:5::/:/bin/sh
negative:x:-1:5::/:/bin/sh
largest:x:4294967295:5::/:/bin/sh
too-large:x:4294967296:5::/:/bin/sh

alice:x:1234:4321:Alice, A. Person:/:/bin/sh
bob:x:1235:4322:::
alice:x:9999:9999::/second:/bin/sh
no-newline-at-end:x:1236:1:last:/:/bin/sh"""

GROUP = """\
root:x:0:
staff:x:50:bob,alice
wheel:x:51:alicex,malice
alice:x:4321:alice
letters:x:x:alice
many:x:52:a,b,alice,c
cut:x
empty:x:53:
last:x:54:alice"""


@pytest.fixture
def boxed(envd_binary: Path, tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts an agent whose /etc and /run are folders of the test and whose host name is its own."""
    agents: list[Agent] = []

    def start(*options: str, **files: str) -> Agent:
        for folder in ("etc", "run"):
            (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in files.items():
            (tmp_path / "etc" / name.replace("_", "-")).write_text(text)
        wrapper = tmp_path / "boxed"
        wrapper.write_text(
            "#!/bin/sh\n"
            f'mount --bind {tmp_path}/etc /etc && mount --bind {tmp_path}/run /run && exec {envd_binary} "$@"\n'
        )
        wrapper.chmod(0o755)
        outer = tmp_path / "outer"
        outer.write_text(f'#!/bin/sh\nexec unshare --mount --uts --propagation private {wrapper} "$@"\n')
        outer.chmod(0o755)
        agents.append(Agent(outer, *options, system=True, stderr=tmp_path / "log"))
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()


def identity(agent: Agent, user: str) -> str:
    stream = agent.run("exec 2>&1; echo $HOME $USER; cat /proc/self/status", basic(user), cwd="/")
    lines = stream.output["stdout"].decode().split("\n")
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return f"{lines[0]} | {fields['Uid'].split()[0]} {fields['Gid'].split()[0]} | {fields['Groups'].strip()}"


def test_users_and_groups(boxed: Callable[..., Agent]) -> None:
    agent = boxed(passwd=PASSWD, group=GROUP)
    assert identity(agent, "alice") == "/ alice | 1234 4321 | 50 52 54 4321"
    assert identity(agent, "bob") == "/ bob | 1235 4322 | 50 4322"
    assert identity(agent, "no-newline-at-end") == "/ no-newline-at-end | 1236 1 | 1"


@pytest.mark.parametrize(
    "name",
    ["broken", "short", "letters", "negative", "largest", "too-large", "comment", "# comment", "+nis", "nis", ""],
)
def test_broken_entries_name_nobody(boxed: Callable[..., Agent], name: str) -> None:
    agent = boxed("--default-user", "alice", passwd=PASSWD, group=GROUP)
    if name:
        assert agent.start(shell("true"), basic(name)).error[0] == "unauthenticated"
    else:
        assert identity(agent, name).endswith("| 1234 4321 | 50 52 54 4321")


@pytest.mark.parametrize("files", [{}, {"passwd": ""}, {"passwd": "\0\0:::\n"}, {"passwd": ":" * 100000}])
def test_image_without_users_has_root(boxed: Callable[..., Agent], files: dict[str, str]) -> None:
    agent = boxed(**files)
    assert identity(agent, "root").endswith("root | 0 0 | 0")
    assert agent.start(shell("true"), basic("user")).error[0] == "unauthenticated"


def test_user_without_a_home(boxed: Callable[..., Agent]) -> None:
    agent = boxed(passwd="user:x:1000:1000::/home/none-of-that-name:/bin/sh\n")
    assert agent.run("pwd", basic("user")).output["stdout"] == b"/\n"
    code, message = agent.start(shell("true", cwd="~"), basic("user")).error
    assert (code, message) == ("invalid_argument", "cwd '/home/none-of-that-name' does not exist")


def test_agent_that_is_not_root_runs_processes_as_itself(envd_binary: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as open_folder:
        os.chmod(open_folder, 0o755)
        binary = shutil.copy(envd_binary, open_folder)
        wrapper = tmp_path / "as-daemon"
        wrapper.write_text(f'#!/bin/sh\nexec setpriv --reuid daemon --regid daemon --clear-groups {binary} "$@"\n')
        wrapper.chmod(0o755)
        agent = Agent(wrapper, stderr=tmp_path / "log")
        assert agent.run("id -un", cwd="/").output["stdout"] == b"daemon\n"
        assert agent.run("id -un", basic("daemon"), cwd="/").output["stdout"] == b"daemon\n"
        code, message = agent.start(shell("true", cwd="/"), basic("root")).error
        assert (code, "root" in message) == ("permission_denied", True)
        agent.stop()


def init(agent: Agent, **fields: str) -> None:
    """As the host does it. The files are there when the agent has answered anything else."""
    assert agent.init(**fields).status == 204
    assert agent.request("GET", "/health").status == 204


def test_init_sets_the_system(boxed: Callable[..., Agent], tmp_path: Path) -> None:
    agent = boxed(machine_id="old and much longer than the new one, which replaces it\n")
    before = os.uname().nodename
    entropy = base64.b64encode(os.urandom(512)).decode()
    init(agent, hostname="box-1.test", machineId="0123456789abcdef" * 2, entropy=entropy)
    assert agent.run("cat /proc/sys/kernel/hostname").output["stdout"] == b"box-1.test\n"
    assert os.uname().nodename == before
    assert (tmp_path / "etc/machine-id").read_text() == "0123456789abcdef" * 2 + "\n"
    assert (tmp_path / "run/e2b/.E2B_SANDBOX").read_text() == "true"
    assert agent.errors() == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, ""),
        ("", ""),
        ("127.0.0.1 localhost\n", "127.0.0.1 localhost\n"),
        ("127.0.0.1 localhost", "127.0.0.1 localhost\n"),
        ("a\n127.0.1.1\told # this sandbox\nb\n", "a\nb\n"),
        ("127.0.1.1\told # this sandbox", ""),
        ("\n\n", "\n\n"),
    ],
)
def test_host_name_resolves(boxed: Callable[..., Agent], tmp_path: Path, before: str | None, after: str) -> None:
    agent = boxed(**({} if before is None else {"hosts": before}))
    for name in ("one", "two", "two"):
        init(agent, hostname=name)
        assert (tmp_path / "etc/hosts").read_text() == f"{after}127.0.1.1\t{name} # this sandbox\n"
    assert agent.run("getent hosts two", basic("root")).output["stdout"].split() == [b"127.0.1.1", b"two"]
    assert agent.errors() == ""


@pytest.mark.parametrize("content", [b"x" * 100_000, b"a\0b\n"])
def test_odd_hosts_file_is_left_alone(boxed: Callable[..., Agent], tmp_path: Path, content: bytes) -> None:
    agent = boxed()
    (tmp_path / "etc/hosts").write_bytes(content)
    init(agent, hostname="name")
    assert (tmp_path / "etc/hosts").read_bytes() == content


def test_what_is_right_already_is_not_written_again(boxed: Callable[..., Agent], tmp_path: Path) -> None:
    agent = boxed()
    files = [tmp_path / "etc/hosts", tmp_path / "etc/machine-id", tmp_path / "run/e2b/.E2B_SANDBOX"]
    init(agent, hostname="name", machineId="a" * 32)
    before = [file.stat().st_mtime_ns for file in files]
    init(agent, hostname="name", machineId="a" * 32)
    assert [file.stat().st_mtime_ns for file in files] == before


def test_init_does_not_follow_links(boxed: Callable[..., Agent], tmp_path: Path) -> None:
    """The image's owner may have put anything there; the agent runs as root."""
    agent = boxed()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("machine-id", "hosts"):
        (tmp_path / "etc" / name).symlink_to(victim)
    init(agent, machineId="a" * 32, hostname="name")
    assert victim.read_text() == "kept"
    assert "machine-id" in agent.errors()


# ---- files behind the answer to /init ----

READ_MACHINE_ID = b"GET /files?path=/etc/machine-id HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"


def init_request(machine_id: str) -> bytes:
    return post("/init", json.dumps({"machineId": machine_id, "hostname": "name"}).encode(), JSON)


def test_next_request_on_the_same_connection_finds_the_files(boxed: Callable[..., Agent]) -> None:
    agent = boxed(machine_id="old\n")
    for digit in "0123456789":
        answers = agent.exchange(init_request(digit * 32) + READ_MACHINE_ID)
        assert statuses(answers) == [204, 200]
        assert answers.endswith(digit.encode() * 32 + b"\n")


def test_next_request_on_another_connection_finds_the_files(boxed: Callable[..., Agent]) -> None:
    """Both requests wait when the agent turns to them."""
    agent = boxed(machine_id="old\n")
    for digit in "0123456789":
        with (
            agent.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as first,
            agent.raw(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as second,
        ):
            assert b" 204 " in first.recv(4096)
            assert b" 204 " in second.recv(4096)
            agent.process.send_signal(signal.SIGSTOP)
            first.sendall(init_request(digit * 32))
            second.sendall(READ_MACHINE_ID)
            agent.process.send_signal(signal.SIGCONT)
            assert read_all(second).endswith(digit.encode() * 32 + b"\n")
            assert b" 204 " in first.recv(4096)


def test_host_that_leaves_before_the_answer_still_gets_the_files(boxed: Callable[..., Agent], tmp_path: Path) -> None:
    agent = boxed(machine_id="old\n")
    agent.process.send_signal(signal.SIGSTOP)
    agent.raw(init_request("a" * 32)).close()
    agent.process.send_signal(signal.SIGCONT)
    assert agent.request("GET", "/health").status == 204
    assert (tmp_path / "etc/machine-id").read_text() == "a" * 32 + "\n"


def test_files_are_written_though_nobody_asks_for_anything(boxed: Callable[..., Agent], tmp_path: Path) -> None:
    agent = boxed(machine_id="old\n")
    assert agent.init(machineId="a" * 32, hostname="name").status == 204
    deadline = time.monotonic() + 20
    while (tmp_path / "etc/machine-id").read_text() != "a" * 32 + "\n":
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the agent's own doing: nothing tells of it


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[threading.Event]:
    """The agent's /run is on a disk that answers once the event is set. Named before `boxed`, it outlives the agent."""
    gate = threading.Event()
    (tmp_path / "run").mkdir()
    with EmptyFuse(tmp_path / "run", gate):
        yield gate


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing")
def test_answer_does_not_wait_for_the_disk(
    slow_run: threading.Event, boxed: Callable[..., Agent], tmp_path: Path
) -> None:
    agent = boxed(machine_id="old\n")
    assert agent.init(machineId="a" * 32, hostname="name").status == 204
    slow_run.set()
    assert agent.request("GET", "/health").status == 204
    assert (tmp_path / "etc/machine-id").read_text() == "a" * 32 + "\n"
    assert "/run/e2b" in agent.errors()
