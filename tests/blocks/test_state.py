"""The state of a server on disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ublk.state import BOOT_ID, ImageState, SealState, StateFolder


def image(name: str, ino: int = 0) -> ImageState:
    return ImageState(
        image=name, layers=["/base"], data="/d", index="/i", cached=False, uid=1, gid=2, mode=0o600, ino=ino
    )


def test_what_was_saved_is_found_in_the_order_of_inodes(tmp_path: Path) -> None:
    states = StateFolder(tmp_path / "state")
    names = ["a", "x" * 255, "ü" * 127, "a/b", "..", "A"]
    for ino, name in enumerate(names):
        states.save_image(image(name, ino=len(names) - ino))
    states.save_seal(SealState(data="/a", index="/b"))
    states.save_seal(SealState(data="/a", index="/c"))
    again = StateFolder(tmp_path / "state")
    assert [state.image for state in again.images()] == names[::-1]
    assert again.images()[0] == image("A", ino=1)
    assert again.seals() == [SealState(data="/a", index="/c")]
    for name in [*names, "never"]:
        again.remove_image(name)
    again.remove_seal("/a")
    assert (states.images(), states.seals()) == ([], [])
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["boot"]


def test_fields_of_a_newer_server_are_ignored_and_those_of_an_older_one_have_defaults(tmp_path: Path) -> None:
    states = StateFolder(tmp_path / "state")
    fields = msgspec.to_builtins(image("a"))
    path = tmp_path / "state/image-1.json"
    path.write_bytes(msgspec.json.encode(fields | {"later": [1]}))
    assert states.images() == [image("a")]
    for name in ("ino", "made_at", "front_end", "device"):
        del fields[name]
    path.write_bytes(msgspec.json.encode(fields))
    assert states.images() == [image("a")]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"image": 5}', b'{"image": "a"}'])
def test_damaged_files_are_ignored(tmp_path: Path, content: bytes) -> None:
    states = StateFolder(tmp_path / "state")
    states.save_image(image("good"))
    (tmp_path / "state/image-1.json").write_bytes(content)
    (tmp_path / "state/seal-1.json").write_bytes(content)
    assert [state.image for state in states.images()] == ["good"]
    assert states.seals() == []


@pytest.mark.parametrize("marker", [None, "another boot", ""])
def test_state_of_another_boot_is_removed(tmp_path: Path, marker: str | None) -> None:
    states = StateFolder(tmp_path / "state")
    states.save_image(image("old"))
    states.fuse_record.write_bytes(b"x")
    boot = tmp_path / "state/boot"
    assert boot.read_text() == BOOT_ID.read_text().strip()
    boot.unlink()
    if marker is not None:
        boot.write_text(marker)
    assert StateFolder(tmp_path / "state").images() == []
    assert not states.fuse_record.exists()
