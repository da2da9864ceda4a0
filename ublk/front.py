"""Front ends: how an image gets a path that a VMM can open."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aenv._native.lsmt import Image
from aenv.errors import AenvError, ConflictError, NotFoundError, UnavailableError
from ublk.device import Control, Device
from ublk.fuse import Mount
from ublk.state import ImageState

log = logging.getLogger("aenv.blockd")

PATIENCE = 0.5  # seconds until "in use" is final: a process that has just ended closes its files a little later
POLL = 0.01
CHAR_DEVICES = Path("/sys/class/ublk-char")


class FrontEnd(Protocol):
    """Methods raise the errors of `aenv.errors`. An image that was added is used until it is removed."""

    async def add(self, state: ImageState, image: Image) -> None:
        """Show the image as `state` says. Puts into `state` what the next server needs to take it over; takes it over
        if that is there already."""

    async def remove(self, name: str) -> None:
        """Raises ConflictError if somebody has it open."""

    def check_resize(self) -> None:
        """Raises UnavailableError if images cannot change their size."""

    async def resized(self, name: str) -> None:
        """The image has another size."""

    def path(self, name: str) -> str: ...

    async def opens(self) -> dict[str, int]:
        """How often each image is open."""

    async def close(self) -> None:
        """Whoever has an image open gets errors from then on."""


class FuseFront:
    """Files in a mounted directory."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._names: set[str] = set()

    async def add(self, state: ImageState, image: Image) -> None:
        state.ino = self._mount.add(
            state.image, image, cached=state.cached, uid=state.uid, gid=state.gid, mode=state.mode, ino=state.ino,
            made_at=state.made_at,
        )  # fmt: skip
        self._names.add(state.image)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(self._mount.remove, name)
        self._names.discard(name)

    def check_resize(self) -> None:
        """Files always can."""

    async def resized(self, name: str) -> None:
        await asyncio.to_thread(self._mount.resized, name)

    def path(self, name: str) -> str:
        return os.path.join(self._mount.directory, name)

    def shows(self, path: str) -> bool:
        """Whether `path` is one of the files, by its name: a look at it could wait for ourselves."""
        return os.path.dirname(os.path.normpath(path)) == self._mount.directory

    async def opens(self) -> dict[str, int]:
        return {name: self._mount.opens(name) for name in self._names}

    async def close(self) -> None:
        await asyncio.to_thread(self._mount.close)


class UblkFront:
    """Block devices. Some are made ahead, because that takes longer than giving one an image."""

    def __init__(self, control: Control, spare: int) -> None:
        self._control = control
        self._wanted = spare
        self._spare: list[Device] = []
        self._devices: dict[str, Device] = {}
        self._refilling: asyncio.Task[None] | None = None
        self._closed = False

    async def prepare(self, states: list[ImageState]) -> None:
        """At the start, with what a dead server had open: its other devices are deleted."""
        known = {state.device for state in states if state.front_end == "ublk"}
        for number in _numbers():
            if number not in known and await asyncio.to_thread(self._control.find, number) is not None:
                log.info("deleting the unused device /dev/ublkb%d", number)
                await asyncio.to_thread(self._control.delete, number)
        self._refill()

    async def add(self, state: ImageState, image: Image) -> None:
        if state.device is not None:
            device = await self._take_over(state.device, image)
        else:
            device = self._spare.pop() if self._spare else await asyncio.to_thread(self._control.prepare)
            try:
                await asyncio.to_thread(device.start, image)
                os.chown(device.path, state.uid, state.gid)
                os.chmod(device.path, state.mode)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(device.remove))
                raise
            state.device = device.number
        self._devices[state.image] = device
        self._refill()

    async def _take_over(self, number: int, image: Image) -> Device:
        device = await asyncio.to_thread(self._control.recover, number, image)
        if self._control.can_resize:  # the dead server may have been about to do it
            await asyncio.to_thread(device.resized)
        return device

    async def abandon(self, state: ImageState) -> None:
        """The image of a dead server's device cannot be opened: whoever waits for it gets errors, in place of waiting
        for ever."""
        if state.device is not None:
            with contextlib.suppress(AenvError):  # it is gone already
                await asyncio.to_thread(self._control.delete, state.device)

    def _refill(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._make_spares(), name="spare ublk devices")

    async def _make_spares(self) -> None:
        try:
            while len(self._spare) < self._wanted and not self._closed:
                self._spare.append(await asyncio.to_thread(self._control.prepare))
        except AenvError as error:
            log.warning("no spare devices: %s", error)

    async def remove(self, name: str) -> None:
        device = self._find(name)
        deadline = time.monotonic() + PATIENCE
        while (await asyncio.to_thread(open_counts))[os.stat(device.path).st_rdev]:
            if time.monotonic() > deadline:
                raise ConflictError(f"{name}: is in use")
            await asyncio.sleep(POLL)  # the kernel tells nobody when a block device is closed
        del self._devices[name]
        await asyncio.to_thread(device.remove)

    def check_resize(self) -> None:
        if not self._control.can_resize:
            raise UnavailableError("a ublk device of this kernel keeps its size", hint="it needs Linux 6.16")

    async def resized(self, name: str) -> None:
        await asyncio.to_thread(self._find(name).resized)

    def path(self, name: str) -> str:
        return self._find(name).path

    async def opens(self) -> dict[str, int]:
        if not self._devices:
            return {}
        counts = await asyncio.to_thread(open_counts)
        return {name: counts[os.stat(device.path).st_rdev] for name, device in self._devices.items()}

    async def close(self) -> None:
        self._closed = True
        if self._refilling is not None:
            await self._refilling
        devices = [*self._spare, *self._devices.values()]
        self._spare.clear()
        self._devices.clear()
        await asyncio.gather(*(asyncio.to_thread(device.remove) for device in devices))

    def _find(self, name: str) -> Device:
        device = self._devices.get(name)
        if device is None:
            raise NotFoundError(f"{name}: no such image")
        return device


@dataclass(frozen=True)
class UblkOptions:
    queues: int = 1  # of each device; each is a thread
    depth: int = 128  # requests of a queue
    spare: int = 2  # devices made ahead


def open_ublk(state_folder: Path, options: UblkOptions) -> UblkFront | None:
    """None where the kernel has no ublk for us; the log says why."""
    # Servers of one state folder follow each other: the mark tells the devices of other servers from theirs.
    digest = hashlib.sha256(b"aenv-blockd\0" + os.fsencode(state_folder)).digest()
    try:
        control = Control(int.from_bytes(digest[:8], "little") | 1, queues=options.queues, depth=options.depth)
    except UnavailableError as error:
        log.info("no ublk: %s", error)
        return None
    return UblkFront(control, options.spare)


def _numbers() -> list[int]:
    if not CHAR_DEVICES.is_dir():
        return []
    return [int(path.name.removeprefix("ublkc")) for path in CHAR_DEVICES.iterdir()]


def open_counts() -> Counter[int]:
    """How many file descriptors of all processes, and mounts, use each block device, by device number."""
    found: Counter[int] = Counter()
    namespaces: set[str] = set()
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            found.update(_opened(process.path))
            namespace = os.readlink(f"{process.path}/ns/mnt")
            if namespace not in namespaces:
                namespaces.add(namespace)
                found.update(_mounted(Path(process.path, "mountinfo").read_text()))
    return found


def _opened(process: str) -> Iterator[int]:
    for name in os.listdir(f"{process}/fd"):
        path = f"{process}/fd/{name}"
        with contextlib.suppress(OSError):  # closed just now
            # The target is only looked at if it is on /dev: anything else may be on a file system that does not answer.
            if os.readlink(path).startswith("/dev/") and stat.S_ISBLK((status := os.stat(path)).st_mode):
                yield status.st_rdev


def _mounted(mountinfo: str) -> Iterator[int]:
    """Device numbers of mounted file systems (proc(5): the third field is major:minor)."""
    for line in mountinfo.splitlines():
        major, _, minor = line.split()[2].partition(":")
        yield os.makedev(int(major), int(minor))
