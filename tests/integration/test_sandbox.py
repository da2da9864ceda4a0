"""What a sandbox does for its user while it runs."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import pytest
from e2b import CommandExitException, PtySize, Sandbox, SandboxNotFoundException
from e2b.sandbox.sandbox_api import SandboxQuery

from tests.integration.conftest import LISTENS, Daemon, wait_until

pytestmark = pytest.mark.vm


def test_create_and_kill(daemon: Daemon) -> None:
    sandbox = daemon.create(metadata={"purpose": "life"}, timeout=120)
    assert sandbox.is_running()
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.name == "base"
    assert info.metadata == {"purpose": "life"}
    assert 0 < (info.end_at - datetime.now(UTC)).total_seconds() <= 120
    assert daemon.list()[sandbox.sandbox_id] == "running"
    folder = daemon.home.sandboxes / sandbox.sandbox_id
    pid = daemon.vmm_of(sandbox)
    assert folder.is_dir()

    assert sandbox.kill() is True
    assert not folder.exists()
    assert pid not in daemon.vmms()
    assert sandbox.is_running() is False
    assert sandbox.kill() is False
    assert sandbox.sandbox_id not in daemon.list()
    with pytest.raises(SandboxNotFoundException):
        daemon.connect(sandbox.sandbox_id)


def test_list_by_metadata_and_state(daemon: Daemon, box: Sandbox) -> None:
    other = daemon.create(metadata={"team": "red"})
    try:
        pages = Sandbox.list(query=SandboxQuery(metadata={"team": "red"}), **daemon.options)
        assert [b.sandbox_id for b in pages.next_items()] == [other.sandbox_id]
        assert set(daemon.list()) >= {box.sandbox_id, other.sandbox_id}
    finally:
        other.kill()


# Commands


def test_output_status_and_surroundings_of_a_command(box: Sandbox) -> None:
    done = box.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo said; echo why >&2; exit 7")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.stderr) == (7, "said\n", "why\n")
    done = box.commands.run('echo "$COLOUR $PWD $(whoami)"', envs={"COLOUR": "blue"}, cwd="/var/tmp")
    assert done.stdout == "blue /var/tmp user\n"
    assert box.commands.run("id -u; pwd; echo $HOME", user="root").stdout == "0\n/home/user\n/root\n"
    assert box.commands.run("sudo id -u").stdout == "0\n"
    text = "grün ☃ " * 20000
    box.files.write("/tmp/long", text)
    assert box.commands.run("cat /tmp/long").stdout == text


def test_background_command_with_input(box: Sandbox) -> None:
    lines: list[str] = []
    handle = box.commands.run("cat; echo over", background=True, stdin=True, timeout=0)
    assert handle.pid in [p.pid for p in box.commands.list()]
    box.commands.send_stdin(handle.pid, "typed\n")
    box.commands.close_stdin(handle.pid)
    assert handle.wait(on_stdout=lines.append).exit_code == 0
    assert "".join(lines) == "typed\nover\n"

    sleeper = box.commands.run("sleep 1000", background=True, timeout=0)
    assert box.commands.kill(sleeper.pid) is True
    with pytest.raises(CommandExitException):
        sleeper.wait()
    assert sleeper.pid not in [p.pid for p in box.commands.list()]
    assert box.commands.kill(sleeper.pid) is False


def test_environment_of_the_sandbox(daemon: Daemon) -> None:
    sandbox = daemon.create(envs={"TOKEN": "s3cret"})
    try:
        assert sandbox.commands.run("echo $TOKEN").stdout == "s3cret\n"
        assert sandbox.commands.run("echo $TOKEN", envs={"TOKEN": "mine"}).stdout == "mine\n"
    finally:
        sandbox.kill()


# Files


def test_files(box: Sandbox) -> None:
    files = box.files
    content = bytes(range(256)) * 4096
    info = files.write("deep/er/data.bin", content)
    assert info.path == "/home/user/deep/er/data.bin"
    assert bytes(files.read("deep/er/data.bin", format="bytes")) == content
    assert box.commands.run("sha256sum < deep/er/data.bin; stat -c %U deep/er/data.bin").stdout.split()[-1] == "user"
    assert [e.name for e in files.list("deep")] == ["er"]
    assert files.exists("deep/er/data.bin")
    files.rename("deep/er/data.bin", "moved")
    assert not files.exists("deep/er/data.bin")
    assert files.get_info("moved").size == len(content)
    assert files.make_dir("fresh") is True
    assert files.make_dir("fresh") is False
    files.remove("moved")
    with pytest.raises(Exception, match=r"moved|not found|does not exist|no such"):
        files.read("moved")


def test_watching_a_directory(box: Sandbox) -> None:
    box.files.make_dir("watched")
    handle = box.files.watch_dir("watched")
    box.files.write("watched/new", "x")
    seen: list[str] = []

    def saw() -> bool:
        seen.extend(event.name for event in handle.get_new_events())
        return "new" in seen

    wait_until(saw, "an event for the new file")
    handle.stop()


# Terminals


def test_terminal(box: Sandbox) -> None:
    shell = box.pty.create(PtySize(rows=30, cols=100), timeout=60)
    box.pty.resize(shell.pid, PtySize(rows=41, cols=123))
    box.pty.send_stdin(shell.pid, b"stty size; tty; whoami; exit 3\n")
    shown = b""
    with pytest.raises(CommandExitException) as left:
        shell.wait(on_pty=lambda data: None)
    assert left.value.exit_code == 3
    again = box.pty.create(PtySize(rows=30, cols=100), timeout=60)
    box.pty.resize(again.pid, PtySize(rows=41, cols=123))
    box.pty.send_stdin(again.pid, b"stty size; tty; exit\n")
    for _, _, data in again:
        shown += data or b""
    assert b"41 123" in shown
    assert b"/dev/pts/" in shown


# Time-outs


def test_time_out_ends_a_sandbox(daemon: Daemon) -> None:
    sandbox = daemon.create(timeout=300)
    sandbox.set_timeout(2)
    end = time.time() + 2
    wait_until(lambda: sandbox.sandbox_id not in daemon.list(), "its end")
    late = time.time() - end
    assert -0.5 < late < 5, "a second on an idle machine"
    wait_until(lambda: not (daemon.home.sandboxes / sandbox.sandbox_id).exists(), "end of its directory")
    assert "expired" in daemon.log()


def test_time_out_can_be_put_off(daemon: Daemon) -> None:
    sandbox = daemon.create(timeout=5)
    sandbox.set_timeout(600)
    try:
        assert (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds() > 500
        sandbox.connect(timeout=10)  # never shortens
        assert (sandbox.get_info().end_at - datetime.now(UTC)).total_seconds() > 500
    finally:
        sandbox.kill()


# Traffic to ports of the user


def test_a_server_in_the_sandbox_is_reached(daemon: Daemon, box: Sandbox) -> None:
    box.files.write("site/index.html", "served from inside")
    server = box.commands.run("exec python3 -m http.server 8000 -d site", background=True, timeout=0)
    box.commands.run(LISTENS)
    try:
        status, content = daemon.get(box, 8000, "/index.html")
        assert (status, content) == (200, b"served from inside")
        assert daemon.get(box, 8001, "/")[0] == 502
    finally:
        server.kill()


# Isolation


# A packet may be refused or dropped: all attempts wait at the same time.
PROBE = r"""
import socket, sys
from concurrent.futures import ThreadPoolExecutor

def attempt(target):
    host, port = target.rsplit("/", 1)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as made:
        made.settimeout(3)
        try:
            made.connect((host, int(port)))
        except OSError:
            return
        print("REACHED", target)

with ThreadPoolExecutor(len(sys.argv)) as pool:
    list(pool.map(attempt, sys.argv[1:]))
print("probed", len(sys.argv) - 1)
"""


def test_a_guest_reaches_nobody(daemon: Daemon, box: Sandbox) -> None:
    """No way out is configured: not the host (its end of the tap, its API), not neighbours, not private ranges."""
    api = daemon.url.rpartition(":")[2]
    other = daemon.create()
    try:
        other.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
        own = box.commands.run("ip -4 -br addr show dev eth0").stdout.split()[-1].split("/")[0]
        assert own == "169.254.0.21"
        hosts = ["169.254.0.22", "169.254.0.20", "169.254.0.23", "169.254.169.254", "10.0.0.1", "172.17.0.1",
                 "192.168.0.1", "100.64.0.1", "198.18.0.1", "192.0.2.1", "fd00:ae::22", "fd00:ec2::254"]  # fmt: skip
        targets = [f"{host}/{port}" for host in hosts for port in (22, 53, 80, 8000, 49983, int(api))]
        control = "127.0.0.1/49983"  # the agent: the probe finds what is there
        box.files.write("/tmp/probe.py", PROBE)
        done = box.commands.run(f"python3 /tmp/probe.py {control} {' '.join(targets)}", timeout=180)
        assert done.stdout == f"REACHED {control}\nprobed {len(targets) + 1}\n"
    finally:
        other.kill()


def test_two_sandboxes_share_nothing(daemon: Daemon, box: Sandbox) -> None:
    other = daemon.create()
    try:
        box.files.write("/home/user/mine", "a")
        box.files.write("/tmp/mine", "a")
        box.commands.run("exec sleep 987654", background=True, timeout=0)
        assert not other.files.exists("/home/user/mine")
        assert not other.files.exists("/tmp/mine")
        assert "987654" not in other.commands.run("ps -ef").stdout
        for command in ("cat /etc/machine-id", "hostname", "head -c 32 /dev/urandom | base64"):
            assert box.commands.run(command).stdout != other.commands.run(command).stdout, command
        assert other.commands.run("hostname").stdout.strip() == other.sandbox_id
        assert other.commands.run("cat /etc/machine-id").stdout.strip() not in ("", "uninitialized")
    finally:
        other.kill()


def test_the_same_random_numbers_are_never_seen_twice(daemon: Daemon) -> None:
    """Every first output of a fresh child: all begin with the same memory."""
    boxes = [daemon.create() for _ in range(3)]
    try:
        command = "head -c 24 /dev/urandom | base64; python3 -c 'import uuid; print(uuid.uuid4())'"
        seen = [b.commands.run(command).stdout for b in boxes]
        assert len({line for text in seen for line in text.split()}) == 6
    finally:
        for sandbox in boxes:
            sandbox.kill()


def test_clock(box: Sandbox) -> None:
    before = time.time()
    told = float(box.commands.run("date +%s.%N").stdout)
    assert before - 1 < told < time.time() + 1


def test_many_commands_at_once(box: Sandbox) -> None:
    results: dict[int, str] = {}

    def run(number: int) -> None:
        results[number] = box.commands.run(f"echo {number}").stdout

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}\n" for n in range(8)}


def test_an_emulated_kernel_does_without_cmpxchg16b(box: Sandbox) -> None:
    """The emulator leaves garbage in EFLAGS after it (see docs/boot.md): nothing in the kernel may use it."""
    flags = box.commands.run("grep -m1 ^flags /proc/cpuinfo").stdout.split()
    assert "tsc" in flags
    assert "cx16" not in flags or "kvm" in box.commands.run("cat /proc/cmdline").stdout
