"""Checkpoints: files in one directory, shared with others by links."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv.snapshot.checkpoint import Checkpoint
from aenv.vmm.base import Machine

SIZE = 1 << 20


def full(folder: Path) -> Checkpoint:
    folder.mkdir()
    shape = Machine(1, 128, Path("/k"), Path("/i"), "")
    made = Checkpoint(folder, shape, ("d1.lsmt", "d2.lsmt"), SIZE, ("m1.lsmt",), "a.state")
    for name in made.files:
        (folder / name).write_text(name)
    (folder / "d2.index").touch()
    (folder / "manifest.json").touch()
    return made


def test_a_checkpoint_is_linked_not_copied(tmp_path: Path) -> None:
    source, target = full(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    linked = source.link_into(target)
    assert linked == Checkpoint(target, source.machine, source.disk, SIZE, source.memory, source.state)
    assert source.files == {"d1.lsmt", "d2.lsmt", "m1.lsmt", "a.state"}
    # With the index of the layer that is not sealed yet.
    assert {path.name for path in target.iterdir()} == source.files | {"d2.index"}
    for name in source.files:
        assert (target / name).samefile(tmp_path / "source" / name)
    assert source.link_into(target) == linked  # again: all is there
    assert [p.parent for p in (*linked.disk_layers, *linked.memory_layers)] == [target] * 3
    assert linked.state_file == target / "a.state"


def test_another_file_of_the_same_name_is_not_taken_for_a_link(tmp_path: Path) -> None:
    source, target = full(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (target / "m1.lsmt").write_text("another")
    with pytest.raises(FileExistsError):
        source.link_into(target)
    assert (target / "m1.lsmt").read_text() == "another"


def test_a_checkpoint_that_lacks_a_file_cannot_be_linked(tmp_path: Path) -> None:
    source, target = full(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (tmp_path / "source/d1.lsmt").unlink()
    with pytest.raises(FileNotFoundError):
        source.link_into(target)
