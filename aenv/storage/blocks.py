"""The block server as the daemon uses it: started once, kept running, and its open files with it.

The server outlives the daemon, and files that VMMs have open outlive the server: the kernel's side of a FUSE mount
lives as long as some process holds its descriptors, so `Blocks` holds them, too, and hands them to the server that it
starts when one has died. Requests of VMMs wait for the new server. Calls that were under way are made again; each is
written so that it ends as if it had been made once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from aenv.errors import AenvError, ConflictError, InvalidInputError, NotFoundError, UnavailableError
from aenv.vmm.spawn import Process, exit_reason, process_start_time, spawn
from ublk.client import BlockClient
from ublk.server import keep_path

log = logging.getLogger("aenv.blocks")

T = TypeVar("T")
KEPT_MOST = 64  # descriptors of one mount
FIRST_KEPT = 4  # their numbers in the server; 3 is where it says that it is ready
ATTEMPTS = 3  # times that a call is made before it is believed to be what kills the server
PAUSES = (0, 0.1, 0.5, 2, 5)  # seconds before a server that does not start is started again; the last one repeats
PATIENCE = 2  # failed starts that calls under way are not told of


class Blocks:
    """`start` gives a connected one. Methods raise the errors of `BlockClient`; while the server starts again they
    wait, and raise UnavailableError only if it cannot be started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "images"
        self._socket = control_socket(folder)
        self._log = folder / "log"
        self._callbacks: list[Callable[[bool], None]] = []
        self._kept: list[int] = []
        self._connection = ""  # names the kernel's side of the mount
        self._process: Process | None = None
        self._client: BlockClient | None = None
        self._failure: AenvError | None = None  # why there is no server; the next attempt is under way
        self._changed = asyncio.Condition()
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, run_dir: Path) -> Blocks:
        """Connect to the server of this run directory, or start one. One that speaks another version of the protocol
        is replaced; its files stay open. Raises UnavailableError if there is no server in the end."""
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        blocks = cls(run_dir)
        try:
            await blocks._connect_or_start()
        except BaseException:
            blocks._let_go()
            raise
        blocks._supervise()
        return blocks

    async def close(self, *, stop_server: bool = False) -> None:
        """Disconnect and leave the server running, without a keeper of its files until the next `start`.

        `stop_server` ends it if no image is in use; raises ConflictError, with everything as it was, if one is.
        """
        if stop_server:
            await self._stop_server()
        self._closing = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._announce(None, UnavailableError("the block server's client is closed"))
        self._let_go()

    def on_restarted(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` each time a new server has taken the place of a dead one and serves all images again.

        Its argument says whether open files have survived; if not, they give errors for ever, and must be opened again.
        """
        self._callbacks.append(callback)

    @property
    def pid(self) -> int | None:
        """The server's, or None while there is none."""
        return self._process.pid if self._process is not None and self._process.alive else None

    @property
    def front_ends(self) -> tuple[str, ...]:
        """How the server can show images."""
        return tuple(self._client.server["front_ends"]) if self._client is not None else ()

    # --- the server ---------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        client = await BlockClient.connect(self._socket)
        try:
            pid = int(client.server["pid"])
            if self._process is None or not self._process.alive or self._process.pid != pid:
                try:
                    self._process = Process.adopt(pid, process_start_time(pid))
                except NotFoundError as error:
                    raise UnavailableError("the block server has ended") from error
            kept = await asyncio.to_thread(_fetch, keep_path(self._socket))
        except BaseException:
            await client.close()
            raise
        self._release()
        self._kept = kept
        self._connection = str(client.server["connection"])
        await self._announce(client, None)

    async def _connect_or_start(self) -> None:
        for attempt in range(PATIENCE + 1):  # one that is about to end neither answers nor lets another one start
            await asyncio.sleep(PAUSES[attempt])
            try:
                await self._connect()
                break
            except InvalidInputError as error:
                log.info("the block server is of another version and is replaced: %s", error)
                await self._replace_server()
                break
            except UnavailableError:
                try:
                    await self._start_server()
                    break
                except UnavailableError:
                    if attempt == PATIENCE:
                        raise

    async def _replace_server(self) -> None:
        self._kept = await asyncio.to_thread(_fetch, keep_path(self._socket))
        pid = await asyncio.to_thread(_peer_pid, self._socket)
        try:
            await Process.adopt(pid, process_start_time(pid)).kill()
        except NotFoundError:
            log.info("it has ended by itself")
        await self._start_server(self._kept)

    async def _start_server(self, kept: Sequence[int] = ()) -> None:
        """Start a server that takes over the mount whose descriptors are `kept`, and connect to it."""
        loop = asyncio.get_running_loop()
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        ready: asyncio.Future[bytes] = loop.create_future()
        try:
            try:
                numbers = {FIRST_KEPT + i: fd for i, fd in enumerate(kept)}
                command: list[str | Path] = [sys.executable, "-P", "-m", "ublk", "--socket", self._socket]
                command += ["--mount", self.directory, "--state", self.folder / "state", "--ready", "3"]
                command += [argument for number in numbers for argument in ("--kept", str(number))]
                self._process = spawn(command, fds={3: theirs} | numbers, log=self._log, cwd=Path("/"))
            except OSError as error:
                raise UnavailableError(f"the block server cannot be started: {error}") from error
            finally:
                os.close(theirs)

            def read() -> None:
                if not ready.done():
                    ready.set_result(os.read(ours, 1))

            loop.add_reader(ours, read)
            try:
                said = await ready
            finally:
                loop.remove_reader(ours)
        finally:
            os.close(ours)
        if not said:
            status = await self._process.wait()
            raise UnavailableError(f"the block server {exit_reason(status)}", hint=f"its last words are in {self._log}")
        await self._connect()

    async def _stop_server(self) -> None:
        for _ in range(ATTEMPTS):
            client = await self._connected()
            self._closing = True
            try:
                await client.shutdown()
                break
            except BaseException as error:
                self._closing = False
                self._supervise()
                # One that died instead has left its mount: the next one ends in order.
                if client.connected or not isinstance(error, UnavailableError):
                    raise
        else:
            raise UnavailableError(f"the block server died {ATTEMPTS} times instead of ending", hint=f"see {self._log}")
        assert self._process is not None
        await self._process.wait()

    def _supervise(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="block server")
            self._watcher.add_done_callback(_log_failure)

    async def _watch(self) -> None:
        while not self._closing:
            assert self._process is not None
            assert self._client is not None
            await self._client.wait_lost()
            if self._closing:
                return
            await self._announce(None, None)
            try:
                await self._connect()
            except AenvError:
                # Until all its threads are gone one of them may still write.
                status = await self._process.wait()
                if not self._closing:
                    log.error("the block server %s; it is started again", exit_reason(status))
                    await self._restart()

    async def _restart(self) -> None:
        before = self._connection
        for attempt in range(sys.maxsize):
            await asyncio.sleep(PAUSES[min(attempt, len(PAUSES) - 1)])
            try:
                await self._start_server(self._kept)
                break
            except AenvError as error:
                log.error("%s", error)
                if attempt >= PATIENCE:
                    await self._announce(None, error)
        survived = self._connection == before
        log.info("the block server runs again; open files have%s survived", "" if survived else " not")
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback, survived)  # what one of them raises ends nothing here

    async def _announce(self, client: BlockClient | None, failure: AenvError | None) -> None:
        stale, self._client, self._failure = self._client, client, failure
        if stale is not None:
            await stale.close()
        async with self._changed:
            self._changed.notify_all()

    def _let_go(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.detach()
        self._release()

    def _release(self) -> None:
        for fd in self._kept:
            os.close(fd)
        self._kept = []

    # --- calls --------------------------------------------------------------------------------------------------

    async def _connected(self) -> BlockClient:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or self._alive())
        if self._failure is not None:
            raise self._failure
        assert self._client is not None
        return self._client

    def _alive(self) -> bool:
        return self._client is not None and self._client.connected

    async def _call(
        self, first: Callable[[BlockClient], Awaitable[T]], again: Callable[[BlockClient], Awaitable[T]] | None = None
    ) -> T:
        """`again` is done instead of `first` when a server has died in between; it must find out what was done."""
        call = first
        for _ in range(ATTEMPTS):
            client = await self._connected()
            try:
                return await call(client)
            except UnavailableError:
                if client.connected:
                    raise  # the answer of a living server
            call = again or first
        raise UnavailableError(f"the block server died {ATTEMPTS} times during this request", hint=f"see {self._log}")

    async def create(
        self, data: Path, index: Path, size: int, *, uuid: str | None = None, parent_uuid: str = ""
    ) -> str:
        """Make the files of an empty writable layer of `size` bytes; gives its UUID."""
        chosen = uuid or str(uuid4())
        _require_missing(data, index)

        async def once(client: BlockClient) -> str:
            return await client.create(data, index, size, uuid=chosen, parent_uuid=parent_uuid)

        async def again(client: BlockClient) -> str:
            _remove(data, index)  # they were not there before: nobody else has made them
            return await once(client)

        return await self._call(once, again)

    async def open(
        self,
        image: str,
        layers: Sequence[Path] = (),
        *,
        data: Path | None = None,
        index: Path | None = None,
        cached: bool = False,
        uid: int = 0,
        gid: int = 0,
        mode: int = 0o600,
    ) -> dict[str, Any]:
        """Serve an image; gives its description, in which `path` is what to use. See `ublk.protocol.Open`."""

        async def once(client: BlockClient) -> dict[str, Any]:
            return await client.open(image, layers, data=data, index=index, cached=cached, uid=uid, gid=gid, mode=mode)

        async def again(client: BlockClient) -> dict[str, Any]:
            found = await _find(client, image)
            return await once(client) if found is None else found

        return await self._call(once, again)

    async def close_image(self, image: str) -> None:
        """Flush and stop serving it. Raises ConflictError if it is in use."""

        async def again(client: BlockClient) -> None:
            if await _find(client, image) is not None:
                await client.close_image(image)

        await self._call(lambda client: client.close_image(image), again)

    async def restack(self, image: str, data: Path, index: Path, *, uuid: str | None = None) -> Path:
        """Put a new writable layer on top of a served image; gives the path of the layer below it, which is complete
        when `seal` of it has returned."""
        chosen = uuid or str(uuid4())
        _require_missing(data, index)

        async def once(client: BlockClient) -> Path:
            return await client.restack(image, data, index, uuid=chosen)

        async def again(client: BlockClient) -> Path:
            found = await _find(client, image)
            if found is not None and found["data"] == str(data):
                return Path(found["layers"][-1])
            _remove(data, index)
            return await once(client)

        return await self._call(once, again)

    async def replace(self, image: str, layers: Sequence[Path]) -> None:
        """Serve a writable image from other sealed layers of the same content below its writable one."""
        await self._call(lambda client: client.replace(image, layers))

    async def seal(self, data: Path, index: Path) -> None:
        """Seal a writable layer in place, durably; no-op if it is sealed."""
        await self._call(lambda client: client.seal(data, index))

    async def flush(self, image: str) -> None:
        """Make all that was written durable."""
        await self._call(lambda client: client.flush(image))

    async def resize(self, image: str, size: int) -> None:
        """Set the size of an image, in bytes."""
        await self._call(lambda client: client.resize(image, size))

    async def stats(self, image: str | None = None) -> dict[str, Any]:
        """Counters of an image or of the server, since it was started."""
        return await self._call(lambda client: client.stats(image))

    async def list_images(self) -> list[dict[str, Any]]:
        """The descriptions of all images, by name."""
        return await self._call(lambda client: client.list_images())


def control_socket(run_dir: Path) -> Path:
    """Where the server of a run directory listens."""
    return run_dir / "control"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("nobody watches the block server any longer", exc_info=error)


async def _find(client: BlockClient, image: str) -> dict[str, Any] | None:
    return next((found for found in await client.list_images() if found["image"] == image), None)


def _require_missing(*paths: Path) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise ConflictError(f"{path} exists")


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _peer_pid(path: Path) -> int:
    """Who listens there. Raises UnavailableError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        raise UnavailableError(f"{path}: no block server: {error}") from error
    return int.from_bytes(credentials[:4], sys.byteorder)  # struct ucred: pid, uid, gid


def _fetch(path: Path) -> list[int]:
    """The descriptors that keep the server's mount alive. Raises UnavailableError."""
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            _, fds, _, _ = socket.recv_fds(connection, 64, KEPT_MOST)
    except OSError as error:
        raise UnavailableError(f"{path}: the block server does not hand out its mount: {error}") from error
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds
