from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.errors import ConflictError, InvalidInputError, NotFoundError
from aenv.naming import split_name
from aenv.snapshot.manifest import SnapshotKind
from aenv.storage.repository import NAMES_FILE, Repository
from tests.storage.templates import committed, manifest, snapshot_of, staged

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "templates").mkdir()
    return tmp_path


@pytest.fixture
def repository(folder: Path) -> Repository:
    return Repository(folder / "templates")


def again(repository: Repository) -> Repository:
    """Another process's view."""
    return Repository(repository._directory)


def test_a_template_is_found_by_id_and_by_its_names(repository: Repository, folder: Path) -> None:
    template = committed(repository, folder, "base", "base:v1", "team/tools:default")
    for text in (template.id, "base", "base:default", "base:v1", "team/tools", "team/tools:default"):
        assert again(repository).find(text) == template
    assert template.names == ("base", "base:v1", "team/tools")
    assert template.title == "base"
    checkpoint = template.checkpoint
    assert checkpoint.files == {"state", *template.manifest.memory, *template.manifest.disk.layers}
    files = [*checkpoint.memory_layers, *checkpoint.disk_layers, checkpoint.state_file]
    assert [path.read_bytes() for path in files if path is not None] == [b"{}"] * 3
    assert template.disk_size == checkpoint.disk_size == 1 << 20
    with pytest.raises(NotFoundError):
        repository.find("base:v2")


def test_a_name_moves_to_the_newer_template_and_the_old_one_stays(repository: Repository, folder: Path) -> None:
    old = committed(repository, folder, "base", created=1.0)
    new = committed(repository, folder, "base", created=2.0)
    assert repository.find("base").id == new.id
    assert repository.find(old.id).names == ()
    assert repository.find(old.id).title == old.id
    assert [t.id for t in again(repository).templates()] == [old.id, new.id]


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "../etc", "a/../b", "/etc", "a:", ":a", "a:b:c", "a b", "a\n", "a\0", "ä", "-x", "a" * 129, "a:-"],
)
def test_what_cannot_be_a_name_is_refused(repository: Repository, folder: Path, text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        split_name(text)
    assert caught.value.field == "template"
    with pytest.raises(InvalidInputError):
        repository.find(text)
    source = staged(folder)
    with pytest.raises(InvalidInputError):
        repository.commit(source, ["good", text])
    assert source.exists()
    assert repository.templates() == []


def test_commit_takes_only_a_whole_template(repository: Repository, folder: Path) -> None:
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(NotFoundError):
        repository.commit(empty)
    with pytest.raises(InvalidInputError, match=r"manifest\.id"):
        repository.commit(staged(folder, identity="UPPER"))
    assert again(repository).templates() == []


def test_an_id_is_taken_once(repository: Repository, folder: Path) -> None:
    committed(repository, folder, "first", identity="t1")
    for names in ((), ("first",)):
        with pytest.raises(ConflictError):
            repository.commit(staged(folder, identity="t1"), names)
    # A directory that appears between the check and the move is not overwritten either.
    (folder / "templates/t2").mkdir()
    (folder / "templates/t2/layer").touch()
    with pytest.raises(ConflictError):
        repository.commit(staged(folder, identity="t2"))


def test_delete_forgets_names_and_files_and_is_final(repository: Repository, folder: Path) -> None:
    template = committed(repository, folder, "base", "base:v1")
    other = committed(repository, folder, "other")
    observer = again(repository)
    observer.find("base")
    repository.delete(template.id)
    for view in (repository, observer):
        for text in ("base", "base:v1", template.id):
            with pytest.raises(NotFoundError):
                view.find(text)
        assert view.templates() == [other]
    assert not template.directory.exists()
    with pytest.raises(NotFoundError):
        repository.delete(template.id)


def test_what_a_killed_delete_left_is_removed_by_the_next(repository: Repository, folder: Path) -> None:
    half = folder / "templates/.deleted-tdead"
    half.mkdir()
    (half / "layer").touch()
    assert repository.templates() == []
    repository.delete(committed(repository, folder).id)
    assert not half.exists()


def test_a_template_that_vanishes_during_a_listing_is_not_listed(
    repository: Repository, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, vanishing = committed(repository, folder), committed(repository, folder)
    view = again(repository)
    load = type(vanishing.manifest).load

    def load_after_delete(directory: Path):  # type: ignore[no-untyped-def]
        if directory == vanishing.directory:
            shutil.rmtree(directory)
        return load(directory)

    monkeypatch.setattr("aenv.storage.repository.Manifest.load", load_after_delete)
    assert [t.id for t in view.templates()] == [kept.id]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"", "manifest"),
        (b"{", "manifest"),
        (b"\xff\xfe", "manifest"),
        (b"[" * 100_000, "manifest"),
        (b"x" * (2 << 20), "manifest"),
        (b'{"id": 5}', "manifest.id"),
    ],
)
def test_a_damaged_manifest_is_refused_and_named(repository: Repository, folder: Path, text: bytes, field: str) -> None:
    template = committed(repository, folder, "base")
    (template.directory / "manifest.json").write_bytes(text)
    with pytest.raises(InvalidInputError) as caught:
        again(repository).find("base")
    assert caught.value.field == field
    assert template.id in str(caught.value)


def test_a_manifest_of_another_template_is_refused(repository: Repository, folder: Path) -> None:
    template = committed(repository, folder, "base")
    manifest("another").save(template.directory)
    with pytest.raises(InvalidInputError, match=r"manifest\.id.*another"):
        again(repository).find("base")


def test_a_damaged_template_does_not_hide_the_others(
    repository: Repository, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, whole = committed(repository, folder, "damaged"), committed(repository, folder, "whole")
    (damaged.directory / "manifest.json").write_text("{}")
    assert [t.id for t in again(repository).templates()] == [whole.id]
    assert f"template {damaged.id} is left out: manifest" in caplog.text


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"base": 5}', b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_damaged_names_are_refused_and_never_written_over(repository: Repository, folder: Path, text: bytes) -> None:
    template = committed(repository, folder, "base")
    names = folder / "templates" / NAMES_FILE
    names.write_bytes(text)
    for attempt in (
        lambda: repository.find("base"),
        repository.templates,
        lambda: repository.delete(template.id),
        lambda: repository.commit(staged(folder), ["new"]),
    ):
        with pytest.raises(InvalidInputError) as caught:
            attempt()  # type: ignore[operator]
        assert NAMES_FILE in caught.value.field
    assert names.read_bytes() == text
    assert template.directory.exists()
    assert len([p for p in (folder / "templates").iterdir() if p.is_dir()]) == 1


@pytest.mark.parametrize("target", ["../../etc", "/etc", ".", "gone", "UPPER"])
def test_names_lead_nowhere_else(repository: Repository, folder: Path, target: str) -> None:
    (folder / "templates" / NAMES_FILE).write_text(f'{{"base": "{target}"}}')
    with pytest.raises(NotFoundError):
        repository.find("base")


def test_snapshots_lie_beside_templates_and_take_no_names_from_them(repository: Repository, folder: Path) -> None:
    base = committed(repository, folder, "base", created=1.0)
    first = committed(repository, folder, "mine", created=2.0, **snapshot_of(base))
    assert first.kind is SnapshotKind.SNAPSHOT
    assert again(repository).find("mine") == first
    repository.check_snapshot_name("mine")
    for name in ("base", "base:default"):
        with pytest.raises(ConflictError, match="template"):
            repository.check_snapshot_name(name)
        source = staged(folder, **snapshot_of(base))
        with pytest.raises(ConflictError, match="template"):
            repository.commit(source, ["free", name])
        assert source.exists()
    with pytest.raises(NotFoundError):
        repository.find("free")
    second = committed(repository, folder, "mine", created=3.0, **snapshot_of(first))
    assert (repository.find("mine").id, repository.find(first.id).names) == (second.id, ())
    template = committed(repository, folder, "mine", created=4.0)  # a template may take it
    assert repository.find("mine").id == template.id
    repository.delete(template.id)
    repository.check_snapshot_name("mine")
    (folder / "templates" / NAMES_FILE).write_text('{"nowhere": "tgone"}')
    repository.check_snapshot_name("nowhere")
    with pytest.raises(InvalidInputError):
        repository.check_snapshot_name("../x")


def test_deleting_a_snapshot_leaves_the_layers_of_others(repository: Repository, folder: Path) -> None:
    base = committed(repository, folder)
    source = folder / "descendant"
    source.mkdir()
    base.checkpoint.link_into(source)
    made = manifest("tsnap", **snapshot_of(base, memory=[*base.manifest.memory, "m2.lsmt"], disk=base.manifest.disk))
    (source / "m2.lsmt").write_bytes(b"m2")
    made.save(source)
    snapshot = repository.commit(source)
    repository.delete(base.id)
    assert [path.read_bytes() for path in snapshot.checkpoint.memory_layers] == [b"{}", b"m2"]


WORKER = """
import sys
from pathlib import Path
from aenv.storage.repository import Repository
from tests.storage.templates import committed

folder, who = Path(sys.argv[1]), sys.argv[2]
repository = Repository(folder / "templates")
for number in range(int(sys.argv[3])):
    committed(repository, folder / who, f"{who}-{number}", "shared")
    print(number, flush=True)
"""


def worker(folder: Path, who: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), who, str(count)], cwd=ROOT, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_two_processes_lose_no_name(repository: Repository, folder: Path) -> None:
    workers = [worker(folder, who, 15) for who in ("a", "b")]
    for process in workers:
        process.communicate(timeout=60)
        assert process.returncode == 0
    for who in ("a", "b"):
        for number in range(15):
            repository.find(f"{who}-{number}")
    assert len(repository.templates()) == 30
    assert "shared" in repository.find("shared").names


def test_kill_9_leaves_whole_templates_and_whole_names(repository: Repository, folder: Path) -> None:
    with worker(folder, "a", 10_000) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        done = 5 + len(process.stdout.read().split())
    assert done <= len(repository.templates()) <= done + 1
    for number in range(done):
        repository.find(f"a-{number}")
    committed(repository, folder, "after")  # and no lock is left
    assert repository.find("after")
