"""Machines of paused sandboxes that are kept for a while: who resumes soon goes on in the same process.

All that a paused sandbox needs is in files. A parked machine only saves time: a process that has run has the code of
its guest translated and its pages mapped. It is stopped, it is in no record (whoever starts after a daemon that was
killed sweeps it), and it may go at any moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aenv.errors import AenvError, VmmError
from aenv.sandbox.live import Sandbox
from aenv.sandbox.machines import Captured, Machines, Running
from aenv.vmm.base import PAGE, VmState

log = logging.getLogger("aenv.sandbox")

# Bytes that a machine may have captured at its pause. Most become shared with the file, but a guest that has scattered
# its writes keeps them in memory of its own.
CAPTURED_LIMIT = 64 << 20


class Parking:
    """At most `limit` machines, each for at most `seconds`. `retire` ends a machine that was parked, in the background;
    `settle` makes the files of a pause durable."""

    def __init__(
        self,
        machines: Machines,
        limit: int,
        seconds: float,
        *,
        own: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        retire: Callable[[Sandbox, Running], None],
        settle: Callable[[Sandbox], Coroutine[Any, Any, None]],
    ) -> None:
        self._machines = machines
        self._limit = limit
        self._seconds = seconds
        self._own = own
        self._retire = retire
        self._settle = settle
        self._timers: dict[str, tuple[Sandbox, asyncio.TimerHandle]] = {}  # by sandbox, longest parked first

    @property
    def open(self) -> bool:
        """Whether there is any room at all. A machine that is to be parked needs a disk layer of its own for what comes
        after its pause."""
        return self._limit > 0

    def close(self) -> None:
        """End all machines, in the background, and take no more."""
        self._limit = 0
        self._make_room()

    def park(self, sandbox: Sandbox, running: Running, captured: Captured) -> bool:
        """Keep the machine that was just captured, and make the pause durable in the background. False when it is not
        wanted. Nobody else may use it from now on."""
        if not self.open or captured.stats.stored_pages * PAGE > CAPTURED_LIMIT:
            return False
        sandbox.parked = running
        sandbox.ending = self._own(self._share(sandbox, running, captured))
        sandbox.settling = self._own(self._settle_parked(sandbox, running, sandbox.ending, sandbox.settling))
        timer = asyncio.get_running_loop().call_later(self._seconds, self._drop, sandbox, running)
        self._timers[sandbox.id] = sandbox, timer
        running.vm.exited.add_done_callback(lambda _: self._drop(sandbox, running))
        self._make_room()
        return True

    async def take(self, sandbox: Sandbox) -> Running | None:
        """The sandbox's machine, PAUSED and exactly as it was captured, for its next life; None when it has none."""
        running = sandbox.parked
        if running is None:
            return None
        self._stop_timer(sandbox)  # it is in use: nobody drops it now but for its own sake
        if sandbox.ending is not None:
            await asyncio.wait([sandbox.ending])
        if sandbox.parked is not running or running.vm.state is not VmState.PAUSED:
            self.drop(sandbox)
            return None
        sandbox.parked = sandbox.ending = None
        return running.revived()

    def drop(self, sandbox: Sandbox) -> None:
        """Begin to end the machine of a sandbox, if one is parked; `sandbox.ending` tells when it is gone."""
        if sandbox.parked is not None:
            self._drop(sandbox, sandbox.parked)

    def _drop(self, sandbox: Sandbox, running: Running) -> None:
        if sandbox.parked is running:
            self._stop_timer(sandbox)
            sandbox.parked = None
            self._retire(sandbox, running)

    def _make_room(self) -> None:
        for sandbox, _ in list(self._timers.values())[: max(0, len(self._timers) - self._limit)]:
            self.drop(sandbox)

    def _stop_timer(self, sandbox: Sandbox) -> None:
        if sandbox.id in self._timers:
            _, timer = self._timers.pop(sandbox.id)
            timer.cancel()

    async def _share(self, sandbox: Sandbox, running: Running, captured: Captured) -> None:
        """Its memory is that of its layer from now on: it costs less, and the next pause stores only what is new."""
        try:
            await self._machines.rehome(running, captured, sandbox.template.machine)
        except VmmError as error:  # it may be half mapped
            log.warning("sandbox %s is not kept: %s", sandbox.id, error)
            self._drop(sandbox, running)
        except (AenvError, OSError) as error:
            log.warning("sandbox %s does not share its pages with its pause: %s", sandbox.id, error)

    async def _settle_parked(
        self, sandbox: Sandbox, running: Running, shared: asyncio.Task[None], before: asyncio.Task[None] | None
    ) -> None:
        await asyncio.wait([shared] if before is None else [shared, before])
        if sandbox.parked is running:  # else it goes on already, or whoever ends it does this
            await self._settle(sandbox)
