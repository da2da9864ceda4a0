"""The images a server holds: shared stacks, writable layers, and layers that are being sealed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from aenv._native.lsmt import Image, Layer, Sealing, Stack, create_writable
from aenv.errors import AenvError, ConflictError, InvalidInputError, NotFoundError, UnavailableError
from ublk.front import PATIENCE, POLL, FrontEnd, FuseFront, UblkFront
from ublk.ranges import RemoteSpec
from ublk.ranges import absolute_path as absolute
from ublk.remote import RemoteLayer, RemoteLayers, TraceRecording, cache_name, prefetch
from ublk.state import ImageState, SealState, StateFolder
from ublk.trace import MOST_ENTRIES, Trace

log = logging.getLogger("aenv.blockd")

INDEX_SUFFIX = ".index"  # of the file beside a layer that is not sealed yet: `ID.data` or `ID.lsmt` and `ID.index`
OPENERS = 32  # threads that open remote layers

# A layer is known by device and inode: a stack holds its files open, so the numbers stay its own. A remote one is known
# by its digest.
FileId = tuple[int, int]
StackKey = tuple[FileId | str, ...]
AnyLayer = Path | RemoteLayer
StateT = TypeVar("StateT", ImageState, SealState)


def file_id(path: Path) -> FileId:
    try:
        status = path.stat()
    except OSError as error:
        raise NotFoundError(f"layers: {path}: {error.strerror}") from error
    return status.st_dev, status.st_ino


def layer_id(layer: AnyLayer) -> FileId | str:
    return cache_name(layer.spec.digest) if isinstance(layer, RemoteLayer) else file_id(layer)


def _save(save: Callable[[StateT], None], state: StateT) -> None:
    """Raises UnavailableError if the state of the server cannot be written."""
    try:
        save(state)
    except OSError as error:
        raise UnavailableError(f"the server's state cannot be written: {error.strerror}") from error


def _open_layer(layer: AnyLayer) -> Layer:
    """A layer with an index file beside it may be sealed or not: somebody is, or was, about to do it."""
    if isinstance(layer, RemoteLayer):
        return Layer(layer.remote)
    index = layer.with_suffix(INDEX_SUFFIX)
    if index.exists():
        with contextlib.suppress(AenvError):
            return Layer(layer, index)
    return Layer(layer)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s: %s", task.get_name(), error)


@dataclass
class Served:
    """One image in the mounted directory."""

    state: ImageState  # as it is on disk
    image: Image
    stack: Stack | None  # keeps the shared stack alive
    key: StackKey
    remote: list[RemoteLayer]  # keeps their sources alive
    recording: TraceRecording | None
    front: FrontEnd
    upper: FileId | None  # its writable layer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is restacked, resized or closed


class Images:
    """All methods run in the event loop; what blocks is done in threads, without the GIL."""

    def __init__(
        self, fuse: FuseFront, ublk: UblkFront | None, states: StateFolder, remote: RemoteLayers | None = None
    ) -> None:
        self._fuse = fuse
        self._ublk = ublk
        self._states = states
        self._remote = remote
        # A source that hangs may hold up the opening of remote layers, but nothing else that is done in threads.
        self._openers = ThreadPoolExecutor(OPENERS, thread_name_prefix="open remote")
        self._served: dict[str, Served] = {}
        self._opening: set[str] = set()
        self._stacks: WeakValueDictionary[StackKey, Stack] = WeakValueDictionary()
        self._stack_lock = asyncio.Lock()  # two images of one snapshot, opened at once, share one index
        self._sealing: dict[FileId, asyncio.Task[None]] = {}  # a layer may have several names
        self._lost: dict[str, AenvError] = {}  # what a dead server had open, and why it is not

    async def recover(self) -> None:
        """Open what a dead server had open. What fails is logged, and told to all who ask for it."""
        images = self._states.images()
        if self._ublk is not None:
            await self._ublk.prepare(images)
        seals = self._seals({state.data for state in images})
        # At once: one of a source that does not answer must not keep the others from their users.
        await asyncio.gather(*(self._recover_one(state) for state in images))
        for data, index in seals.items():
            self._start_sealing(data, asyncio.to_thread(self._seal_now, data, index))
        if images:
            log.info("opened %d of %d images again", len(self._served), len(images))

    async def _recover_one(self, state: ImageState) -> None:
        try:
            await self._serve(state)
        except (AenvError, OSError) as error:
            log.error("image %s cannot be opened again: %s", state.image, error)
            if state.front_end == "ublk" and self._ublk is not None:
                await self._ublk.abandon(state)
            self._lost[state.image] = UnavailableError(
                f"image {state.image}: could not be opened again: {error}", hint=getattr(error, "hint", None)
            )

    def _seals(self, uppers: set[str | None]) -> dict[Path, Path]:
        """The layers that a dead server had to seal, with their index files."""
        found = {}
        for state in self._states.seals():
            # A layer is marked before it is frozen: it may still be the writable layer of its image.
            if state.data in uppers or not os.path.exists(state.data):
                self._states.remove_seal(state.data)
            else:
                found[Path(state.data)] = Path(state.index)
        return found

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
        layers: list[str | RemoteSpec],
        data: str | None,
        index: str | None,
        *,
        cached: bool,
        owner: tuple[int, int],
        mode: int,
        prefetch_path: str | None = None,
        record: int = 0,
        front_end: str = "auto",
    ) -> dict[str, Any]:
        if name in self._served or name in self._opening:
            raise ConflictError(f"image {name}: is open already")
        if cached and data is not None:
            raise InvalidInputError("cached", "only a read-only image can be cached")
        for number in owner:
            if not 0 <= number < 1 << 32:
                raise InvalidInputError("uid", f"{number}")
        for layer in layers:
            if isinstance(layer, str):
                absolute("layers", layer)
                if self._fuse.shows(layer):  # after a restart it could not be opened before we answer
                    raise InvalidInputError("layers", f"{layer} is an image of this server")
        if not 0 <= record <= MOST_ENTRIES:
            raise InvalidInputError("record", f"{record} chunks")
        trace = None
        if prefetch_path is not None:
            trace = await asyncio.to_thread(Trace.load, absolute("prefetch", prefetch_path))
        for what, path in (("data", data), ("index", index)):
            if path is not None:
                absolute(what, path)
        state = ImageState(
            image=name, layers=layers, data=data, index=index, cached=cached, uid=owner[0], gid=owner[1],
            mode=mode & 0o777, made_at=time.time_ns(), front_end=self._choose(front_end, cached, data is not None),
        )  # fmt: skip
        self._opening.add(name)
        try:
            return self._describe(await self._serve(state, trace, record), 0)
        finally:
            self._opening.discard(name)

    async def _serve(self, state: ImageState, trace: Trace | None = None, record: int = 0) -> Served:
        layers = await self._attach(state.layers)
        remote = [layer for layer in layers if isinstance(layer, RemoteLayer)]
        recording = TraceRecording(remote, record) if record and remote else None
        if trace is not None:
            prefetch(trace, remote, direct=state.cached)
        opened = await self._open_remote(layers)
        top = [Path(path) for path in (state.data, state.index) if path is not None]
        async with self._stack_lock:
            key, stack = await self._open_stack(layers, opened) if layers else ((), None)
        image = await asyncio.to_thread(Image, stack, *top, direct=state.cached)
        try:
            front = self._front(state)
            await front.add(state, image)
            try:
                _save(self._states.save_image, state)
            except BaseException:
                await front.remove(state.image)
                raise
        except BaseException:
            image.close()
            raise
        self._lost.pop(state.image, None)
        upper = None if state.data is None else file_id(Path(state.data))
        served = Served(state, image, stack, key, remote, recording, front, upper)
        self._served[state.image] = served
        return served

    @property
    def front_ends(self) -> list[str]:
        return ["fuse"] if self._ublk is None else ["fuse", "ublk"]

    def _choose(self, wanted: str, cached: bool, writable: bool) -> str:
        if wanted == "auto":
            return "ublk" if self._ublk is not None and writable else "fuse"
        if wanted not in ("fuse", "ublk"):
            raise InvalidInputError("front_end", f"{wanted!r} is none of auto, fuse, ublk")
        if wanted == "ublk" and cached:
            raise InvalidInputError("front_end", "a cached image is a file: it is served by fuse")
        if wanted == "ublk" and self._ublk is None:
            raise UnavailableError("front_end: this host has no ublk", hint="see the log of aenv-blockd")
        return wanted

    def _front(self, state: ImageState) -> FrontEnd:
        if state.front_end != "ublk":
            return self._fuse
        if self._ublk is None:
            raise UnavailableError("this host has no ublk (any more)", hint="see the log of aenv-blockd")
        return self._ublk

    async def _attach(self, specs: list[str | RemoteSpec]) -> list[AnyLayer]:
        if len(specs) > 255:
            raise InvalidInputError("layers", f"{len(specs)} layers; a stack has at most 255")
        remote = self._remote
        if remote is None and not all(isinstance(spec, str) for spec in specs):
            raise UnavailableError("this server has no cache for remote layers", hint="start it with --cache")

        def attach() -> list[AnyLayer]:
            return [Path(spec) if isinstance(spec, str) else remote.attach(spec) for spec in specs]  # type: ignore[union-attr]

        return await asyncio.get_running_loop().run_in_executor(self._openers, attach)

    def _known(self, key: StackKey) -> int:
        """How many layers from the lowest on are a stack already."""
        known = len(key)
        while known and key[:known] not in self._stacks:
            known -= 1
        return known

    async def _open_remote(self, layers: list[AnyLayer]) -> dict[AnyLayer, Layer]:
        """Not under the lock of the stacks: it may take as long as a source lets us wait."""
        if not any(isinstance(layer, RemoteLayer) for layer in layers):
            return {}
        known = self._known(tuple(layer_id(layer) for layer in layers))
        missing = [layer for layer in layers[known:] if isinstance(layer, RemoteLayer)]
        if not missing or self._remote is None:
            return {}
        found = await asyncio.get_running_loop().run_in_executor(self._openers, self._remote.open, missing)
        return dict(zip(missing, found, strict=True))

    async def _open_stack(self, layers: list[AnyLayer], opened: dict[AnyLayer, Layer]) -> tuple[StackKey, Stack]:
        """The stack of these layers, sharing the index of the longest known lower part."""
        key = tuple(layer_id(layer) for layer in layers)
        for served in self._served.values():
            if served.upper in key:
                raise ConflictError(f"layers: {served.state.data} is the writable layer of image {served.state.image}")
        known = self._known(key)
        stack = self._stacks.get(key[:known])
        for identity in key[known:]:
            if isinstance(identity, tuple) and identity in self._sealing:
                await asyncio.shield(self._sealing[identity])
        if known < len(layers):
            stack = await asyncio.to_thread(self._extend, stack, layers[known:], opened)
            self._stacks[key] = stack
        assert stack is not None
        return key, stack

    @staticmethod
    def _extend(stack: Stack | None, layers: list[AnyLayer], opened: dict[AnyLayer, Layer]) -> Stack:
        found = [opened.get(layer) or _open_layer(layer) for layer in layers]
        if stack is None:
            return Stack(found)
        for layer in found:
            stack = stack.push(layer)
        return stack

    def find(self, name: str) -> Served:
        served = self._served.get(name)
        if name in self._lost:
            raise self._lost[name]
        if served is None:
            raise NotFoundError(f"image {name}: is not open")
        return served

    async def close(self, name: str) -> None:
        if self._lost.pop(name, None) is not None:
            self._states.remove_image(name)
            return
        served = self.find(name)
        async with served.lock:
            self.find(name)
            await asyncio.to_thread(served.image.flush)
            await served.front.remove(name)
            self._states.remove_image(name)
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
            served.front.check_resize()
            await asyncio.to_thread(served.image.resize, size)
            await served.front.resized(name)

    async def restack(self, name: str, data: str, index: str, uuid_text: str | None) -> str:
        """Gives the path of the layer that was sealed; it is made durable in the background."""
        served = self.find(name)
        paths = absolute("data", data), absolute("index", index)
        async with served.lock:
            self.find(name)
            sealing = await asyncio.to_thread(self._swap, served, paths, uuid_text or str(uuid.uuid4()))
            sealed = Path(sealing.data_path)
            served.key = (*served.key, file_id(sealed))
            served.upper = file_id(paths[0])
            served.stack = served.image.stack
            assert served.stack is not None
            self._stacks[served.key] = served.stack
        self._start_sealing(sealed, asyncio.to_thread(sealing.finish))
        return str(sealed)

    async def replace(self, name: str, layers: list[str]) -> None:
        """Take other layers below the writable one; the new state says so first, for either will do."""
        served = self.find(name)
        paths: list[AnyLayer] = [absolute("layers", layer) for layer in layers]
        if served.remote:
            raise ConflictError(f"image {name}: has remote layers")
        if served.image.read_only:
            raise ConflictError(f"image {name}: is read-only")
        if not 1 <= len(layers) <= 255:
            raise InvalidInputError("layers", f"{len(layers)} layers; a stack has 1 to 255")
        async with served.lock:
            self.find(name)
            async with self._stack_lock:
                key, stack = await self._open_stack(paths, {})
            state = msgspec.structs.replace(served.state, layers=list(layers))
            _save(self._states.save_image, state)
            await asyncio.to_thread(served.image.replace, stack)
            served.state, served.key, served.stack = state, key, stack

    def _swap(self, served: Served, paths: tuple[Path, Path], uuid_text: str) -> Sealing:
        """The state says that the new layer is on top before it is: it is empty until then, and afterwards no write
        that was acknowledged can be missed by the next server."""
        image, before = served.image, served.state
        if image.read_only or before.data is None or before.index is None:
            raise ConflictError("image: is read-only")
        create_writable(*paths, image.size, uuid=uuid_text)
        after = msgspec.structs.replace(
            before, layers=[*before.layers, before.data], data=str(paths[0]), index=str(paths[1])
        )
        try:
            _save(self._states.save_seal, SealState(data=before.data, index=before.index))
            _save(self._states.save_image, after)
            sealing = image.restack(*paths)
        except BaseException:
            _save(self._states.save_image, before)
            self._states.remove_seal(before.data)
            for path in paths:
                path.unlink()
            raise
        served.state = after
        return sealing

    def _start_sealing(self, data: Path, work: Coroutine[Any, Any, None]) -> None:
        identity = file_id(data)
        task = asyncio.create_task(self._finish(data, identity, work), name=f"seal {data}")
        self._sealing[identity] = task
        task.add_done_callback(_log_failure)

    async def _finish(self, data: Path, identity: FileId, work: Coroutine[Any, Any, None]) -> None:
        """Ends with an error if the layer could not be written; `seal` tells, and tries again."""
        try:
            await work
            self._states.remove_seal(str(data))
        finally:
            del self._sealing[identity]

    async def seal(self, data: str, index: str) -> None:
        path, index_path = absolute("data", data), absolute("index", index)
        identity = file_id(path)
        if any(served.upper == identity for served in self._served.values()):
            raise ConflictError(f"data: {data} is the writable layer of an open image")
        pending = self._sealing.get(identity)
        if pending is not None:
            await asyncio.shield(pending)
        if pending is None or index_path.exists():  # another name of it may have an index file, too
            await asyncio.to_thread(self._seal_now, path, index_path)
            self._states.remove_seal(data)

    @staticmethod
    def _seal_now(path: Path, index_path: Path) -> None:
        try:
            sealing = Sealing(path, index_path)
        except AenvError:
            Layer(path)  # sealed already, or the error says why it is neither
            index_path.unlink(missing_ok=True)
            return
        sealing.finish()

    def _describe(self, served: Served, opens: int) -> dict[str, Any]:
        image, state = served.image, served.state
        recovery = image.recovery
        return {
            "image": state.image,
            "path": served.front.path(state.image),
            "front_end": state.front_end,
            "size": image.size,
            "read_only": image.read_only,
            "cached": state.cached,
            "layers": [layer if isinstance(layer, str) else layer.brief() for layer in state.layers],
            "data": image.data_path,
            "index": image.index_path,
            "opens": opens,
            "recovery": recovery._asdict() if recovery is not None else None,
        }

    async def _opens(self) -> dict[str, int]:
        return await self._fuse.opens() | (await self._ublk.opens() if self._ublk is not None else {})

    async def describe_all(self) -> list[dict[str, Any]]:
        opens = await self._opens()
        return [self._describe(self._served[name], opens[name]) for name in sorted(self._served) if name in opens]

    def stats(self, name: str) -> dict[str, Any]:
        served = self.find(name)
        segments, data_bytes = served.image.segments
        below = served.stack.segment_count if served.stack is not None else 0
        return served.image.stats._asdict() | {
            "upper_segments": segments,
            "upper_bytes": data_bytes,
            "stack_segments": below,
            # Of its remote layers, which other images may read, too.
            "remote_layers": len(served.remote),
            "cache_hits": sum(layer.remote.stats.hits for layer in served.remote),
            "cache_misses": sum(layer.remote.stats.misses for layer in served.remote),
            "fetched_bytes": sum(layer.remote.stats.fetched_bytes for layer in served.remote),
            "failed_chunks": sum(layer.remote.stats.failed_chunks for layer in served.remote),
        }

    async def trace(self, name: str, path: str) -> int:
        """Write what was recorded, and stop recording."""
        served = self.find(name)
        target = absolute("path", path)
        async with served.lock:
            self.find(name)
            if served.recording is None:
                raise ConflictError(f"image {name}: is not recorded", hint="open it with `record`")
            trace = served.recording.trace()
            await asyncio.to_thread(trace.save, target)
            served.recording = None
        return len(trace.entries)

    def totals(self) -> dict[str, Any]:
        return {
            "cache": None if self._remote is None else self._remote.stats,
            "images": len(self._served),
            "stacks": len(self._stacks),
            "segments": sum(stack.segment_count for stack in self._stacks.values()),
            "sealing": len(self._sealing),
            "lost": len(self._lost),
        }

    async def in_use(self) -> list[str]:
        """Those that somebody has open, still after a short while."""
        deadline = time.monotonic() + PATIENCE
        while used := [name for name, opens in (await self._opens()).items() if opens]:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL)
        return used

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
                failures.append(f"image {served.state.image}: {error}")
        for front in (self._fuse, self._ublk):
            if front is not None:
                await front.close()
        for served in self._served.values():
            served.image.close()
        self._served.clear()
        self._states.clear()
        if self._remote is not None:
            await asyncio.to_thread(self._remote.close)
        self._openers.shutdown(wait=False, cancel_futures=True)
        return failures
