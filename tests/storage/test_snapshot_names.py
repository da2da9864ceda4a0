"""Names that a snapshot may not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv.errors import ConflictError, InvalidInputError
from aenv.snapshot.manifest import SnapshotKind
from aenv.storage.repository import Repository
from tests.storage.templates import committed, snapshot_of, staged


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "templates").mkdir()
    return Repository(tmp_path / "templates")


@pytest.mark.parametrize("tag", ["", ":default"])
def test_what_belongs_to_others_is_refused_and_nothing_changes(
    repository: Repository, tmp_path: Path, tag: str
) -> None:
    base = committed(repository, tmp_path, "base", "base:v1")
    other = committed(repository, tmp_path, "ready", **snapshot_of(base))
    for name in (f"base{tag}", "base:v1", f"{base.id}{tag}", f"{other.id}{tag}"):
        with pytest.raises(ConflictError):
            repository.check_snapshot_name(name)
        with pytest.raises(ConflictError):
            repository.commit(staged(tmp_path, **snapshot_of(base)), ["free", name])
        assert {t.id for t in repository.templates()} == {base.id, other.id}
    assert repository.find(base.id).kind is SnapshotKind.TEMPLATE
    assert repository.find(other.id).names == ("ready",)


def test_a_template_does_not_take_an_id_either(repository: Repository, tmp_path: Path) -> None:
    base = committed(repository, tmp_path, "base")
    with pytest.raises(ConflictError):
        committed(repository, tmp_path, base.id)


def test_names_of_snapshots_and_new_ones_are_free(repository: Repository, tmp_path: Path) -> None:
    base = committed(repository, tmp_path, "base")
    committed(repository, tmp_path, "ready", **snapshot_of(base))
    for name in ("ready", "base:v2", "ns/base", "another"):
        repository.check_snapshot_name(name)
    with pytest.raises(InvalidInputError):
        repository.check_snapshot_name("a b")
