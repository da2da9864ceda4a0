"""Disks and memory images, over a double of the block server and over the real one."""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from aenv._native.lsmt import Writer
from aenv.errors import AenvError, ConflictError, NotFoundError, UnavailableError
from aenv.snapshot.checkpoint import Checkpoint, index_of
from aenv.storage.blocks import Blocks
from aenv.storage.disks import Disks
from aenv.storage.memory import KEPT, MemoryImages
from tests.sandbox.doubles import FakeVm, Host
from tests.storage.templates import manifest

SIZE = 1 << 20
BLOCK = 4096


class Kit(ABC):
    """A block server and how to use what it shows. Numbers are written to blocks of the same number."""

    blocks: Blocks

    @abstractmethod
    def layer(self, path: Path, *numbers: int) -> None:
        """Make a sealed layer that holds these."""

    @abstractmethod
    def write(self, path: Path, number: int) -> None: ...

    @abstractmethod
    def read(self, path: Path) -> set[int]: ...

    @abstractmethod
    def use(self, path: Path) -> Callable[[], None]:
        """Have it open until the answer is called."""


class DoubleKit(Kit):
    def __init__(self, folder: Path) -> None:
        self.host = Host(folder / "host")
        self.blocks = cast(Blocks, self.host.blocks)

    def layer(self, path: Path, *numbers: int) -> None:
        path.write_text(json.dumps({str(number): "" for number in numbers}))

    def write(self, path: Path, number: int) -> None:
        self.host.blocks.images[path.name].write(str(number), "")

    def read(self, path: Path) -> set[int]:
        return {int(key) for key in self.host.blocks.images[path.name].read()}

    def use(self, path: Path) -> Callable[[], None]:
        class User:
            dead = False
            disk = self.host.blocks.images[path.name]
            files: set[Path] = set()  # noqa: RUF012

        self.host.alive[1] = (cast(FakeVm, User), cast(object, None))  # type: ignore[assignment]
        return lambda: cast(None, self.host.alive.pop(1))


class ServerKit(Kit):
    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def layer(self, path: Path, *numbers: int) -> None:
        with path.open("x+b") as file:
            writer = Writer(file.fileno(), SIZE)
            for number in sorted(numbers):
                writer.add(number * BLOCK, number.to_bytes(8, "little") * 512)
            writer.finish()

    def write(self, path: Path, number: int) -> None:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, number.to_bytes(8, "little") * 512, number * BLOCK)
        os.fsync(fd)
        os.close(fd)

    def read(self, path: Path) -> set[int]:
        with path.open("rb") as file:
            content = file.read()
        assert len(content) == SIZE
        heads = [int.from_bytes(content[at : at + 8], "little") for at in range(0, SIZE, BLOCK)]
        assert all(head in (0, number) for number, head in enumerate(heads))
        return {head for head in heads if head}

    def use(self, path: Path) -> Callable[[], None]:
        fd = os.open(path, os.O_RDONLY)
        return lambda: os.close(fd)


Scenario = Callable[[Kit, Path], Awaitable[None]]


@pytest.fixture(params=["double", pytest.param("server", marks=pytest.mark.root)])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario with an empty directory. At its end nothing is open."""

    @asynccontextmanager
    async def kit() -> AsyncIterator[Kit]:
        if request.param == "double":
            yield DoubleKit(tmp_path)
            return
        blocks = await Blocks.start(tmp_path / "server")
        try:
            yield ServerKit(blocks)
        finally:
            for image in await blocks.list_images():  # of a test that has failed
                await blocks.close_image(image["image"])
            await blocks.close(stop_server=True)

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            folder = tmp_path / "folder"
            folder.mkdir()
            async with kit() as made, asyncio.timeout(60):
                await scenario(made, folder)
                assert await made.blocks.list_images() == []

        asyncio.run(main())

    return run


def checkpoint(folder: Path, *disk: str) -> Checkpoint:
    return Checkpoint(folder, manifest("t").machine, disk, SIZE)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Disks


def test_a_disk_is_private_and_its_layers_stay(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        base = (folder / "base.lsmt").read_bytes()
        one, two = [await disks.open(checkpoint(folder, "base.lsmt")) for _ in range(2)]
        assert one.layers == ("base.lsmt",)
        assert names(folder) == {"base.lsmt"} | {
            path.name for disk in (one, two) for path in (folder / disk.upper, index_of(folder / disk.upper))
        }
        kit.write(one.path, 2)
        kit.write(two.path, 3)
        assert (kit.read(one.path), kit.read(two.path)) == ({1, 2}, {1, 3})
        await disks.close(one)
        await disks.close(one)
        await disks.discard(two)
        assert (folder / one.upper).exists()
        assert not (folder / two.upper).exists()
        assert (folder / "base.lsmt").read_bytes() == base

    check(scenario)


def test_each_restack_freezes_what_was_written(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        disk = await disks.open(checkpoint(folder, "base.lsmt"))
        frozen = []
        for number in (2, 3, 4):
            kit.write(disk.path, number)
            await disks.restack(disk)
            frozen.append(disk.layers)
        kit.write(disk.path, 5)
        assert kit.read(disk.path) == {1, 2, 3, 4, 5}
        await disks.seal(folder, disk.layers)
        assert {path.stem for path in folder.glob("*.index")} == {Path(disk.upper).stem}
        for layers, content in zip(frozen, ({1, 2}, {1, 2, 3}, {1, 2, 3, 4}), strict=True):
            other = await disks.open(checkpoint(folder, *layers))
            assert kit.read(other.path) == content
            await disks.discard(other)
        await disks.seal(folder, disk.layers)  # nothing to do
        await disks.close(disk)

    check(scenario)


def test_a_frozen_layer_is_of_use_at_once_under_another_name(check: Callable[[Scenario], None]) -> None:
    """A fork links it to its children, who do not wait until it is on the disk."""

    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        source, child = folder / "source", folder / "child"
        source.mkdir()
        child.mkdir()
        kit.layer(source / "base.lsmt", 1)
        disk = await disks.open(checkpoint(source, "base.lsmt"))
        kit.write(disk.path, 2)
        await disks.restack(disk)
        linked = checkpoint(source, *disk.layers).link_into(child)
        assert set(disk.layers) <= names(child) <= {*disk.layers, index_of(child / disk.layers[-1]).name}
        other = await disks.open(linked)
        kit.write(other.path, 3)
        assert kit.read(other.path) == {1, 2, 3}
        await disks.discard(disk)
        assert kit.read(other.path) == {1, 2, 3}
        await disks.close(other)
        again = await disks.open(checkpoint(child, *other.layers, other.upper))
        assert kit.read(again.path) == {1, 2, 3}
        await disks.discard(again)

    check(scenario)


def test_the_last_layer_of_a_closed_disk_is_sealed_when_it_is_needed(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        disk = await disks.open(checkpoint(folder, "base.lsmt"))
        kit.write(disk.path, 2)
        with pytest.raises(ConflictError):
            await disks.seal(folder, [disk.upper])  # somebody writes to it
        await disks.close(disk)
        again = await disks.open(checkpoint(folder, "base.lsmt", disk.upper))
        assert kit.read(again.path) == {1, 2}
        await disks.seal(folder, again.layers)
        assert not index_of(folder / disk.upper).exists()
        assert kit.read(again.path) == {1, 2}
        await disks.discard(again)

    check(scenario)


def test_a_layer_that_somebody_writes_to_is_not_opened(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        disk = await disks.open(checkpoint(folder, "base.lsmt"))
        with pytest.raises(ConflictError):
            await disks.open(checkpoint(folder, "base.lsmt", disk.upper))
        assert names(folder) == {"base.lsmt", disk.upper, index_of(folder / disk.upper).name}
        await disks.discard(disk)

    check(scenario)


def test_what_cannot_be_opened_leaves_nothing(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        for layers in (("missing.lsmt",), ("base.lsmt", "missing.lsmt")):
            with pytest.raises((AenvError, FileNotFoundError)):
                await disks.open(checkpoint(folder, *layers))
            assert names(folder) == {"base.lsmt"}

    check(scenario)


def test_another_daemon_finds_the_disk_as_it_is(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        disk = await disks.open(checkpoint(folder, "base.lsmt"))
        await disks.restack(disk)
        assert await Disks(kit.blocks).find(disk.image, folder) == disk
        with pytest.raises(NotFoundError):
            await disks.find("nobody", folder)
        await disks.close(disk)
        with pytest.raises(NotFoundError):
            await disks.find(disk.image, folder)

    check(scenario)


def test_a_sweep_closes_what_nobody_names_or_uses(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        images = MemoryImages(kit.blocks, folder / "images")
        await images.start()
        kit.layer(folder / "base.lsmt", 1)
        kept, used, swept = [await disks.open(checkpoint(folder, "base.lsmt")) for _ in range(3)]
        image = await images.open([folder / "base.lsmt"])
        let_go = kit.use(used.path)
        await disks.sweep({kept.image})
        shown = {found["image"] for found in await kit.blocks.list_images()}
        assert shown == {kept.image, used.image, image.name}
        let_go()
        await disks.sweep(set())
        with pytest.raises(NotFoundError):
            await disks.find(swept.image, folder)
        await images.close()

    check(scenario)


def test_a_disk_in_use_is_not_closed_and_loses_nothing(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        disks = Disks(kit.blocks)
        kit.layer(folder / "base.lsmt", 1)
        disk = await disks.open(checkpoint(folder, "base.lsmt"))
        kit.write(disk.path, 2)
        let_go = kit.use(disk.path)
        for attempt in (disks.close, disks.discard):
            with pytest.raises(ConflictError):
                await attempt(disk)
        let_go()
        assert kit.read(disk.path) == {1, 2}
        await disks.discard(disk)
        assert names(folder) == {"base.lsmt"}

    check(scenario)


# Memory images


def test_the_same_layers_are_one_image(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        images = MemoryImages(kit.blocks, folder / "images")
        await images.start()
        kit.layer(folder / "m1.lsmt", 1, 2)
        kit.layer(folder / "m2.lsmt", 3)
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere/other.lsmt").hardlink_to(folder / "m1.lsmt")
        opened = await asyncio.gather(
            images.open([folder / "m1.lsmt"]), images.open([folder / "elsewhere/other.lsmt"]),
            images.open([folder / "m1.lsmt", folder / "m2.lsmt"]),
        )  # fmt: skip
        assert opened[0] == opened[1] != opened[2]
        assert [kit.read(path) for path in opened] == [{1, 2}, {1, 2}, {1, 2, 3}]
        for path in (folder / "m1.lsmt", folder / "elsewhere/other.lsmt"):
            path.unlink()
        assert kit.read(opened[0]) == {1, 2}  # it has a link of its own
        assert len(names(folder / "images")) == 2
        await images.close()
        assert names(folder / "images") == set()

    check(scenario)


def test_the_next_daemon_takes_over_what_is_open(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        images = MemoryImages(kit.blocks, folder / "images")
        await images.start()
        kit.layer(folder / "m1.lsmt", 1)
        path = await images.open([folder / "m1.lsmt"])
        (folder / "images/memory-of-a-dead-server").mkdir()
        again = MemoryImages(kit.blocks, folder / "images")
        await again.start()
        assert names(folder / "images") == {path.name}
        assert await again.open([folder / "m1.lsmt"]) == path
        assert kit.read(path) == {1}
        await again.close()

    check(scenario)


def test_an_image_that_cannot_be_opened_leaves_nothing(check: Callable[[Scenario], None]) -> None:
    async def scenario(kit: Kit, folder: Path) -> None:
        images = MemoryImages(kit.blocks, folder / "images")
        await images.start()
        kit.layer(folder / "m1.lsmt", 1)
        (folder / "broken.lsmt").write_bytes(b"{")
        with pytest.raises((AenvError, ValueError)):
            await images.open([folder / "m1.lsmt", folder / "broken.lsmt"])
        with pytest.raises((AenvError, FileNotFoundError)):
            await images.open([folder / "missing.lsmt"])
        assert names(folder / "images") == set()
        assert kit.read(await images.open([folder / "m1.lsmt"])) == {1}
        await images.close()

    check(scenario)


def test_images_that_nobody_used_for_long_are_closed_and_those_in_use_are_not(
    check: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KEPT >= 16
    monkeypatch.setattr("aenv.storage.memory.KEPT", 2)

    async def scenario(kit: Kit, folder: Path) -> None:
        images = MemoryImages(kit.blocks, folder / "images")
        await images.start()
        layers = [folder / f"m{number}.lsmt" for number in range(1, 6)]
        for number, layer in enumerate(layers, 1):
            kit.layer(layer, number)
        used = await images.open([layers[0]])
        let_go = kit.use(used)
        paths = [await images.open([layer]) for layer in layers]
        assert names(folder / "images") == {path.name for path in (used, *paths[-2:])}
        assert {found["image"] for found in await kit.blocks.list_images()} == names(folder / "images")
        let_go()
        assert kit.read(await images.open([layers[1]])) == {2}
        assert len(names(folder / "images")) == 2
        await images.close()

    check(scenario)


def test_an_image_that_the_server_lost_is_not_a_reason_to_fail(tmp_path: Path) -> None:
    """Only the double can lose one."""

    async def main() -> None:
        kit = DoubleKit(tmp_path)
        images = MemoryImages(kit.blocks, tmp_path / "images")
        await images.start()
        kit.layer(tmp_path / "m1.lsmt", 1)
        path = await images.open([tmp_path / "m1.lsmt"])
        kit.host.fail["close image"] = UnavailableError("no")
        await images.close()
        assert names(tmp_path / "images") == {path.name}
        kit.host.fail.clear()
        del kit.host.blocks.images[path.name]
        await images.close()

    asyncio.run(main())
