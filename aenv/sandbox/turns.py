"""Whose guest computes its first answer now, when many are brought up at once.

A guest that has just been restored needs much processor time until it answers: its pages are mapped one by one, and
under emulation its code is translated again. If all children of a fork do that at the same time, each takes as long as
all together, and throws the others out of the processors' caches. As many at a time as there are processors, the first
ones answer early, and the last one answers sooner than it would otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """`places` at a time, in the order of asking, for `longest` seconds at most: who takes longer than that waits for
    something else than a processor."""

    def __init__(self, places: int, longest: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._longest = longest

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        await self._places.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                self._places.release()

        over = asyncio.get_running_loop().call_later(self._longest, leave)
        try:
            yield
        finally:
            over.cancel()
            leave()
