"""A double of the block server. Layers are files that hold a JSON object: what was written, by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aenv.errors import ConflictError, InvalidInputError, NotFoundError
from aenv.snapshot.checkpoint import INDEX_SUFFIX

if TYPE_CHECKING:
    from tests.sandbox.doubles import FakeVm, Host

Content = dict[str, str]
UNSEALED = "(writable)"  # a key in a layer that is not sealed


def content_of(path: Path) -> Content:
    return cast(Content, json.loads(path.read_bytes()))


def merged(layers: Sequence[Content]) -> Content:
    return {key: value for layer in layers for key, value in layer.items() if key != UNSEALED}


@dataclass
class FakeImage:
    """Layers are read when the image is opened: an open file needs no name."""

    name: str
    path: Path
    layers: list[Path]
    below: list[Content]
    data: Path | None
    index: Path | None
    upper: Content

    def read(self) -> Content:
        return merged([*self.below, self.upper])

    def write(self, key: str, value: str) -> None:
        assert self.data is not None
        self.upper[key] = value
        if self.data.exists():
            self.data.write_text(json.dumps({UNSEALED: "", **self.upper}))


class FakeBlocks:
    """The methods of `Blocks` that are used. It outlives daemons."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        self.directory = directory
        self.images: dict[str, FakeImage] = {}
        self.frozen: dict[int, Path] = {}  # layers that are being sealed: inode and index file
        directory.mkdir()

    async def create(self, data: Path, index: Path, size: int) -> str:
        await self.host.step("create layer")
        self._make(data, index)
        return "uuid"

    def _make(self, data: Path, index: Path) -> None:
        for path in (data, index):
            if path.exists():
                raise ConflictError(f"{path} exists")
        data.write_text(json.dumps({UNSEALED: ""}))
        index.touch()

    async def open(
        self,
        image: str,
        layers: Sequence[Path],
        *,
        data: Path | None = None,
        index: Path | None = None,
        cached: bool = False,
        mode: int = 0o600,
    ) -> dict[str, Any]:
        await self.host.step("open image")
        if image in self.images:
            raise ConflictError(f"{image} is open already")
        for layer in layers:
            if any(
                shown.data is not None and shown.data.exists() and shown.data.samefile(layer)
                for shown in self.images.values()
            ):
                raise ConflictError(f"{layer} is the writable layer of an open image")
            beside = layer.with_suffix(INDEX_SUFFIX)
            if UNSEALED in content_of(layer) and layer.stat().st_ino not in self.frozen and not beside.exists():
                raise InvalidInputError("layers", f"{layer} is not sealed")
        path = self.directory / image
        found = FakeImage(image, path, list(layers), [content_of(layer) for layer in layers], data, index, {})
        path.write_text(json.dumps(found.read()))
        self.images[image] = found
        return self._describe(found)

    async def close_image(self, image: str) -> None:
        await self.host.step("close image")
        found = self._find(image)
        if self._users(found):
            raise ConflictError(f"{image} is in use")
        for layer in found.layers:  # what is under way in the background is finished
            if layer.exists() and (index := self.frozen.get(layer.stat().st_ino)) is not None:
                self._seal(layer, index)
        del self.images[image]
        found.path.unlink()

    async def restack(self, image: str, data: Path, index: Path) -> Path:
        await self.host.step("restack")
        found = self._find(image)
        assert found.data is not None
        assert found.index is not None
        self._make(data, index)
        self.frozen[found.data.stat().st_ino] = found.index
        sealed = found.data
        found.layers.append(found.data)
        found.below.append(found.upper)
        found.data, found.index, found.upper = data, index, {}
        return sealed

    async def replace(self, image: str, layers: Sequence[Path]) -> None:
        await self.host.step("replace")
        found = self._find(image)
        before = merged(found.below)
        found.layers, found.below = list(layers), [content_of(layer) for layer in layers]
        assert merged(found.below) == before, "a merged layer has another content"

    async def seal(self, data: Path, index: Path) -> None:
        await self.host.step("seal")
        if any(image.data == data for image in self.images.values()):
            raise ConflictError(f"{data} is the writable layer of an open image")
        if not data.exists():
            raise NotFoundError(f"{data} does not exist")
        self._seal(data, index)

    def _seal(self, data: Path, index: Path) -> None:
        data.write_text(json.dumps(merged([content_of(data)])))
        self.frozen.pop(data.stat().st_ino, None)
        index.unlink(missing_ok=True)

    async def list_images(self) -> list[dict[str, Any]]:
        return [self._describe(image) for image in self.images.values()]

    def _find(self, image: str) -> FakeImage:
        if image not in self.images:
            raise NotFoundError(f"{image} is not open")
        return self.images[image]

    def _users(self, image: FakeImage) -> list[FakeVm]:
        vms = [vm for vm, _ in self.host.alive.values() if not vm.dead]
        return [vm for vm in vms if vm.disk is image or image.path in vm.files]

    def _describe(self, image: FakeImage) -> dict[str, Any]:
        return {
            "image": image.name,
            "path": str(image.path),
            "layers": [str(layer) for layer in image.layers],
            "data": None if image.data is None else str(image.data),
            "index": None if image.index is None else str(image.index),
            "opens": len(self._users(image)),
        }
