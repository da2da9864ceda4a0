"""Things that take long to make, kept ready for the keys that were used last (machines per snapshot)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from aenv.errors import ConflictError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

log = logging.getLogger(__name__)

# Seconds without a take before a refill begins: it would compete with the item just taken for the same processors.
QUIET = 0.1
# A steady stream of takes does not put a refill off for longer than this.
PATIENCE = 1.0
# Seconds that a take counts as demand: as many items are kept ready as were taken in that time, within limits.
DEMAND = 30.0


class WarmPool(Generic[K, T]):
    """Items for each of the `hot` keys used last: `size` of them, or as many as were taken of late, up to `limit`. They
    are made one at a time, in the background, and those that are no longer in demand are discarded.

    `make` must clean up after itself when it fails or is cancelled. `broken` says that a waiting item is of no use any
    more; it is given to `discard` and not handed out. Used from one event loop only.
    """

    def __init__(
        self,
        make: Callable[[K], Awaitable[T]],
        discard: Callable[[T], Awaitable[None]],
        *,
        size: int,
        limit: int,
        hot: int,
        broken: Callable[[T], bool],
        quiet: float = QUIET,
        patience: float = PATIENCE,
    ) -> None:
        self._make = make
        self._discard = discard
        self._size = size
        self._limit = max(size, limit)
        self._hot = hot
        self._broken = broken
        self._quiet = quiet
        self._patience = patience
        self._ready: OrderedDict[K, deque[T]] = OrderedDict()  # most recently used key last
        self._takes: dict[K, deque[float]] = {}  # when items of a key were taken, newest last
        self._shrink: asyncio.TimerHandle | None = None
        self._failed: set[K] = set()  # not tried again before their next use
        self._making: K | None = None
        self._claim: asyncio.Future[T] | None = None  # who gets the item that is being made
        self._wanted_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refill: asyncio.Task[None] | None = None
        self._discards: set[asyncio.Task[None]] = set()
        self._closed = False
        self._news: asyncio.Future[None] | None = None  # done at the end of each refill

    def count(self, key: K) -> int:
        """How many items wait for `key`."""
        return len(self._ready.get(key, ()))

    async def take(self, key: K) -> T:
        """A ready item, else the one that is just being made, else a new one. Raises what `make` raises, and
        ConflictError when the pool is closed."""
        item = self.take_ready(key)
        if item is not None:
            return item
        try:
            if self._making == key and self._refill is not None and self._claim is None:
                return await self._join_refill()
            return await self._make(key)
        finally:
            self._schedule()

    def take_ready(self, key: K) -> T | None:
        """A ready item, or None: for a caller who knows a quicker way than to wait for a new one."""
        if self._closed:
            raise ConflictError("the pool is closed")
        self._use(key)
        self._note_take(key)
        try:
            items = self._ready.get(key)
            while items:
                item = items.popleft()
                if not self._broken(item):
                    return item
                self._drop(item)
            return None
        finally:
            self._schedule()

    async def warm(self, key: K) -> None:
        """Count `key` as used: items for it are made soon."""
        if not self._closed:
            self._use(key)
            self._schedule()

    async def ready(self, key: K) -> None:
        """Wait until an item for a warm `key` is there, or making one has failed."""
        while not self._closed and key in self._ready and not self._ready[key] and key not in self._failed:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)

    async def cool(self, key: K) -> None:
        """Forget `key` and discard its items; waits for that."""
        self._takes.pop(key, None)
        for item in self._ready.pop(key, ()):
            self._drop(item)
        if self._discards:
            await asyncio.wait(set(self._discards))

    async def close(self) -> None:
        """Stop refilling and discard all items. `take` fails from now on."""
        self._closed = True
        self._tell()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._shrink is not None:
            self._shrink.cancel()
            self._shrink = None
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait({self._refill})
        while self._ready:
            _, items = self._ready.popitem()
            for item in items:
                self._drop(item)
        if self._discards:
            await asyncio.wait(set(self._discards))

    def _use(self, key: K) -> None:
        self._failed.discard(key)
        if self._size == 0 or self._hot == 0:
            return
        self._ready.setdefault(key, deque())
        self._ready.move_to_end(key)
        while len(self._ready) > self._hot:
            forgotten, items = self._ready.popitem(last=False)
            self._takes.pop(forgotten, None)
            for item in items:
                self._drop(item)

    def _note_take(self, key: K) -> None:
        if key in self._ready:
            takes = self._takes.setdefault(key, deque(maxlen=self._limit))
            takes.append(asyncio.get_running_loop().time())

    def _wanted(self, key: K) -> int:
        """How many items should wait for a key."""
        takes = self._takes.get(key, deque())
        since = asyncio.get_running_loop().time() - DEMAND
        while takes and takes[0] <= since:
            takes.popleft()
        return max(self._size, len(takes))

    def _shrink_later(self) -> None:
        """Look again when the oldest take no longer counts, as long as there is more than `size` for any key."""
        oldest = [takes[0] for key, takes in self._takes.items() if takes and len(self._ready[key]) > self._size]
        if self._shrink is None and oldest and not self._closed:
            self._shrink = asyncio.get_running_loop().call_at(min(oldest) + DEMAND, self._shrink_now)

    def _shrink_now(self) -> None:
        self._shrink = None
        for key, items in self._ready.items():
            while len(items) > self._wanted(key):
                self._drop(items.popleft())
        self._shrink_later()

    async def _join_refill(self) -> T:
        claim: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._claim = claim
        try:
            return await claim
        except asyncio.CancelledError:
            if claim.done() and not claim.cancelled() and claim.exception() is None:
                self._drop(claim.result())
            raise

    def _drop(self, item: T) -> None:
        task = asyncio.get_running_loop().create_task(self._discard_one(item))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    async def _discard_one(self, item: T) -> None:
        try:
            await self._discard(item)
        except Exception:
            log.exception("a pooled item could not be discarded")

    # Refill

    def _missing(self) -> K | None:
        """The most recently used key that lacks an item."""
        for key in reversed(self._ready):
            items = self._ready[key]
            for item in [i for i in items if self._broken(i)]:
                items.remove(item)
                self._drop(item)
            if key not in self._failed and len(items) < self._wanted(key):
                return key
        return None

    def _schedule(self) -> None:
        """Refill after a while of quiet. The timer is set anew by each use, within limits."""
        if self._closed or self._refill is not None or self._missing() is None:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._wanted_since = loop.time()
        else:
            self._timer.cancel()
        when = min(loop.time() + self._quiet, self._wanted_since + self._patience)
        self._timer = loop.call_at(when, self._start_refill)

    def _start_refill(self) -> None:
        self._timer = None
        key = self._missing()
        if key is not None and not self._closed:
            self._making = key
            self._refill = asyncio.get_running_loop().create_task(self._refill_one(key))

    async def _refill_one(self, key: K) -> None:
        try:
            item = await self._make(key)
        except asyncio.CancelledError:
            if (claim := self._waiting_claim()) is not None:
                claim.set_exception(ConflictError("the pool is closed"))
            raise
        except Exception as error:
            self._failed.add(key)
            if (claim := self._waiting_claim()) is not None:
                claim.set_exception(error)
            else:
                log.warning("cannot keep one ready for %s: %s", key, error)
        else:
            if (claim := self._waiting_claim()) is not None:
                claim.set_result(item)
            elif key in self._ready and not self._closed:
                self._ready[key].append(item)
                self._shrink_later()
            else:
                self._drop(item)
        finally:
            self._making = self._refill = self._claim = None
            self._tell()
            self._schedule()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    def _waiting_claim(self) -> asyncio.Future[T] | None:
        return None if self._claim is None or self._claim.done() else self._claim
