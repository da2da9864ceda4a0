"""Slots made ahead of time. `take` gives one at once as long as the pool keeps up.

A used slot is never given out again: `release` removes it with everything in it (connection tracking, neighbours,
offload and filter settings that a VMM may have put on the tap) and the pool makes a new one. That takes tens of
milliseconds of a worker thread, which nobody waits for, and needs no list of all the state there could be.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import re
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aenv.errors import AenvError, ConflictError, UnavailableError
from aenv.network import namespace
from aenv.network.base import Uplink
from aenv.network.nft import Nft
from aenv.network.slot import Fabric, Slot, adopt_slot, create_slot, delete_slot, in_worker
from aenv.network.uplink import DEFAULT_TRANSIT, MAX_SLOTS, UplinkSide, max_index

_log = logging.getLogger(__name__)

# Making and removing devices takes the kernel's one RTNL lock, so more threads would only queue for it. The other
# threads are for policy changes, which somebody waits for and which take no RTNL.
_MAKERS = 2
_THREADS = _MAKERS + 2
_RETRY_SECONDS = 5.0


class SlotPool:
    """All slots of one daemon. Build it and use it inside one event loop; `start` first, `close` last."""

    def __init__(
        self, *, uplink: Uplink, size: int, tag: str, limit: int = MAX_SLOTS, transit: str = DEFAULT_TRANSIT
    ) -> None:
        """`size`: slots kept ready. `limit`: slots that may exist at a time, at most `MAX_SLOTS`.

        `tag`: four to eight hex digits that no other daemon on this machine has. Raises ValueError.
        """
        if not re.fullmatch(r"[0-9a-f]{4,8}", tag):
            raise ValueError(f"expected a tag of four to eight hex digits, got {tag!r}")
        self._uplink = uplink
        self._size = size
        self._tag = tag
        self._limit = min(limit, MAX_SLOTS, max_index(tag) + 1)
        self._transit = transit
        self._fabric: Fabric | None = None
        self._ready: list[Slot] = []
        self._used: dict[int, Slot] = {}
        self._waiting: list[asyncio.Future[Slot]] = []
        self._making = 0
        self._removing = 0
        self._free: list[int] = []  # indices given back, a heap
        self._fresh = itertools.count()
        self._kept: set[int] = set()  # to be adopted
        self._taken: set[int] = set()  # indices that exist, are being made, or could not be removed
        self._makers = asyncio.Semaphore(_MAKERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._started = False
        self._closing = False

    async def start(self, keep: Iterable[int] = ()) -> None:
        """Prepare the uplink, remove what an earlier daemon of this tag left except the indices of `keep` (to be
        adopted), and begin to fill the pool.

        Raises InvalidInputError (uplink), UnavailableError (permission, kernel, library).
        """
        kept = set(keep)
        loop = asyncio.get_running_loop()
        nft = Nft()
        executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="aenv-network")
        try:
            side = await loop.run_in_executor(executor, UplinkSide.open, self._uplink, self._tag, nft, self._transit)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        self._fabric = fabric = Fabric(self._tag, side, nft, executor)
        try:
            existing = set(namespace.list_indices(self._tag))
            self._kept = set(kept)
            self._taken |= kept | existing
            if side:
                await loop.run_in_executor(executor, side.sweep, kept)
            await asyncio.gather(*(self._remove(fabric, index) for index in existing - kept))
        except BaseException:
            await self.close(keep=kept)
            raise
        self._started = True
        self._fill()

    async def take(self) -> Slot:
        """A slot no guest has used, with the default policy; the caller gives it to `release` in the end.

        Raises UnavailableError: the limit is reached, or the kernel refused to make one.
        """
        self._running()
        if self._ready:
            slot = self._ready.pop()
            self._used[slot.index] = slot
            self._fill()
            return slot
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._fill()
        self._refuse_hopeless(UnavailableError(f"all {self._limit} network slots are in use"))
        try:
            slot = await future
        except asyncio.CancelledError:
            if future in self._waiting:
                self._waiting.remove(future)
            elif not future.cancelled() and not future.exception():
                self._ready.append(self._used.pop(future.result().index))
            raise
        return slot

    async def adopt(self, index: int) -> Slot:
        """The slot of a VM that outlived an earlier daemon, with the policy it had; `start` must have kept it.

        Raises NotFoundError (what is left of it goes), ConflictError (`start` did not keep it, or it is in use).
        """
        fabric = self._running()
        if index not in self._kept:
            raise ConflictError(f"network slot {index} was not kept for adoption")
        self._kept.discard(index)
        try:
            self._used[index] = slot = await in_worker(fabric, adopt_slot, index)
        except AenvError:
            self._spawn(self._remove(fabric, index))
            raise
        return slot

    async def release(self, slot: Slot) -> None:
        """Give a slot back: it is unusable from now on and is removed in the background. May be called twice."""
        fabric = self._running()
        if self._used.get(slot.index) is not slot:  # given back before; somebody else may have the index by now
            return
        del self._used[slot.index]
        slot.close_handle()
        self._spawn(self._remove(fabric, slot.index))

    async def close(self, keep: Iterable[int] = ()) -> None:
        """Remove all slots but those of `keep`, which stay as they are for the next daemon. May be called twice."""
        if self._closing or self._fabric is None:
            return
        self._closing = True
        fabric, kept = self._fabric, set(keep)
        if self._retry:
            self._retry.cancel()
        for future in self._waiting:
            if not future.done():
                future.set_exception(UnavailableError("the network pool is closing"))
        self._waiting.clear()
        while self._tasks:  # a slot being made cannot be interrupted: its thread is in the kernel
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in [*self._ready, *self._used.values()]:
            slot.close_handle()
        remaining = set(namespace.list_indices(self._tag)) - kept
        await asyncio.gather(*(self._remove(fabric, index) for index in remaining))
        if fabric.uplink:
            side, loop = fabric.uplink, asyncio.get_running_loop()
            await loop.run_in_executor(fabric.executor, lambda: side.close(remove_table=not kept))
        fabric.executor.shutdown(wait=True)

    def ready(self) -> int:
        """Slots that `take` would give at once."""
        return len(self._ready)

    async def settled(self) -> None:
        """Wait until nothing is being made or removed in the background."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _running(self) -> Fabric:
        if self._fabric is None or self._closing:
            raise UnavailableError("the network pool is not running")
        return self._fabric

    def _fill(self) -> None:
        """Begin to make as many slots as are missing, within the limit."""
        fabric = self._running()
        missing = self._size + len(self._waiting) - len(self._ready) - self._making
        for _ in range(min(missing, self._limit - len(self._taken))):
            index = self._next_index()
            self._making += 1
            self._spawn(self._make(fabric, index))

    def _next_index(self) -> int:
        """The lowest index nobody has: addresses derive from it, so it must stay below MAX_SLOTS."""
        while self._free:
            index = heapq.heappop(self._free)
            if index not in self._taken:
                break
        else:
            index = next(i for i in self._fresh if i not in self._taken)
        self._taken.add(index)
        return index

    async def _make(self, fabric: Fabric, index: int) -> None:
        try:
            async with self._makers:
                slot = await in_worker(fabric, create_slot, index)
        except Exception as error:  # whatever it is, somebody waits to hear of it
            self._making -= 1
            self._give_back(index)
            self._failed(error)
            return
        self._making -= 1
        while self._waiting:
            future = self._waiting.pop(0)
            if not future.done():
                self._used[index] = slot
                future.set_result(slot)
                return
        self._ready.append(slot)

    def _refuse_hopeless(self, error: Exception) -> None:
        """Fail the last waiters, as many as neither a slot in the making nor one being removed can serve."""
        self._waiting = [future for future in self._waiting if not future.done()]
        while len(self._waiting) > self._making + self._removing:
            self._waiting.pop().set_exception(error)

    def _failed(self, error: Exception) -> None:
        """Whoever waits for this slot learns why; the pool tries again later, not at once: the cause may last."""
        _log.warning("cannot make a network slot: %s", error)
        self._refuse_hopeless(error)
        if self._retry is None and not self._closing:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._fill()

    def _remove(self, fabric: Fabric, index: int) -> Coroutine[Any, Any, None]:
        """Counts the removal at once, so that a `take` before its first step knows an index will be free soon."""
        self._removing += 1
        return self._finish_removal(fabric, index)

    async def _finish_removal(self, fabric: Fabric, index: int) -> None:
        try:
            async with self._makers:
                await in_worker(fabric, delete_slot, index)
        except AenvError as error:
            # Its index stays taken: a slot that may still be there must not be given out under the same name.
            _log.exception("cannot remove network slot %d", index)
            self._removing -= 1
            self._refuse_hopeless(error)
            return
        self._removing -= 1
        self._give_back(index)
        if self._started and not self._closing:
            self._fill()

    def _give_back(self, index: int) -> None:
        self._taken.discard(index)
        heapq.heappush(self._free, index)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
