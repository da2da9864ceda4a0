"""The daemon stops, crashes and comes back: sandboxes are there again, and nothing is there that should not be."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time

import pytest
from e2b import Sandbox

from tests.integration.conftest import AENV, Daemon, NewDaemon, wait_until
from tests.integration.test_pause import counter, start_counter

pytestmark = pytest.mark.vm

ROUNDS = 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_stop_pauses_what_runs(new_daemon: NewDaemon, number: signal.Signals) -> None:
    daemon = new_daemon().start()
    running, paused = daemon.create(metadata={"name": "one"}), daemon.create()
    start_counter(running)
    count, identity = counter(running)
    paused.pause()

    assert daemon.stop(number) == 0
    assert daemon.left() == []
    assert not (daemon.home.root / "daemon.json").exists()

    daemon.start()
    assert daemon.list() == {running.sandbox_id: "paused", paused.sandbox_id: "paused"}
    again = daemon.connect(running.sandbox_id)
    later, same = counter(again)
    assert (later >= count, same) == (True, identity)
    wait_until(lambda: counter(again)[0] > later, "progress of the counter")
    assert again.get_info().metadata == {"name": "one"}
    assert daemon.connect(paused.sandbox_id).commands.run("echo fine").stdout == "fine\n"
    running.kill(**daemon.options)
    paused.kill(**daemon.options)
    assert daemon.list() == {}


def test_a_crashed_daemon_finds_its_sandboxes_again(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(AENV_VMM_POOL="2").start()
    sandbox, paused, doomed = daemon.create(), daemon.create(), daemon.create()
    start_counter(sandbox)
    paused.commands.run("echo kept > /dev/shm/word")
    paused.pause()
    count, identity = counter(sandbox)
    vmm, lost = daemon.vmm_of(sandbox), daemon.vmm_of(doomed)
    wait_until(lambda: len(daemon.vmms()) >= 3, "a machine in the pool")

    daemon.crash()
    pooled = set(daemon.vmms()) - {vmm, lost}
    os.kill(lost, signal.SIGKILL)
    os.kill(vmm, 0)  # it lives
    daemon.start()

    assert daemon.list() == {sandbox.sandbox_id: "running", paused.sandbox_id: "paused"}
    assert f"sandbox {doomed.sandbox_id} lost" in daemon.log()
    assert not (daemon.home.sandboxes / doomed.sandbox_id).exists()
    assert not pooled & set(daemon.vmms()), "machines of the old pool are gone"
    again = daemon.connect(sandbox.sandbox_id)
    assert daemon.vmm_of(again) == vmm, "the same machine"
    later, same = counter(again)
    assert (later > count, same) == (True, identity), "it ran all the time"
    again.pause()
    again = daemon.connect(sandbox.sandbox_id)
    assert counter(again)[1] == identity
    assert daemon.connect(paused.sandbox_id).commands.run("cat /dev/shm/word").stdout == "kept\n"
    os.kill(daemon.vmm_of(again), signal.SIGKILL)
    wait_until(lambda: sandbox.sandbox_id not in daemon.list(), "end of the sandbox")


def test_a_time_out_that_passed_meanwhile(new_daemon: NewDaemon) -> None:
    daemon = new_daemon().start()
    ended, paused = daemon.create(timeout=2), daemon.create(timeout=2, lifecycle={"on_timeout": "pause"})
    deadline = time.time() + 2
    daemon.crash()
    wait_until(lambda: time.time() > deadline, "their time-out")
    daemon.start()
    wait_until(lambda: daemon.list() == {paused.sandbox_id: "paused"}, "what the time-outs do")
    wait_until(lambda: not (daemon.home.sandboxes / ended.sandbox_id).exists(), "end of the directory")


def test_one_daemon_a_home(new_daemon: NewDaemon) -> None:
    daemon = new_daemon().start()
    sandbox = daemon.create()
    second = subprocess.run(
        [*AENV, "--home", str(daemon.home.root), "serve", "--listen", "127.0.0.1:0"],
        env=daemon.environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert second.returncode == 1
    assert "another daemon serves" in second.stderr
    assert sandbox.commands.run("echo fine").stdout == "fine\n"
    assert daemon.aenv("ls").returncode == 0, "the record of the first is still there"


# Crashes in the middle


def consistent(daemon: Daemon) -> dict[str, str]:
    """What is listed is all there is on the disk, and is running or paused. Returns the list."""
    boxes = daemon.list()
    assert set(boxes.values()) <= {"running", "paused"}
    daemon.wait_for_folders(set(boxes))
    assert set(boxes) <= daemon.folders()
    return boxes


def in_background(work: object) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(Exception):  # the daemon is killed under it
            work()  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_crashes_during_create_leave_nothing(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(AENV_VMM_POOL="0", AENV_NETWORK_POOL="0")
    for _ in range(ROUNDS):
        daemon.start()
        for sandbox_id in consistent(daemon):
            assert daemon.connect(sandbox_id).commands.run("echo fine").stdout == "fine\n"
            daemon.request("DELETE", f"/sandboxes/{sandbox_id}")
        assert daemon.vmms() == {}
        assert daemon.namespaces() == []
        thread = in_background(daemon.create)
        time.sleep(random.uniform(0, 0.4))  # any moment of a create
        daemon.crash()
        thread.join()
    daemon.start()
    for sandbox_id in consistent(daemon):
        daemon.request("DELETE", f"/sandboxes/{sandbox_id}")
    daemon.stop()
    assert daemon.left() == []
    assert list(daemon.home.sandboxes.iterdir()) == []


def test_crashes_during_pause_and_resume_lose_nothing(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(AENV_VMM_POOL="0", AENV_NETWORK_POOL="0").start()
    sandbox = daemon.create(timeout=3600)
    start_counter(sandbox)
    identity, words = counter(sandbox)[1], ""
    for number in range(2 * ROUNDS):
        sandbox.commands.run(f"echo {number} >> /home/user/words; echo {number} >> /dev/shm/words")
        words += f"{number}\n"
        if number % 2:
            work = sandbox.pause
        else:
            sandbox.pause()
            box, here = sandbox.sandbox_id, daemon
            work = lambda: here.connect(box, timeout=3600)  # noqa: B023, E731
        thread = in_background(work)
        time.sleep(random.uniform(0, 0.25))  # any moment of it
        daemon.crash()
        thread.join()
        daemon.start()
        assert set(consistent(daemon)) == {sandbox.sandbox_id}
        assert len(daemon.vmms()) <= 1
        sandbox = daemon.connect(sandbox.sandbox_id, timeout=3600)
        assert counter(sandbox)[1] == identity
        assert sandbox.files.read("/home/user/words") == words
        assert sandbox.files.read("/dev/shm/words") == words
    sandbox.kill()


def test_a_stop_during_a_create(new_daemon: NewDaemon) -> None:
    """The create comes to its end, one way or the other; nothing runs afterwards."""
    daemon = new_daemon(AENV_VMM_POOL="0").start()
    for _ in range(2):
        thread = in_background(lambda: Sandbox.create("base", timeout=300, **daemon.options))
        time.sleep(random.uniform(0, 0.3))
        assert daemon.stop() == 0
        thread.join()
        assert daemon.left() == []
        daemon.start()
        assert set(consistent(daemon).values()) <= {"paused"}
