"""The control socket of the block server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aenv.errors import AenvError, ConflictError, InvalidInputError, UnavailableError
from ublk import protocol
from ublk.front import FuseFront, UblkOptions, open_ublk
from ublk.fuse import Mount
from ublk.images import Images
from ublk.protocol import (
    VERSION,
    AnyRequest,
    Close,
    Create,
    Flush,
    Hello,
    List,
    Open,
    Replace,
    Resize,
    Restack,
    Seal,
    Shutdown,
    Stats,
    Trace,
    frame,
)  # fmt: skip
from ublk.remote import RemoteLayers, RemoteOptions
from ublk.state import StateFolder

log = logging.getLogger("aenv.blockd")

MAX_PENDING = 128  # requests of one connection that are worked on at a time


class Server:
    """One block server: a socket, a mounted directory, and the images in it."""

    def __init__(
        self, socket_path: Path, directory: Path, state: Path, *, kept: Sequence[int] = (), ready: int | None = None,
        remote: RemoteOptions | None = None, ublk: UblkOptions = UblkOptions(),  # noqa: B008  # it is frozen
    ) -> None:  # fmt: skip
        """`kept`: descriptors of the mount of a dead server, which somebody held. `ready` gets a byte when requests
        are accepted. All are closed. `remote`: where chunks of remote layers are kept; None: there are none."""
        self._socket_path = socket_path
        self._directory = directory
        self._state = state
        self._kept = kept
        self._ready = ready
        self._remote_options = remote
        self._ublk_options = ublk
        self._stopping = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._mount: Mount | None = None
        self._connection_id = ""

    @property
    def mounted(self) -> bool:
        """The mount was not closed: the files in it may have users."""
        return self._mount is not None and self._mount.is_open

    async def run(self) -> None:
        """Serve until a `shutdown` request, SIGTERM or SIGINT. Raises ConflictError if another server runs."""
        lock = _lock(self._socket_path)
        try:
            self._make_directory()
            states = StateFolder(self._state)
            remote = RemoteLayers(self._remote_options) if self._remote_options is not None else None
            mount = self._mount = Mount(self._directory, states.fuse_record, self._kept)
            self._connection_id = mount.connection_id
            for fd in self._kept:
                os.close(fd)
            ublk = open_ublk(self._state, self._ublk_options)
            self._images = Images(FuseFront(mount), ublk, states, remote)
            await self._images.recover()
            mount.serve()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stopping.set)
            keeping = listen(keep_path(self._socket_path))
            loop.add_reader(keeping, self._hand_out, keeping, mount)
            listening = await asyncio.start_unix_server(self._accept, sock=listen(self._socket_path))
            self._say_ready(mount)
            async with listening:
                await self._stopping.wait()
            loop.remove_reader(keeping)
            keeping.close()
            await self._end()
        finally:
            self._socket_path.unlink(missing_ok=True)
            keep_path(self._socket_path).unlink(missing_ok=True)
            os.close(lock)

    def _make_directory(self) -> None:
        """Without a look at it: it may be the mount that waits for us to answer."""
        self._directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory, 0o711)

    def _say_ready(self, mount: Mount) -> None:
        log.info(
            "serving %s, images in %s%s", self._socket_path, self._directory,
            ", taken over" if mount.resumed else "",
        )  # fmt: skip
        if self._ready is not None:
            with contextlib.suppress(BrokenPipeError):  # who started us has gone meanwhile
                os.write(self._ready, b"1")
            os.close(self._ready)

    def _hand_out(self, keeping: socket.socket, mount: Mount) -> None:
        """Whoever connects gets what keeps open files alive if this process dies, and need not say anything."""
        try:
            connection, _ = keeping.accept()
            with connection:
                socket.send_fds(connection, [mount.connection_id.encode()], mount.descriptors)
        except OSError as error:
            log.warning("%s: %s", keep_path(self._socket_path), error)

    async def _end(self) -> None:
        for failure in await self._images.shut():
            log.error("%s", failure)
        current = list(self._connections)
        for task in current:
            task.cancel()
        await asyncio.gather(*current, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except asyncio.CancelledError:
            # Only `_end` cancels: the connection ends here, and there is nobody above to tell.
            log.debug("connection ended by shutdown")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        room = asyncio.Semaphore(MAX_PENDING)
        async with asyncio.TaskGroup() as tasks:
            greeted = False
            while True:
                try:
                    body = await protocol.read_frame(reader)
                except InvalidInputError as error:
                    await _send(writer, {"id": None, "error": protocol.encode_error(error)})
                    return
                if body is None:
                    return
                try:
                    request = protocol.decode_request(body)
                    if not greeted:
                        _check_hello(request)
                        greeted = True
                except AenvError as error:
                    number = protocol.request_id(body)
                    await _send(writer, {"id": number, "error": protocol.encode_error(error)})
                    if number is None or not greeted:
                        return
                    continue
                await room.acquire()
                tasks.create_task(self._answer(request, writer, room))

    async def _answer(self, request: AnyRequest, writer: asyncio.StreamWriter, room: asyncio.Semaphore) -> None:
        try:
            reply = {"id": request.id, "ok": await self._perform(request)}
        except AenvError as error:
            reply = {"id": request.id, "error": protocol.encode_error(error)}
        except Exception as error:
            log.exception("request %s failed", type(request).__name__)
            failure = UnavailableError(f"{type(error).__name__}: {error}")
            reply = {"id": request.id, "error": protocol.encode_error(failure)}
        finally:
            room.release()
        await _send(writer, reply)
        if isinstance(request, Shutdown) and "ok" in reply:
            self._stopping.set()

    async def _perform(self, request: AnyRequest) -> Any:
        images = self._images
        match request:
            case Hello():
                return {
                    "version": VERSION, "pid": os.getpid(), "front_ends": images.front_ends,
                    "directory": str(self._directory), "connection": self._connection_id,
                }  # fmt: skip
            case Create(data=data, index=index):
                return {"uuid": await images.create(data, index, request.size, request.uuid, request.parent_uuid)}
            case Open(image=name):
                return await images.open(
                    name, request.layers, request.data, request.index, cached=request.cached,
                    owner=(request.uid, request.gid), mode=request.mode, prefetch_path=request.prefetch,
                    record=request.record, front_end=request.front_end,
                )  # fmt: skip
            case Trace(image=name, path=path):
                return {"chunks": await images.trace(name, path)}
            case Close(image=name):
                return await images.close(name)
            case Replace(image=name):
                return await images.replace(name, request.layers)
            case Restack(image=name):
                return {"sealed": await images.restack(name, request.data, request.index, request.uuid)}
            case Seal(data=data, index=index):
                return await images.seal(data, index)
            case Flush(image=name):
                return await images.flush(name)
            case Resize(image=name, size=size):
                return await images.resize(name, size)
            case Stats(image=None):
                usage = resource.getrusage(resource.RUSAGE_SELF)
                return images.totals() | {"pid": os.getpid(), "max_rss_bytes": usage.ru_maxrss * 1024}
            case Stats(image=str(name)):
                return images.stats(name)
            case List():
                return await images.describe_all()
            case Shutdown(force=force):
                used = await images.in_use()
                if used and not force:
                    raise ConflictError(f"images are in use: {', '.join(sorted(used))}", hint="use force")
                return None
        raise InvalidInputError("op", "unknown")


def _check_hello(request: AnyRequest) -> None:
    if not isinstance(request, Hello):
        raise InvalidInputError("op", "the first request must be hello")
    if request.version != VERSION:
        raise InvalidInputError(
            "version", f"{request.version} is not spoken here", hint=f"this server speaks {VERSION}"
        )


async def _send(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    """The client may have gone; the work was done all the same."""
    with contextlib.suppress(ConnectionError):
        writer.write(frame(reply))
        await writer.drain()


def _lock(socket_path: Path) -> int:
    """One server for one socket, also when one was killed and left its socket behind."""
    socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(f"{socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConflictError(f"{socket_path}: a block server runs there already") from None
    return fd


def keep_path(socket_path: Path) -> Path:
    """The socket beside the control socket that hands out descriptors."""
    return socket_path.with_name(f"{socket_path.name}.keep")


def listen(socket_path: Path) -> socket.socket:
    """For the owner only."""
    socket_path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.setblocking(False)
    mask = os.umask(0o177)
    try:
        listening.bind(str(socket_path))
    finally:
        os.umask(mask)
    listening.listen()
    return listening
