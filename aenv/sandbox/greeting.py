"""What a guest's agent is told first, after every start: who it is now, and what time it is."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

from aenv.agent.client import Agent, Init, identity
from aenv.errors import GuestError, NotFoundError
from aenv.sandbox.live import Sandbox
from aenv.sandbox.machines import Running

log = logging.getLogger("aenv.sandbox")

CLOCK_AHEAD = 0.05  # seconds that a guest's clock may be set ahead at most
CLOCK_TOLERANCE = 0.08  # seconds that it may be late without being set again
CORRECTION_TIMEOUT = 5.0  # seconds


class Greeting:
    """Greets the guests of a node, and learns how long they take to answer. `patience` is in seconds."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._answers = 0.0  # seconds that guests take to answer /init of late

    async def greet(self, sandbox: Sandbox, running: Running, token: str | None) -> Coroutine[Any, Any, None] | None:
        """POST /init until the agent has answered: a restored one does so at once, a booting one in some seconds.

        On a busy host the guest's clock may be late after that: then there is work to be done behind the caller's
        answer. Raises GuestError, with the end of the console, and NotFoundError when the sandbox is killed meanwhile.
        """
        manifest, options = sandbox.template.manifest, sandbox.record.options
        agent = running.agent(None)
        deadline = asyncio.get_running_loop().time() + self._patience
        body = identity(
            sandbox.id,
            sandbox.template.id,
            token=token,
            env={**manifest.context.env, **options.env},
            user=manifest.context.user,
            workdir=manifest.context.workdir or "",
            incarnation=running.incarnation,
            machine_id=sandbox.record.machine_id or secrets.token_hex(16),
        )
        sandbox.record.machine_id = body.machine_id
        last = "no answer"
        while True:
            if running.closed.done():
                raise NotFoundError(f"sandbox {sandbox.id} was killed while it started")
            try:
                late = await self._tell(agent, body, running, deadline)
                return self._correct_clock(agent, body, running) if late > CLOCK_TOLERANCE else None
            except (GuestError, TimeoutError) as error:
                last = str(error) or last
            if running.vm.exited.done():
                outcome = running.vm.exited.result()
                raise GuestError(f"the machine ended while it started: {outcome.reason}\n{outcome.serial_tail}".strip())
            if asyncio.get_running_loop().time() >= deadline:
                tail = await running.vm.serial_tail()
                raise GuestError(
                    f"the guest agent did not answer within {self._patience} s ({last}); "
                    f"end of the serial console:\n{tail}"
                )
            await asyncio.wait([running.vm.exited], timeout=0.05)  # it boots: nothing tells when its agent listens

    async def _tell(self, agent: Agent, body: Init, running: Running, deadline: float) -> float:
        """One POST /init. The guest sets its clock somewhere between our question and its answer, so it is told the
        time in the middle of that, as far as the answers before tell. Returns how late its clock may be, in seconds."""
        loop = asyncio.get_running_loop()
        began, ahead = loop.time(), min(self._answers / 2, CLOCK_AHEAD)
        body.timestamp = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        await self._first(agent.init(body), running, deadline)
        took = loop.time() - began
        self._answers += (took - self._answers) / 4
        return took - ahead

    async def _correct_clock(self, agent: Agent, body: Init, running: Running) -> None:
        """Tell the time once more: this answer is quick, for the code that gives it has run. It is on its way before
        whoever waits for the sandbox hears of it, and the agent takes one request after the other."""
        try:
            await self._tell(agent, body, running, asyncio.get_running_loop().time() + CORRECTION_TIMEOUT)
        except (GuestError, TimeoutError) as error:
            log.info("the clock of sandbox %s was not corrected: %s", body.sandbox_id, error)

    async def _first(self, work: Coroutine[Any, Any, None], running: Running, deadline: float) -> None:
        """Wait for `work`, but not longer than its machine lives. Raises TimeoutError when it did not finish."""
        attempt = asyncio.ensure_future(work)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            events: list[asyncio.Future[Any]] = [attempt, running.closed, running.vm.exited]
            await asyncio.wait(events, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                raise TimeoutError
            attempt.result()
        finally:
            attempt.cancel()
