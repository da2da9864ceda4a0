"""The images a server holds: shared stacks, writable layers, and layers that are being sealed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from aenv._native.lsmt import Image, Layer, Sealing, Stack, create_writable
from aenv.errors import AenvError, ConflictError, InvalidInputError, NotFoundError
from ublk.fuse import Mount

log = logging.getLogger("aenv.blockd")

# A layer is known by device and inode: a stack holds its files open, so the numbers stay its own.
FileId = tuple[int, int]
StackKey = tuple[FileId, ...]


def absolute(name: str, path: str) -> Path:
    """Raises InvalidInputError naming the argument."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidInputError(name, f"{path!r} is not an absolute path")
    return Path(path)


def file_id(path: Path) -> FileId:
    try:
        status = path.stat()
    except OSError as error:
        raise NotFoundError(f"layers: {path}: {error.strerror}") from error
    return status.st_dev, status.st_ino


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: %s", task.get_name(), error)


@dataclass
class Served:
    """One image in the mounted directory."""

    name: str
    image: Image
    stack: Stack | None  # keeps the shared stack alive
    key: StackKey
    layers: list[str]
    cached: bool
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is restacked, resized or closed


class Images:
    """All methods run in the event loop; what blocks is done in threads, without the GIL."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._served: dict[str, Served] = {}
        self._opening: set[str] = set()
        self._stacks: WeakValueDictionary[StackKey, Stack] = WeakValueDictionary()
        self._stack_lock = asyncio.Lock()  # two images of one snapshot, opened at once, share one index
        self._sealing: dict[Path, asyncio.Task[None]] = {}

    async def create(self, data: str, index: str, size: int, uuid_text: str | None, parent_uuid: str) -> str:
        """Make an empty writable layer; gives its UUID."""
        chosen = uuid_text or str(uuid.uuid4())
        if not 0 < size < 1 << 60:
            raise InvalidInputError("size", f"{size} bytes")
        paths = absolute("data", data), absolute("index", index)
        await asyncio.to_thread(create_writable, *paths, size, uuid=chosen, parent_uuid=parent_uuid)
        return chosen

    async def open(
        self,
        name: str,
        layers: list[str],
        data: str | None,
        index: str | None,
        *,
        cached: bool,
        owner: tuple[int, int],
        mode: int,
    ) -> dict[str, Any]:
        if name in self._served or name in self._opening:
            raise ConflictError(f"image {name}: is open already")
        if cached and data is not None:
            raise InvalidInputError("cached", "only a read-only image can be cached")
        for number in owner:
            if not 0 <= number < 1 << 32:
                raise InvalidInputError("uid", f"{number}")
        paths = [absolute("layers", path) for path in layers]
        top = [absolute(what, path) for what, path in (("data", data), ("index", index)) if path is not None]
        self._opening.add(name)
        try:
            async with self._stack_lock:
                key, stack = await self._open_stack(paths) if paths else ((), None)
            image = await asyncio.to_thread(Image, stack, *top, direct=cached)
            try:
                self._mount.add(name, image, cached=cached, uid=owner[0], gid=owner[1], mode=mode & 0o777)
            except BaseException:
                image.close()
                raise
            served = self._served[name] = Served(name, image, stack, key, layers, cached)
        finally:
            self._opening.discard(name)
        return self.describe(served)

    async def _open_stack(self, paths: list[Path]) -> tuple[StackKey, Stack]:
        """The stack of these layers, sharing the index of the longest known lower part."""
        if len(paths) > 255:
            raise InvalidInputError("layers", f"{len(paths)} layers; a stack has at most 255")
        key = tuple(file_id(path) for path in paths)
        known = len(paths)
        while known and key[:known] not in self._stacks:
            known -= 1
        stack = self._stacks.get(key[:known])
        for path in paths[known:]:
            if path in self._sealing:
                await self._sealing[path]
        if known < len(paths):
            stack = await asyncio.to_thread(self._extend, stack, paths[known:])
            self._stacks[key] = stack
        assert stack is not None
        return key, stack

    @staticmethod
    def _extend(stack: Stack | None, paths: list[Path]) -> Stack:
        layers = [Layer(path) for path in paths]
        if stack is None:
            return Stack(layers)
        for layer in layers:
            stack = stack.push(layer)
        return stack

    def find(self, name: str) -> Served:
        served = self._served.get(name)
        if served is None:
            raise NotFoundError(f"image {name}: is not open")
        return served

    async def close(self, name: str) -> None:
        served = self.find(name)
        async with served.lock:
            self.find(name)
            await asyncio.to_thread(served.image.flush)
            await asyncio.to_thread(self._mount.remove, name)
            del self._served[name]
            served.image.close()

    async def flush(self, name: str) -> None:
        served = self.find(name)
        async with served.lock:
            self.find(name)
            await asyncio.to_thread(served.image.flush)

    async def resize(self, name: str, size: int) -> None:
        served = self.find(name)
        if not 0 < size < 1 << 60:
            raise InvalidInputError("size", f"{size} bytes")
        async with served.lock:
            self.find(name)
            await asyncio.to_thread(served.image.resize, size)
            await asyncio.to_thread(self._mount.resized, name)

    async def restack(self, name: str, data: str, index: str, uuid_text: str | None) -> str:
        """Gives the path of the layer that was sealed; it is made durable in the background."""
        served = self.find(name)
        paths = absolute("data", data), absolute("index", index)
        async with served.lock:
            self.find(name)
            sealing = await asyncio.to_thread(self._swap, served.image, paths, uuid_text or str(uuid.uuid4()))
            sealed = Path(sealing.data_path)
            served.layers = [*served.layers, str(sealed)]
            served.key = (*served.key, file_id(sealed))
            served.stack = served.image.stack
            assert served.stack is not None
            self._stacks[served.key] = served.stack
        task = self._sealing[sealed] = asyncio.create_task(self._finish(sealing), name=f"seal {sealed}")
        task.add_done_callback(_log_failure)
        return str(sealed)

    @staticmethod
    def _swap(image: Image, paths: tuple[Path, Path], uuid_text: str) -> Sealing:
        if image.read_only:
            raise ConflictError("image: is read-only")
        create_writable(*paths, image.size, uuid=uuid_text)
        try:
            return image.restack(*paths)
        except BaseException:
            for path in paths:
                path.unlink()
            raise

    async def _finish(self, sealing: Sealing) -> None:
        """Ends with an error if the layer could not be written; `seal` tells, and tries again."""
        try:
            await asyncio.to_thread(sealing.finish)
        finally:
            del self._sealing[Path(sealing.data_path)]

    async def seal(self, data: str, index: str) -> None:
        path, index_path = absolute("data", data), absolute("index", index)
        if any(s.image.data_path == data for s in self._served.values()):
            raise ConflictError(f"data: {data} is the writable layer of an open image")
        pending = self._sealing.get(path)
        if pending is None:
            await asyncio.to_thread(self._seal_now, path, index_path)
        else:
            await asyncio.shield(pending)

    @staticmethod
    def _seal_now(path: Path, index_path: Path) -> None:
        try:
            sealing = Sealing(path, index_path)
        except AenvError:
            Layer(path)  # sealed already, or the error says why it is neither
            index_path.unlink(missing_ok=True)
            return
        sealing.finish()

    def describe(self, served: Served) -> dict[str, Any]:
        image = served.image
        recovery = image.recovery
        return {
            "image": served.name,
            "path": os.path.join(self._mount.directory, served.name),
            "size": image.size,
            "read_only": image.read_only,
            "cached": served.cached,
            "layers": served.layers,
            "data": image.data_path,
            "index": image.index_path,
            "opens": self._mount.opens(served.name),
            "recovery": recovery._asdict() if recovery is not None else None,
        }

    def describe_all(self) -> list[dict[str, Any]]:
        return [self.describe(self._served[name]) for name in sorted(self._served)]

    def stats(self, name: str) -> dict[str, Any]:
        served = self.find(name)
        segments, data_bytes = served.image.segments
        below = served.stack.segment_count if served.stack is not None else 0
        return served.image.stats._asdict() | {
            "upper_segments": segments,
            "upper_bytes": data_bytes,
            "stack_segments": below,
        }

    def totals(self) -> dict[str, int]:
        return {
            "images": len(self._served),
            "stacks": len(self._stacks),
            "segments": sum(stack.segment_count for stack in self._stacks.values()),
            "sealing": len(self._sealing),
        }

    def in_use(self) -> list[str]:
        return [name for name in self._served if self._mount.opens(name)]

    async def shut(self) -> list[str]:
        """Flush, wait for what is being sealed, unmount, close. Gives the errors in words; all is tried."""
        failures = []
        for task in list(self._sealing.values()):
            with contextlib.suppress(AenvError):  # the layer can be sealed again from its index file
                await task
        for served in self._served.values():
            try:
                await asyncio.to_thread(served.image.flush)
            except AenvError as error:
                failures.append(f"image {served.name}: {error}")
        await asyncio.to_thread(self._mount.close)
        for served in self._served.values():
            served.image.close()
        self._served.clear()
        return failures
