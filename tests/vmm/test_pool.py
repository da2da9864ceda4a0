"""The warm pool, with items that are plain objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from aenv.errors import ConflictError, UnavailableError
from aenv.vmm.pool import DEMAND, WarmPool


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
    async def pool(
        self, size: int = 2, hot: int = 2, quiet: float = 0, limit: int = 0
    ) -> AsyncIterator[WarmPool[str, Item]]:
        """With a `limit` of 0 the pool does not grow."""
        pool = WarmPool(
            self.make,
            self.discard,
            size=size,
            limit=limit,
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


def test_a_pool_grows_with_demand_up_to_its_limit():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1, limit=4) as pool:
            await pool.warm("a")
            await until(lambda: pool.count("a") == 1)
            for taken, ready in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (9, 4)):
                while len(pool._takes.get("a", ())) < min(taken, 4):
                    await pool.take("a")
                await until(lambda ready=ready: pool.count("a") == ready)
            await pool.take("a")
            await until(lambda: pool.count("a") == 4)
            assert factory.most_at_a_time == 1

    asyncio.run(main())


def test_each_key_has_a_demand_of_its_own():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1, limit=3) as pool:
            for key in "aaab":
                await pool.take(key)
            await until(lambda: (pool.count("a"), pool.count("b")) == (3, 1))

    asyncio.run(main())


def test_a_pool_shrinks_when_the_demand_is_over():
    async def main() -> None:
        factory = Factory()
        loop = asyncio.get_running_loop()
        real, ahead = loop.time, 0.0
        async with factory.pool(size=1, limit=4) as pool:
            for _ in range(3):
                await pool.take("a")
            await until(lambda: pool.count("a") == 3)
            loop.time = lambda: real() + ahead  # type: ignore[method-assign]
            try:
                ahead = DEMAND / 2
                await pool.take("a")  # still wanted then, the others are not
                await until(lambda: pool.count("a") == 4)
                ahead = DEMAND + 0.5
                await until(lambda: pool.count("a") == 1)
                ahead = 2 * DEMAND
                for _ in range(20):
                    await asyncio.sleep(0)
                assert pool.count("a") == 1  # never fewer than `size`
            finally:
                del loop.time

    asyncio.run(main())


def test_an_item_that_grew_old_with_its_key_goes_with_it():
    """Cooling or forgetting a key ends its demand; the next use begins with `size` items."""

    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1, limit=4, hot=1) as pool:
            for _ in range(3):
                await pool.take("a")
            await until(lambda: pool.count("a") == 3)
            await pool.cool("a")
            await pool.warm("a")
            await until(lambda: pool.count("a") == 1)
            for _ in range(3):
                await pool.take("a")
            await until(lambda: pool.count("a") == 3)
            await pool.warm("b")
            await until(lambda: pool.count("b") == 1)
            await pool.warm("a")
            await until(lambda: pool.count("a") == 1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert pool.count("a") == 1

    asyncio.run(main())


def test_a_pool_with_demand_is_closed_without_a_trace():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1, limit=3) as pool:
            for _ in range(3):
                await pool.take("a")
            await until(lambda: pool.count("a") == 3)
            await pool.close()
            assert pool._shrink is None
            with pytest.raises(ConflictError):
                pool.take_ready("a")

    asyncio.run(main())


def test_take_ready_waits_for_nothing():
    async def main() -> None:
        factory = Factory()
        async with factory.pool(size=1) as pool:
            assert pool.take_ready("a") is None
            await until(lambda: pool.count("a") == 1)
            factory.made[0].dead = True
            assert pool.take_ready("a") is None  # a broken one is none
            await until(lambda: pool.count("a") == 1)
            item = pool.take_ready("a")
            assert item is factory.made[-1]
            item.discarded = True  # taken: ours to end

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
