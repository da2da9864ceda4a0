"""Fewer layers for the same content: neighbours of a chain become one.

Snapshots and machines that use the old layers go on doing so; the old files are removed with their last user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from aenv._native.lsmt import CommitResult, Layer, Stack, Stop
from aenv.errors import UnavailableError
from aenv.snapshot.manifest import sync_directory

# Layers above the base before some are merged: each costs an index to read and a file to open when a machine starts.
DEPTH_LIMIT = 8
# A layer below is taken in as long as it is at most so many times as large as all that is merged already.
SIZE_RATIO = 2


def worth_merging(sizes: Sequence[int], depth_limit: int = DEPTH_LIMIT) -> slice | None:
    """Which neighbours of a chain of layers to merge, or None. `sizes` are their files' sizes in bytes, lowest first,
    without the base.

    As in a log-structured merge tree each byte is copied about log2(all / newest) times: large old layers are left in
    peace until as much has gathered above them. But at least so many are merged that the chain is short again.
    """
    count = len(sizes)
    if count <= depth_limit:
        return None
    first, merged = count - 1, sizes[-1]
    while first > 0 and (sizes[first - 1] <= SIZE_RATIO * merged or count - first <= count - depth_limit):
        first -= 1
        merged += sizes[first]
    return slice(first, count)


async def compact(layers: Sequence[Path], out: Path, *, below: bool) -> CommitResult:
    """Merge neighbouring layers (lowest first) into the new sealed layer `out`, durably, with the lowest priorities.

    `below`: something lies below them, so zeros that hide it are kept. The layers are only read, while others use them.
    When it is cancelled or fails there is no `out`. Raises InvalidInputError (a layer is damaged, or there would be too
    many segments), NotFoundError and UnavailableError (I/O, disk full).
    """
    stop = Stop()
    done: asyncio.Future[CommitResult] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def report(result: CommitResult | None, error: BaseException | None) -> None:
        if error is not None:
            done.set_exception(error)
        elif result is not None:
            done.set_result(result)

    def run() -> None:
        result, problem = None, None
        try:
            result = _merge(layers, out, below, stop)
        except BaseException as error:
            problem = error
        loop.call_soon_threadsafe(report, result, problem)

    threading.Thread(target=run, name="compaction").start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop.set()
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        if done.exception() is None:
            out.unlink(missing_ok=True)
        raise


def _merge(layers: Sequence[Path], out: Path, below: bool, stop: Stop) -> CommitResult:
    stack = Stack([Layer(path) for path in layers])
    try:
        fd = os.open(out, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"cannot create {out}: {error.strerror}") from error
    try:
        result = stack.commit_in_background(fd, stop, uuid=str(uuid.uuid4()), keep_zeros=below)
        sync_directory(out.parent)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return result
