"""The warm pool, with items that are plain objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from aenv.errors import ConflictError, UnavailableError
from aenv.vmm.pool import WarmPool


class Item:
    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number
        self.dead = self.discarded = False


class Factory:
    """Counts what exists, so that leaks show."""

    def __init__(self) -> None:
        self.made: list[Item] = []
        self.making = self.most_at_a_time = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: Exception | None = None

    async def make(self, key: str) -> Item:
        self.making += 1
        self.most_at_a_time = max(self.most_at_a_time, self.making)
        try:
            await self.gate.wait()
            if self.fail is not None:
                raise self.fail
            item = Item(key, len(self.made))
            self.made.append(item)
            return item
        finally:
            self.making -= 1

    async def discard(self, item: Item) -> None:
        assert not item.discarded
        item.discarded = True

    @contextlib.asynccontextmanager
    async def pool(self, size: int = 2, hot: int = 2, quiet: float = 0) -> AsyncIterator[WarmPool[str, Item]]:
        pool = WarmPool(
            self.make,
            self.discard,
            size=size,
            limit=size,
            hot=hot,
            broken=lambda i: i.dead,
            quiet=quiet,
            patience=quiet * 3,
        )
        taken = set()
        original = pool.take

        async def take(key: str) -> Item:
            item = await original(key)
            taken.add(item)
            return item

        pool.take = take  # type: ignore[method-assign]
        try:
            yield pool
        finally:
            await pool.close()
            assert self.making == 0
            assert {i for i in self.made if not i.discarded} == taken, "each item is taken or discarded"


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def test_first_take_makes_and_then_items_wait():
    async def main() -> None:
        factory = Factory()
        async with factory.pool() as pool:
            first = await pool.take("a")
            await until(lambda: pool.count("a") == 2)
            made = list(factory.made)
            second = await pool.take("a")
            assert second in made
            assert second is not first
            await until(lambda: pool.count("a") == 2)
            assert factory.most_at_a_time == 1, "the refill makes one at a time"

    asyncio.run(main())


def test_refill_waits_for_quiet_but_not_for_ever():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(quiet=0.05) as pool:
            loop = asyncio.get_running_loop()
            await pool.take("a")
            await asyncio.sleep(0)
            assert factory.making == 0
            assert len(factory.made) == 1
            begin = loop.time()
            while pool.count("a") == 0:  # a steady stream of uses
                await pool.warm("a")
                await asyncio.sleep(0.005)
                assert loop.time() - begin < 5

    asyncio.run(main())


def test_least_recently_used_key_goes_cold():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(hot=2) as pool:
            for key in ("a", "b", "a", "c"):
                await pool.warm(key)
                await until(lambda key=key: pool.count(key) == 2)
            assert (pool.count("a"), pool.count("b"), pool.count("c")) == (2, 0, 2)
            assert [i.discarded for i in factory.made if i.key == "b"] == [True, True]

    asyncio.run(main())


def test_broken_items_are_not_handed_out():
    async def main() -> None:
        factory = Factory()
        async with factory.pool() as pool:
            await pool.warm("a")
            await until(lambda: pool.count("a") == 2)
            for item in factory.made:
                item.dead = True
            item = await pool.take("a")
            assert not item.dead
            await until(lambda: pool.count("a") == 2)
            assert [i.discarded for i in factory.made[:2]] == [True, True]

    asyncio.run(main())


def test_take_joins_the_item_that_is_being_made():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1) as pool:
            factory.gate.clear()
            await pool.warm("a")
            await until(lambda: factory.making == 1)
            joined = asyncio.create_task(pool.take("a"))
            await asyncio.sleep(0)
            own = asyncio.create_task(pool.take("a"))
            other = asyncio.create_task(pool.take("b"))
            await until(lambda: factory.making == 3)
            factory.gate.set()
            items = await asyncio.gather(joined, own, other)
            assert [i.key for i in items] == ["a", "a", "b"]
            assert len(set(items)) == 3

    asyncio.run(main())


def test_failure_of_the_factory_reaches_the_taker_and_stops_the_refill():
    async def main() -> None:
        factory = Factory()
        async with factory.pool() as pool:
            factory.fail = UnavailableError("no memory")
            with pytest.raises(UnavailableError):
                await pool.take("a")
            factory.gate.clear()
            await until(lambda: factory.making == 1)
            joined = asyncio.create_task(pool.take("a"))
            await asyncio.sleep(0)
            factory.gate.set()
            with pytest.raises(UnavailableError):
                await joined
            await asyncio.sleep(0.01)
            assert factory.making == 0, "no endless retry"
            factory.fail = None
            assert (await pool.take("a")).key == "a"
            await until(lambda: pool.count("a") == 2)

    asyncio.run(main())


def test_cancelled_takers_lose_nothing():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1) as pool:
            factory.gate.clear()
            await pool.warm("a")
            await until(lambda: factory.making == 1)
            joined = asyncio.create_task(pool.take("a"))
            await asyncio.sleep(0)
            joined.cancel()
            await asyncio.sleep(0)
            factory.gate.set()
            await until(lambda: pool.count("a") == 1)
            # Cancelled in the very step in which the item is given to it.
            await pool.take("a")
            factory.gate.clear()
            await until(lambda: factory.making == 1)
            joined = asyncio.create_task(pool.take("a"))
            await asyncio.sleep(0)
            claim = pool._claim
            assert claim is not None
            claim.add_done_callback(lambda _: joined.cancel())
            factory.gate.set()
            with contextlib.suppress(asyncio.CancelledError):
                await joined

    asyncio.run(main())


def test_close_while_making():
    async def main() -> None:
        factory = Factory()
        async with factory.pool() as pool:
            factory.gate.clear()
            await pool.warm("a")
            await until(lambda: factory.making == 1)
            joined = asyncio.create_task(pool.take("a"))
            await asyncio.sleep(0)
            await pool.close()
            with pytest.raises(ConflictError):
                await joined
            with pytest.raises(ConflictError):
                await pool.take("a")
            await pool.warm("a")
            assert factory.making == 0

    asyncio.run(main())


def test_cool_discards_and_an_item_in_the_making_is_dropped():
    async def main() -> None:
        factory = Factory()
        async with factory.pool() as pool:
            await pool.warm("a")
            await until(lambda: pool.count("a") == 2)
            await pool.cool("a")
            assert all(i.discarded for i in factory.made)
            await pool.warm("a")
            factory.gate.clear()
            await until(lambda: factory.making == 1)
            await pool.cool("a")
            factory.gate.set()
            await until(lambda: factory.making == 0 and all(i.discarded for i in factory.made))
            assert pool.count("a") == 0

    asyncio.run(main())


def test_pool_of_size_zero_makes_each_item():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=0) as pool:
            await pool.warm("a")
            assert (await pool.take("a")).number == 0
            await asyncio.sleep(0.01)
            assert len(factory.made) == 1

    asyncio.run(main())


def test_ready_waits_for_the_first_item_of_a_warm_key() -> None:
    async def main() -> None:
        factory = Factory()
        factory.gate.clear()
        async with factory.pool() as pool:
            await pool.warm("a")
            waiters = [asyncio.create_task(pool.ready("a")) for _ in range(3)]
            await pool.ready("unknown")  # not warm: nothing will come
            await asyncio.sleep(0)
            assert not any(w.done() for w in waiters)
            waiters[0].cancel()
            factory.gate.set()
            await asyncio.gather(*waiters[1:])
            assert pool.count("a") > 0

    asyncio.run(main())


@pytest.mark.parametrize("end", ["failure", "close"])
def test_ready_does_not_wait_for_what_never_comes(end: str) -> None:
    async def main() -> None:
        factory = Factory()
        factory.gate.clear()
        async with factory.pool() as pool:
            await pool.warm("a")
            waiter = asyncio.create_task(pool.ready("a"))
            await asyncio.sleep(0)
            if end == "failure":
                factory.fail = UnavailableError("no")
                factory.gate.set()
            else:
                await pool.close()
            await waiter
            assert pool.count("a") == 0

    asyncio.run(main())
