"""Memory images: read-only files that the block server shows, mapped by all machines of one origin.

An image is named after the files it consists of, which it has links to for as long as it is open. So the same layers
give the same image, also to the next daemon, and its pages are in the page cache once, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from aenv.errors import AenvError, ConflictError, NotFoundError
from aenv.snapshot.checkpoint import LAYER_SUFFIX
from aenv.storage.blocks import Blocks

PREFIX = "memory-"
KEPT = 32  # images that stay open though nobody may use them


class MemoryImages:
    """Opens images when they are asked for and closes those that were not for long. `directory` holds the links."""

    def __init__(self, blocks: Blocks, directory: Path) -> None:
        self._blocks = blocks
        self._directory = directory
        self._open: OrderedDict[str, Path] = OrderedDict()  # last used last
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Take over the images that an earlier daemon opened."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        shown = {i["image"]: Path(i["path"]) for i in await self._blocks.list_images() if i["image"].startswith(PREFIX)}
        self._open.update(shown)
        for folder in self._directory.iterdir():
            if folder.name not in shown:
                shutil.rmtree(folder, ignore_errors=True)

    async def open(self, layers: Sequence[Path]) -> Path:
        """The file to map: the stack of these sealed layers, lowest first."""
        name = _name(layers)
        async with self._lock:
            if name not in self._open:
                self._open[name] = await self._show(name, layers)
                await self._trim()
            self._open.move_to_end(name)
            return self._open[name]

    async def _show(self, name: str, layers: Sequence[Path]) -> Path:
        folder = self._directory / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            links = [folder / f"{number:03}{LAYER_SUFFIX}" for number in range(len(layers))]
            for link, layer in zip(links, layers, strict=True):
                os.link(layer, link)
            shown = await self._blocks.open(name, links, cached=True, mode=0o400)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Path(shown["path"])

    async def _trim(self) -> None:
        """Close the images used longest ago that no machine maps any more."""
        for name in list(self._open)[:-KEPT]:
            try:
                await self._blocks.close_image(name)
            except ConflictError:
                continue  # a machine maps it
            except NotFoundError:
                pass  # it is closed, which is what is wanted
            del self._open[name]
            shutil.rmtree(self._directory / name, ignore_errors=True)

    async def close(self) -> None:
        """Close all that no machine maps."""
        async with self._lock:
            for name in list(self._open):
                try:
                    await self._blocks.close_image(name)
                except AenvError:
                    continue
                del self._open[name]
                shutil.rmtree(self._directory / name, ignore_errors=True)


def _name(layers: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for layer in layers:
        status = layer.stat()
        digest.update(f"{status.st_dev}:{status.st_ino};".encode())
    return PREFIX + digest.hexdigest()[:24]
