"""Turns are taken in order, kept for a limited time, and never lost."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from aenv.sandbox.turns import Turns

LONG = 3600.0


def test_in_order_and_no_more_than_there_are_places() -> None:
    async def main() -> None:
        turns, inside, most, order = Turns(2, LONG), 0, 0, []

        async def guest(number: int) -> None:
            nonlocal inside, most
            async with turns.turn():
                order.append(number)
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(guest(number) for number in range(20)))
        assert order == list(range(20))
        assert most == 2

    uvloop.run(main())


@pytest.mark.parametrize("stays", [False, True])
def test_who_takes_too_long_holds_up_nobody(stays: bool) -> None:
    """And leaves no place more, or less, than there was."""

    async def main() -> None:
        turns, gone = Turns(1, 0.01 if stays else LONG), asyncio.Event()

        async def slow() -> None:
            async with turns.turn():
                await gone.wait()

        first = asyncio.create_task(slow())
        await asyncio.sleep(0)
        if not stays:
            gone.set()
        async with turns.turn():  # comes to an end because the first has left, or because its time is over
            assert first.done() is not stays
            gone.set()
            await first
            assert turns._places.locked()
        assert not turns._places.locked()
        async with turns.turn():
            assert turns._places.locked()

    uvloop.run(main())


@pytest.mark.parametrize("waiting", [False, True])
def test_who_gives_up_leaves_its_place(waiting: bool) -> None:
    async def main() -> None:
        turns, never = Turns(1, LONG), asyncio.Event()

        async def guest() -> None:
            async with turns.turn():
                await never.wait()

        tasks = [asyncio.create_task(guest()) for _ in range(2)]
        await asyncio.sleep(0)
        for task in tasks[::-1] if waiting else tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10), turns.turn():
            assert turns._places.locked()
        assert not turns._places.locked()

    uvloop.run(main())


def test_a_failure_leaves_its_place() -> None:
    async def main() -> None:
        turns = Turns(1, LONG)
        with pytest.raises(ValueError, match="no"):
            async with turns.turn():
                raise ValueError("no")
        assert not turns._places.locked()

    uvloop.run(main())
