"""Guests and machines that fail, requests that are wrong: told clearly, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from e2b import AuthenticationException, Sandbox, SandboxException

from aenv._native.lsmt import Layer, Writer
from tests.integration.conftest import Daemon, NewDaemon, wait_until

pytestmark = pytest.mark.vm

# The agent is the first process that PID 1 starts. It was started from a descriptor and has no name to find it by.
STOP_AGENT = "(sleep 0.3; kill -STOP $(pgrep -o -P 1)) &"


def gone(daemon: Daemon, sandbox: Sandbox) -> None:
    """Not listed, no process, no directory."""
    wait_until(lambda: sandbox.sandbox_id not in daemon.list(), "end of the sandbox")
    wait_until(lambda: not (daemon.home.sandboxes / sandbox.sandbox_id).exists(), "end of its directory")
    assert not sandbox.is_running()
    assert daemon.request("GET", f"/sandboxes/{sandbox.sandbox_id}")[0] == 404


@pytest.mark.parametrize(
    ("command", "last_words"),
    [
        ("kill -TERM 1", "powering off"),
        ("echo c > /proc/sysrq-trigger", "Kernel panic - not syncing: sysrq triggered crash"),
        ("echo o > /proc/sysrq-trigger", ""),
        ("echo b > /proc/sysrq-trigger", ""),
    ],
)
def test_a_guest_that_ends_is_gone_and_the_reason_is_in_the_log(daemon: Daemon, command: str, last_words: str) -> None:
    sandbox = daemon.create()
    vmm = daemon.vmm_of(sandbox)
    sandbox.commands.run(f"echo 1 > /proc/sys/kernel/sysrq; (sleep 0.2; {command}) &", user="root", background=True)
    gone(daemon, sandbox)
    assert vmm not in daemon.vmms()
    _, lost, reason = daemon.log().partition(f"sandbox {sandbox.sandbox_id} lost: the guest shut down (")
    assert lost
    assert last_words in reason, "the end of its console"


def test_a_killed_vmm_is_noticed(daemon: Daemon) -> None:
    sandbox = daemon.create()
    os.kill(daemon.vmm_of(sandbox), signal.SIGKILL)
    gone(daemon, sandbox)
    assert f"sandbox {sandbox.sandbox_id} lost: QEMU was killed by SIGKILL" in daemon.log()


def test_a_killed_pooled_vmm_is_not_handed_out(daemon: Daemon) -> None:
    wait_until(daemon.vmms, "a machine in the pool")
    killed = daemon.vmms()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), "that the daemon takes note")
    sandbox = daemon.create()
    assert sandbox.commands.run("echo fine").stdout == "fine\n"
    sandbox.kill()


def test_a_stopped_vmm_can_be_killed(daemon: Daemon) -> None:
    """A process that does not answer must not hold up its end."""
    sandbox = daemon.create()
    os.kill(daemon.vmm_of(sandbox), signal.SIGSTOP)
    assert sandbox.kill() is True
    gone(daemon, sandbox)


def test_a_stopped_agent_does_not_hold_up_others(daemon: Daemon) -> None:
    sandbox, other = daemon.create(), daemon.create()
    try:
        sandbox.commands.run(STOP_AGENT, user="root", background=True)
        wait_until(lambda: not_answering(sandbox), "silence of the agent")
        assert other.commands.run("echo fine").stdout == "fine\n"
        assert sandbox.pause() is True, "a pause does not need the guest"
    finally:
        sandbox.kill()
        other.kill()


def not_answering(sandbox: Sandbox) -> bool:
    try:
        sandbox.files.exists("/", request_timeout=1)
    except Exception:
        return True
    return False


# Templates that cannot be restored


def copied(daemon: Daemon, identity: str, **changes: Any) -> Path:
    """A copy of the base template under another id, with fields of its manifest changed."""
    source = next(p for p in daemon.home.templates.iterdir() if (p / "manifest.json").exists())
    target = daemon.home.templates / identity
    target.mkdir(mode=0o711)
    for file in source.iterdir():
        if file.name in ("manifest.json", "state"):
            shutil.copy(file, target / file.name)
        else:
            (target / file.name).hardlink_to(file)
    manifest = json.loads((target / "manifest.json").read_text()) | {"id": identity} | changes
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def layers(template: Path) -> dict[str, Path]:
    manifest = json.loads((template / "manifest.json").read_text())
    return {"memory": template / manifest["memory"][0], "disk": template / manifest["disk"]["layers"][0]}


def refused(daemon: Daemon, template: str) -> tuple[int, str]:
    """Status and message of a create that fails, after which there is nothing of it."""
    before = (daemon.list(), daemon.folders())
    status, answer = daemon.request("POST", "/v2/sandboxes", {"templateID": template, "timeout": 60})
    assert daemon.list() == before[0]
    daemon.wait_for_folders(before[1])
    return status, answer["message"]


def damage(state: Path, how: str) -> None:
    content = state.read_bytes()
    middle = len(content) // 2
    state.write_bytes(
        {
            "empty": b"",
            "not a state": b"x" * len(content),
            "cut": content[:middle],
            "flipped": content[:64] + bytes(255 - b for b in content[64:middle]) + content[middle:],
        }[how]
    )


@pytest.mark.parametrize("how", ["empty", "not a state", "cut", "flipped"])
def test_a_damaged_snapshot_is_refused(daemon: Daemon, how: str) -> None:
    template = "damaged" + how.replace(" ", "")
    damage(copied(daemon, template) / "state", how)
    status, message = refused(daemon, template)
    assert status == 500
    assert "state" in message
    wait_until(lambda: not any("damaged" in str(p) for p in daemon.home.staging.iterdir()), "clean staging")
    sandbox = daemon.create()
    assert sandbox.commands.run("echo fine").stdout == "fine\n"
    sandbox.kill()


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("vmm_version", "6.9.1", "VMM version is 6.9.1, this node has "),
        ("vmm_kind", "firecracker", "VMM is firecracker, this node has qemu-"),
        ("cpu_model", "core2duo", "CPU model is core2duo, this node has "),
        ("devices", "microvm-1", "set of devices is microvm-1, this node has "),
    ],
)
def test_a_snapshot_of_another_vmm_is_refused_by_name(daemon: Daemon, field: str, value: str, what: str) -> None:
    copied(daemon, f"other{field.replace('_', '')}", **{field: value})
    status, message = refused(daemon, f"other{field.replace('_', '')}")
    assert status == 503
    assert what in message


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_template_with_a_missing_layer_is_refused(daemon: Daemon, what: str) -> None:
    layer = layers(copied(daemon, f"no{what}"))[what]
    layer.unlink()
    status, message = refused(daemon, f"no{what}")
    assert status == 500
    assert layer.name in message


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_template_with_a_damaged_layer_is_refused(daemon: Daemon, what: str) -> None:
    layer = layers(copied(daemon, f"bad{what}"))[what]
    content = layer.read_bytes()
    layer.unlink()  # it is a link
    layer.write_bytes(content[:-4096])
    status, message = refused(daemon, f"bad{what}")
    assert status == 500
    assert "trailer" in message


def test_a_damaged_manifest_names_its_field_and_hides_no_other(new_daemon: NewDaemon) -> None:
    daemon = new_daemon()
    copied(daemon, "badmanifest", vcpus="many")
    daemon.start()
    status, message = refused(daemon, "badmanifest")
    assert status == 400
    assert "manifest.vcpus" in message
    assert [t["names"] for t in daemon.request("GET", "/templates")[1]] == [["base"]]
    assert "template badmanifest is left out: manifest.vcpus" in daemon.log()
    sandbox = daemon.create()
    assert sandbox.commands.run("echo fine").stdout == "fine\n"
    sandbox.kill()


def test_a_guest_whose_memory_is_nonsense(new_daemon: NewDaemon) -> None:
    daemon = new_daemon(AENV_AGENT_TIMEOUT="3", AENV_VMM_POOL="0").start()
    layer = layers(copied(daemon, "zeros"))["memory"]
    size = Layer(layer).info.virtual_size
    layer.unlink()
    with layer.open("w+b") as file:
        writer = Writer(file.fileno(), size, uuid=str(uuid.uuid4()))
        writer.add_zeros(0, size)
        writer.finish()
    status, message = refused(daemon, "zeros")
    assert status == 500
    assert "did not answer within 3 s" in message or "the machine ended while it started" in message
    assert daemon.vmms() == {}
    daemon.stop()
    assert daemon.left() == []


def test_a_guest_that_never_answers(new_daemon: NewDaemon) -> None:
    """Its agent was stopped before the pause: the resume fails in time and says so, nothing of it runs and nothing is
    lost. A boot from its disk helps."""
    daemon = new_daemon(AENV_AGENT_TIMEOUT="3", AENV_VMM_POOL="0").start()
    sandbox = daemon.create()
    sandbox.files.write("kept", "on disk")
    sandbox.commands.run("sync")
    sandbox.commands.run(STOP_AGENT, user="root", background=True)
    wait_until(lambda: not_answering(sandbox), "silence of the agent")
    assert sandbox.pause() is True
    connect = ("POST", f"/v2/sandboxes/{sandbox.sandbox_id}/connect", {"timeout": 60})
    status, answer = daemon.request(*connect)
    assert status == 500
    assert "the guest agent did not answer within 3 s" in answer["message"]
    wait_until(lambda: daemon.vmms() == {}, "end of its machine")
    assert daemon.list() == {sandbox.sandbox_id: "paused"}
    daemon.stop()
    daemon.environment["AENV_AGENT_TIMEOUT"] = "60"  # a boot takes longer than three seconds
    daemon.start()
    status, _ = daemon.request("POST", f"/v2/sandboxes/{sandbox.sandbox_id}/connect", {"timeout": 60, "memory": False})
    assert status == 201
    revived = daemon.connect(sandbox.sandbox_id)
    assert revived.files.read("kept") == "on disk"
    assert revived.kill() is True
    assert list(daemon.home.sandboxes.iterdir()) == []
    daemon.stop()
    assert daemon.left() == []


# Requests


def test_wrong_keys(daemon: Daemon) -> None:
    for headers in ({"X-API-Key": "e2b_" + "0" * 40}, {"X-API-Key": ""}, {"X-API-Key": daemon.key[:-1]}):
        status, answer = daemon.request("GET", "/v2/sandboxes", **headers)
        assert (status, answer["code"]) == (401, 401), headers
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", **(daemon.options | {"api_key": "e2b_" + "1" * 40}))
    assert daemon.list() == {}


def test_a_token_of_another_sandbox_opens_nothing(daemon: Daemon) -> None:
    one, two = daemon.create(), daemon.create()
    try:
        headers = {"E2b-Sandbox-Id": one.sandbox_id, "E2b-Sandbox-Port": "49983"}
        for token in ({}, {"X-Access-Token": two._envd_access_token or "x"}):
            assert daemon.request("GET", "/files?path=/etc/passwd", **headers, **token)[0] == 401
    finally:
        one.kill()
        two.kill()


def test_an_unknown_template(daemon: Daemon) -> None:
    with pytest.raises(SandboxException, match="nothing"):
        daemon.create("nothing")
    assert daemon.request("POST", "/v2/sandboxes", {"templateID": "nothing"})[0] == 404
    assert daemon.request("POST", "/sandboxes", {"templateID": "nothing"})[0] == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 100000, "body"),
        ({}, "templateID"),
        ({"templateID": 5}, "templateID"),
        ({"templateID": "../../etc"}, "template"),
        ({"templateID": "base", "timeout": "soon"}, "timeout"),
        ({"templateID": "base", "timeout": -1}, "timeout"),
        ({"templateID": "base", "timeout": 10**12}, "timeout"),
        ({"templateID": "base", "metadata": {"a": 1}}, "metadata"),
        ({"templateID": "base", "envVars": {"A=B": "c"}}, "envVars"),
        ({"templateID": "base", "network": {"allowOut": ["300.1.2.3"]}}, "allowOut"),
    ],
)
def test_bad_bodies_name_the_field(daemon: Daemon, body: Any, field: str) -> None:
    status, answer = daemon.request("POST", "/v2/sandboxes", body)
    assert (status, answer["code"]) == (400, 400)
    assert field in answer["message"]
    assert daemon.list() == {}
