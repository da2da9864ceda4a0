"""Branching as a user does it: the commands, and the example of what the system is for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.conftest import ROOT, Daemon, clean_environment

pytestmark = pytest.mark.vm

CHILDREN, GENERATIONS = 4, 2


def told(daemon: Daemon, *words: str) -> Any:
    """The JSON that a command prints."""
    done = daemon.aenv(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_snapshot_fork_rollback_and_tree(daemon: Daemon) -> None:
    def keep(sandbox_id: str, word: str) -> None:
        """In memory and on the disk."""
        done = daemon.aenv("exec", sandbox_id, "--", "sh", "-c", f"echo {word} | tee /dev/shm/word > word")
        assert done.returncode == 0, done.stderr

    def kept(sandbox_id: str) -> list[str]:
        return daemon.aenv("exec", sandbox_id, "--", "cat", "/dev/shm/word", "word").stdout.decode().split()

    source = told(daemon, "start", "-d", "base")["sandboxID"]
    keep(source, "one")
    snapshot = told(daemon, "snapshot", "create", source, "--name", "before")
    assert (snapshot["snapshotID"], snapshot["sandboxID"]) == ("before:default", source)
    keep(source, "two")
    children = [child["sandbox"]["sandboxID"] for child in told(daemon, "fork", source, "-n", "2")]
    keep(children[0], "three")
    later = told(daemon, "start", "-d", "before")["sandboxID"]
    boxes = [source, *children, later]
    assert [kept(box) for box in boxes] == [["two"] * 2, ["three"] * 2, ["two"] * 2, ["one"] * 2]

    nodes = {node["id"]: node for node in told(daemon, "tree")}
    assert {nodes[box]["kind"] for box in boxes} == {"sandbox"}
    assert nodes[later]["parentID"] == snapshot["templateID"]
    assert [nodes[child]["parentID"] for child in children] == [source] * 2
    assert nodes[source]["parentID"] == snapshot["templateID"], "it goes on from its last snapshot"
    template = nodes[nodes[snapshot["templateID"]]["parentID"]]
    assert (template["kind"], template["names"]) == ("template", ["base"])
    assert all(0 < nodes[box]["privateBytes"] < nodes[box]["residentBytes"] for box in boxes)

    assert daemon.aenv("rollback", source, "before").returncode == 0
    assert [kept(box) for box in boxes] == [["one"] * 2, ["three"] * 2, ["two"] * 2, ["one"] * 2]
    done = daemon.aenv("rollback", source, "nothing")
    assert (done.returncode, done.stdout) == (1, b"")
    assert kept(source) == ["one"] * 2

    assert daemon.aenv("rm", *boxes).returncode == 0
    assert daemon.aenv("snapshot", "rm", "base").returncode == 1, "it is a template"
    assert daemon.aenv("snapshot", "rm", "before").returncode == 0
    assert told(daemon, "snapshot", "ls") == []
    assert [node["kind"] for node in told(daemon, "tree")] == ["template"]


def test_rl_rollouts_runs_as_it_is_and_leaves_nothing(daemon: Daemon) -> None:
    environment = clean_environment(E2B_API_URL=daemon.url, E2B_SANDBOX_URL=daemon.url, E2B_API_KEY=daemon.key)
    command = [sys.executable, str(ROOT / "examples/rl_rollouts.py")]
    done = subprocess.run(
        [*command, "--children", str(CHILDREN), "--generations", str(GENERATIONS)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] is True
    assert [len(rewards) for rewards in result["rewards"]] == [CHILDREN] * GENERATIONS
    assert result["score"] == sum(max(rewards) for rewards in result["rewards"])
    assert daemon.list() == {}
    assert told(daemon, "snapshot", "ls") == []
    assert [node["kind"] for node in told(daemon, "tree")] == ["template"]
