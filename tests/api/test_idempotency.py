from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aenv.api.errors import CodedError
from aenv.api.idempotency import IdempotencyTable
from aenv.errors import UnavailableError


class Counter:
    def __init__(self) -> None:
        self.started = 0
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.failure: Exception | None = None

    async def run(self) -> int:
        self.started += 1
        number = self.started
        self.begun.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return number


def scenario(steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(steps())


def test_callers_at_the_same_time_and_later_share_one_outcome() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable()
        counter = Counter()
        both = asyncio.gather(*(table.run("k", b"same", counter.run) for _ in range(3)))
        counter.gate.set()
        assert await both == [1, 1, 1]
        assert await table.run("k", b"same", counter.run) == 1
        assert await table.run("other", b"same", counter.run) == 2

    scenario(steps)


def test_other_request_with_the_same_key() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable()
        counter = Counter()
        first = asyncio.ensure_future(table.run("k", b"one", counter.run))
        await asyncio.sleep(0)
        for _ in range(2):  # while it is under way, and when it is done
            with pytest.raises(CodedError) as caught:
                await table.run("k", b"two", counter.run)
            assert (caught.value.status, caught.value.error_code) == (422, "idempotency_request_mismatch")
            counter.gate.set()
            await first
        assert counter.started == 1

    scenario(steps)


def test_failure_is_not_remembered() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable()
        counter = Counter()
        counter.gate.set()
        counter.failure = UnavailableError("full")
        with pytest.raises(UnavailableError):
            await table.run("k", b"one", counter.run)
        counter.failure = None
        assert await table.run("k", b"two", counter.run) == 2

    scenario(steps)


def test_operation_outlives_its_caller() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable()
        counter = Counter()
        first = asyncio.ensure_future(table.run("k", b"one", counter.run))
        await counter.begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        counter.gate.set()
        assert await table.run("k", b"one", counter.run) == 1
        assert counter.started == 1

    scenario(steps)


def test_oldest_make_room_but_never_one_under_way() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable(max_entries=2)
        slow, quick = Counter(), Counter()
        quick.gate.set()
        waiting = asyncio.ensure_future(table.run("slow", b"", slow.run))
        await asyncio.sleep(0)
        for key in ("a", "b", "c"):
            await table.run(key, b"", quick.run)
        assert await table.run("c", b"", quick.run) == 3
        assert await table.run("a", b"", quick.run) == 4  # was dropped
        slow.gate.set()
        assert await waiting == 1
        assert await table.run("slow", b"", slow.run) == 1

    scenario(steps)


def test_outcomes_age() -> None:
    async def steps() -> None:
        table: IdempotencyTable[int] = IdempotencyTable(lifetime=-1)
        counter = Counter()
        counter.gate.set()
        assert await table.run("k", b"one", counter.run) == 1
        assert await table.run("k", b"two", counter.run) == 2

    scenario(steps)
