"""The family tree, and short chains of layers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import UnavailableError
from aenv.sandbox.family import family
from aenv.sandbox.live import Sandbox
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import NodeKind, SandboxState, TreeNode
from aenv.sandbox.store import Record
from aenv.storage.repository import Repository, Template
from tests.sandbox import doubles
from tests.sandbox.world import BASE, World, options, read, run, settled, vm_of, write
from tests.storage.templates import committed, snapshot_of


def shape(nodes: list[TreeNode]) -> list[tuple[str, str | None]]:
    return [(node.id, node.parent_id) for node in nodes]


class Forest:
    """Templates in a repository, and sandboxes that do not run."""

    def __init__(self, folder: Path) -> None:
        (folder / "templates").mkdir()
        self.folder = folder
        self.repository = Repository(folder / "templates")
        self.sandboxes: list[Sandbox] = []

    def template(self, identity: str, created: float, parent: Template | None = None) -> Template:
        changes: dict[str, Any] = {} if parent is None else snapshot_of(parent)
        return committed(self.repository, self.folder, identity=identity, created=created, **changes)

    def sandbox(self, identity: str, template: Template, started: float, *lineage: str) -> None:
        record = Record(
            id=identity, template_id=template.id, options=BASE, started_at=started, end_at=0,
            state=SandboxState.PAUSED, disk=["d.lsmt"], lineage=list(lineage),
        )  # fmt: skip
        (self.folder / identity).mkdir()
        (self.folder / identity / "d.lsmt").write_bytes(b"x" * 5000)
        self.sandboxes.append(Sandbox(record, template))

    def tree(self) -> list[TreeNode]:
        return family(self.repository.templates(), self.sandboxes, lambda identity: self.folder / identity, {})


def test_parents_come_before_children_and_siblings_by_age(tmp_path: Path) -> None:
    forest = Forest(tmp_path)
    second, first = forest.template("second", 20), forest.template("first", 10)
    young = forest.template("young", 12, first)
    forest.template("old", 11, first)
    forest.template("grandchild", 5, young)  # a clock that was set back does not put it before its parent
    forest.sandbox("ia", first, 11.5, "first")
    forest.sandbox("ib", young, 30, "ia", "young", "first")
    forest.sandbox("ic", second, 1, "second")
    assert shape(forest.tree()) == [
        ("first", None), ("old", "first"), ("ia", "first"), ("ib", "ia"), ("young", "first"), ("grandchild", "young"),
        ("second", None), ("ic", "second"),
    ]  # fmt: skip


def test_orphans_hang_on_the_nearest_ancestor_that_is_left(tmp_path: Path) -> None:
    forest = Forest(tmp_path)
    first = forest.template("first", 10)
    gone = forest.template("gone", 11, first)
    forest.template("orphan", 12, gone)
    forest.sandbox("ia", first, 13, "gone", "first")
    forest.sandbox("ib", first, 14, "ix", "gone")
    forest.repository.delete(gone.id)
    assert shape(forest.tree()) == [("first", None), ("ia", "first"), ("orphan", None), ("ib", None)]


def test_a_layer_is_counted_for_the_first_that_has_it(tmp_path: Path) -> None:
    forest = Forest(tmp_path)
    first = forest.template("first", 10)
    forest.sandbox("ia", first, 11, "first")
    forest.sandbox("ib", first, 12, "first")
    (tmp_path / "ib/d.lsmt").unlink()
    (tmp_path / "ib/d.lsmt").hardlink_to(tmp_path / "ia/d.lsmt")
    (first.directory / first.manifest.memory[0]).write_bytes(b"x" * 10_000)
    template, a, b = forest.tree()
    assert (template.kind, template.state) == (NodeKind.TEMPLATE, None)
    assert template.memory_bytes >= 10_000
    assert template.disk_bytes > 0
    assert a.disk_bytes >= 5000
    assert b.disk_bytes == 0
    (tmp_path / "ia/d.lsmt").unlink()  # while somebody looks: it is gone, and the tree is there
    _, a, b = forest.tree()
    assert (a.disk_bytes, b.disk_bytes >= 5000) == (0, True)
    (tmp_path / "ib/d.lsmt").unlink()
    _, a, b = forest.tree()
    assert (b.disk_bytes, b.resident_bytes, b.state) == (0, None, SandboxState.PAUSED)


def test_the_tree_of_a_node(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        source = await manager.create(BASE)
        write(manager, source.id, a="1")
        snapshot = await manager.snapshot(source.id, name="s")
        child = await manager.create(options(template="s"))
        (forked,) = await manager.fork(child.id, 1, 300)
        nodes = {node.id: node for node in await manager.tree()}
        assert {i: n.parent_id for i, n in nodes.items()} == {
            world.template.id: None, snapshot.id: world.template.id, source.id: snapshot.id, child.id: snapshot.id,
            forked.id: child.id,  # type: ignore[union-attr]
        }  # fmt: skip
        assert nodes[snapshot.id].kind is NodeKind.SNAPSHOT
        assert nodes[snapshot.id].names == ("s",)
        assert nodes[child.id].disk_bytes > 0
        await manager.delete_template("s")
        await manager.kill(child.id)
        nodes = {node.id: node for node in await manager.tree()}
        assert {i: n.parent_id for i, n in nodes.items()} == {
            world.template.id: None, source.id: world.template.id,
            forked.id: world.template.id,  # type: ignore[union-attr]
        }  # fmt: skip

    run(world, scenario)


def test_a_machine_that_has_just_died_does_not_hide_the_tree(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        dying, other = await manager.create(BASE), await manager.create(BASE)
        world.host.hold["regions"] = asyncio.Event()
        looking = asyncio.ensure_future(manager.tree())
        await world.host.until("regions")
        vm_of(manager, dying.id).die()
        world.host.hold.pop("regions").set()
        nodes = {node.id: node for node in await looking}
        assert set(nodes) == {world.template.id, dying.id, other.id}
        assert nodes[dying.id].resident_bytes is None

    run(world, scenario)


# Chains


def test_files_that_nobody_needs_go_and_no_others(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        for value in ("1", "2"):
            write(manager, info.id, a=value)
            await manager.snapshot(info.id)
        sandbox = manager._sandboxes[info.id]
        folder = world.home.sandboxes / info.id
        needed = world.files(info.id)
        for name in ("stray.lsmt", "stray.index", "stray.state", "x"):
            (folder / name).touch()
        (folder / ".under-way.lsmt").touch()
        world.machines.tidy(sandbox.record, sandbox.running, None)
        assert world.files(info.id) == needed | {".under-way.lsmt"}
        (folder / ".under-way.lsmt").unlink()
        # What the open disk has, a record that was changed since does not name any more.
        assert sandbox.running is not None
        kept = sandbox.record.disk
        sandbox.record.disk = [kept[0]]
        world.machines.tidy(sandbox.record, sandbox.running, None)
        assert world.files(info.id) == needed
        sandbox.record.disk = kept

    run(world, scenario)


def test_long_chains_are_merged_while_the_guest_runs(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        record = manager._sandboxes[info.id].record
        longest = 0
        for number in range(25):
            write(manager, info.id, **{f"k{number % 4}": str(number), "flips": str(number % 2)})
            await manager.snapshot(info.id, name=f"s{number % 2}")
            await settled(manager)
            longest = max(longest, len(record.memory), len(record.disk))
        assert longest <= 11
        expected = read(manager, info.id)
        await manager.pause(info.id)
        await settled(manager)
        await manager.connect(info.id, 300)
        assert read(manager, info.id) == expected
        assert read(manager, (await manager.create(options(template="s0"))).id) == expected

    run(world, scenario)


@pytest.mark.parametrize("meanwhile", ["rollback", "kill", "snapshot", "pause", "failure", "stop"])
def test_a_merge_and_what_happens_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(layers: list[Path], out: Path, *, below: bool) -> None:
        begun.set()
        await go_on.wait()
        if meanwhile == "failure":
            raise UnavailableError("no space")
        await doubles.compact(layers, out, below=below)

    async def scenario(manager: Manager) -> None:
        monkeypatch.setattr("aenv.sandbox.chains.compact", slow)
        info = await manager.create(BASE)
        for number in range(10):
            write(manager, info.id, a=str(number))
            await manager.snapshot(info.id, name=f"s{number}")
            if begun.is_set():
                break
        await asyncio.wait_for(begun.wait(), 10)
        expected = read(manager, info.id)
        if meanwhile == "rollback":
            await manager.rollback(info.id, "s2")
            expected = read(manager, info.id)
        elif meanwhile == "snapshot":
            write(manager, info.id, a="later")
            await manager.snapshot(info.id)
            expected = read(manager, info.id)
        elif meanwhile == "pause":
            await manager.pause(info.id)
        elif meanwhile == "kill":
            await manager.kill(info.id)
        elif meanwhile == "stop":
            await manager._life.chains.close()
        go_on.set()
        await settled(manager)
        if meanwhile == "kill":
            return
        await manager.connect(info.id, 300)
        assert read(manager, info.id) == expected
        await manager.pause(info.id)
        await settled(manager)
        await manager.connect(info.id, 300)
        assert read(manager, info.id) == expected

    run(world, scenario)
