"""What running guests tell about themselves: metrics and console lines, sampled once an interval; and events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from aenv.errors import GuestError, VmmError
from aenv.observe.events import Event
from aenv.observe.events import record as record_event
from aenv.observe.logs import LogStore
from aenv.observe.metrics import MetricPoint, MetricStore
from aenv.sandbox.live import Sandbox
from aenv.sandbox.service import SandboxState

log = logging.getLogger("aenv.sandbox")

METRICS_INTERVAL = 5.0  # seconds


class Telemetry:
    """Logs and metrics of all sandboxes. `token` gives the token with which a sandbox's agent is asked."""

    def __init__(self, token: Callable[[Sandbox], str | None]) -> None:
        self.logs = LogStore()
        self.metrics = MetricStore()
        self._token = token
        self._sampler: asyncio.Task[None] | None = None

    def start(self, sandboxes: Callable[[], Iterable[Sandbox]]) -> None:
        self._sampler = asyncio.create_task(self._sample(sandboxes), name="metrics sampler")

    async def close(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.gather(self._sampler, return_exceptions=True)

    def event(self, sandbox: Sandbox, event: Event, detail: str) -> None:
        log.info("sandbox %s %s: %s", sandbox.id, event.value, detail)
        record_event(self.logs.ring(sandbox.id), event, detail)

    def forget(self, sandbox: Sandbox) -> None:
        self.metrics.forget(sandbox.id)
        self.logs.forget(sandbox.id)

    async def _sample(self, sandboxes: Callable[[], Iterable[Sandbox]]) -> None:
        """Ask every running guest for its metrics and what it wrote to its console, once an interval."""
        while True:
            await asyncio.gather(*(self._sample_one(s) for s in list(sandboxes())))
            await asyncio.sleep(METRICS_INTERVAL)

    async def _sample_one(self, sandbox: Sandbox) -> None:
        running = sandbox.running
        if sandbox.state is not SandboxState.RUNNING or running is None:
            return
        try:
            async with asyncio.timeout(METRICS_INTERVAL):
                for line in await running.console_lines():
                    self.logs.ring(sandbox.id).append(line, fields={"source": "console"})
                m = await running.agent(self._token(sandbox)).metrics()
        except (GuestError, VmmError, TimeoutError) as error:
            log.debug("no metrics of sandbox %s: %s", sandbox.id, error)
            return
        if sandbox.running is not running:
            return  # it went away meanwhile: what it said belongs to nobody
        self.metrics.add(
            sandbox.id,
            MetricPoint(
                timestamp=datetime.now(UTC),
                cpu_count=m.cpu_count,
                cpu_used_pct=m.cpu_used_pct,
                mem_used=m.mem_used,
                mem_total=m.mem_total,
                mem_cache=m.mem_cache,
                disk_used=m.disk_used,
                disk_total=m.disk_total,
            ),
        )
