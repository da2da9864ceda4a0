"""Disks of sandboxes: a stack of sealed layers and one writable layer, shown to a VMM by the block server.

All layers of a disk are files (links) in one directory, the sandbox's. A writable layer `ID.lsmt` has `ID.index` beside
it until it is sealed, in place; so whoever finds an index file knows that the seal is still to be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import AenvError, NotFoundError
from aenv.snapshot.checkpoint import LAYER_SUFFIX, Checkpoint, index_of, new_layer_id
from aenv.storage.blocks import Blocks


@dataclass(slots=True)
class OpenDisk:
    """A disk that the block server shows at `path`. `layers` (sealed or being sealed, lowest first) and `upper`, which
    takes the writes, are names of files in `folder`."""

    image: str
    path: Path
    folder: Path
    layers: tuple[str, ...]
    upper: str


class Disks:
    """Opens, restacks and closes disks. Methods raise the errors of `Blocks`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    async def open(self, checkpoint: Checkpoint) -> OpenDisk:
        """A private, writable disk over the checkpoint's layers, with an empty layer of its own in the same directory.
        Layers below need not be sealed yet: the server knows by their index file that they are not."""
        image = new_layer_id()
        upper = f"{image}{LAYER_SUFFIX}"
        data = checkpoint.directory / upper
        await self._blocks.create(data, index_of(data), checkpoint.disk_size)
        try:
            shown = await self._blocks.open(image, checkpoint.disk_layers, data=data, index=index_of(data))
        except BaseException:
            _remove(data)
            raise
        return OpenDisk(image, Path(shown["path"]), checkpoint.directory, checkpoint.disk, upper)

    async def find(self, image: str, folder: Path) -> OpenDisk:
        """A disk that an earlier daemon opened. Raises NotFoundError when the block server does not show it."""
        for shown in await self._blocks.list_images():
            if shown["image"] == image and shown["data"] is not None:
                layers = tuple(Path(path).name for path in shown["layers"])
                return OpenDisk(image, Path(shown["path"]), folder, layers, Path(shown["data"]).name)
        raise NotFoundError(f"disk {image} is not open")

    async def restack(self, disk: OpenDisk) -> None:
        """Seal the writable layer of a live disk and put an empty one on top. Not durable before `seal` has returned.

        The disk is usable and described rightly whether this succeeds or fails.
        """
        upper = f"{new_layer_id()}{LAYER_SUFFIX}"
        data = disk.folder / upper
        await self._blocks.restack(disk.image, data, index_of(data))
        disk.layers, disk.upper = (*disk.layers, disk.upper), upper

    async def replace(self, disk: OpenDisk, layers: Sequence[str]) -> None:
        """Have a live disk use other layers of the same content in its folder; the old ones are of no use then."""
        await self._blocks.replace(disk.image, [disk.folder / name for name in layers])
        disk.layers = tuple(layers)

    async def seal(self, folder: Path, layers: Sequence[str]) -> None:
        """Make the layers durable and sealed; nothing to do for those that are."""
        for name in layers:
            data = folder / name
            if index_of(data).exists():
                await self._blocks.seal(data, index_of(data))

    async def close(self, disk: OpenDisk) -> None:
        """Stop showing a disk whose VMM has ended; all layers stay. Nothing to do when it is closed."""
        try:
            await self._blocks.close_image(disk.image)
        except NotFoundError:
            return  # closed by an attempt before this one

    async def discard(self, disk: OpenDisk) -> None:
        """Close a disk and remove what was written to it."""
        await self.close(disk)
        await asyncio.to_thread(_remove, disk.folder / disk.upper)

    async def sweep(self, keep: set[str]) -> None:
        """Close all disks but those named: their daemon is dead and their machines have ended."""
        for shown in await self._blocks.list_images():
            if shown["data"] is not None and shown["image"] not in keep:
                try:
                    await self._blocks.close_image(shown["image"])
                except AenvError:
                    continue  # somebody still has it open: the next start tries again


def _remove(data: Path) -> None:
    for path in (index_of(data), data):  # a layer without an index file would count as sealed
        path.unlink(missing_ok=True)
