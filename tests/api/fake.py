"""A sandbox service without sandboxes: it keeps what it is told, so that tests see what the API asked for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from aenv.errors import ConflictError, NotFoundError
from aenv.observe import events
from aenv.observe.logs import LogEntry, LogQuery, LogStore
from aenv.observe.metrics import MetricPoint, MetricStore
from aenv.sandbox.service import (
    CreateOptions,
    NetworkOptions,
    OnTimeout,
    PauseMode,
    SandboxInfo,
    SandboxState,
    TemplateInfo,
)

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def template_info(template_id: str = "basetemplateid", *names: str) -> TemplateInfo:
    return TemplateInfo(
        id=template_id,
        build_id=str(uuid.uuid4()),
        names=names or ("base",),
        cpu_count=2,
        memory_mib=512,
        disk_mib=1024,
        created_at=EPOCH,
        updated_at=EPOCH,
        envd_version="0.6.13",
    )


class FakeService:
    """`failure`, when set, is raised by every call; `gate`, when set, holds creates back until it is set."""

    def __init__(self) -> None:
        self.infos: dict[str, SandboxInfo] = {}
        self.template_infos = [template_info()]
        self.created: list[CreateOptions] = []
        self.calls: list[tuple[object, ...]] = []
        self.metric_store = MetricStore()
        self.log_store = LogStore()
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.domain: str | None = None

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def add(self, **changes: object) -> SandboxInfo:
        """A sandbox that did not come through `create`."""
        number = len(self.infos) + 1
        base = SandboxInfo(
            id=f"i{number:020d}",
            template_id="basetemplateid",
            client_id="local",
            envd_version="0.6.13",
            started_at=EPOCH + timedelta(seconds=number),
            end_at=EPOCH + timedelta(seconds=number + 300),
            state=SandboxState.RUNNING,
            cpu_count=2,
            memory_mib=512,
            disk_mib=1024,
            alias="base",
        )
        info = replace(base, **changes)  # type: ignore[arg-type]
        self.infos[info.id] = info
        events.record(self.log_store.ring(info.id), events.Event.CREATED)
        return info

    async def create(self, options: CreateOptions) -> SandboxInfo:
        self.created.append(options)
        if self.gate is not None:
            await self.gate.wait()
        self._fail()
        template = await self.template(options.template)
        return self.add(
            template_id=template.id,
            metadata=options.metadata,
            network=options.network,
            on_timeout=options.on_timeout,
            auto_resume=options.auto_resume,
            envd_token="envd-token" if options.secure else None,
            traffic_token=None if options.network.allow_public_traffic else "traffic-token",
            domain=self.domain,
        )

    async def get(self, sandbox_id: str) -> SandboxInfo:
        self._fail()
        try:
            return self.infos[sandbox_id]
        except KeyError:
            raise NotFoundError(f"sandbox {sandbox_id} was not found") from None

    async def sandboxes(self) -> Sequence[SandboxInfo]:
        self._fail()
        return list(self.infos.values())

    async def kill(self, sandbox_id: str) -> None:
        await self.get(sandbox_id)
        del self.infos[sandbox_id]

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        info = await self.get(sandbox_id)
        if info.state is not SandboxState.RUNNING:
            raise ConflictError(f"sandbox {sandbox_id} is {info.state}")
        self.calls.append(("pause", memory, require_healthy))
        mode = PauseMode.FULL if memory else PauseMode.FILESYSTEM
        self.infos[sandbox_id] = replace(info, state=SandboxState.PAUSED, pause_mode=mode)

    async def connect(self, sandbox_id: str, timeout: int, *, memory: bool = True) -> tuple[SandboxInfo, bool]:
        info = await self.get(sandbox_id)
        self.calls.append(("connect", timeout, memory))
        resumed = info.state is SandboxState.PAUSED
        self.infos[sandbox_id] = replace(info, state=SandboxState.RUNNING)
        return self.infos[sandbox_id], resumed

    async def resume(
        self, sandbox_id: str, timeout: int, *, on_timeout: OnTimeout | None = None, memory: bool = True
    ) -> SandboxInfo:
        info = await self.get(sandbox_id)
        if info.state is SandboxState.RUNNING:
            raise ConflictError(f"sandbox {sandbox_id} is running")
        self.calls.append(("resume", timeout, on_timeout, memory))
        self.infos[sandbox_id] = replace(info, state=SandboxState.RUNNING)
        return self.infos[sandbox_id]

    async def set_timeout(self, sandbox_id: str, timeout: int) -> None:
        info = await self.get(sandbox_id)
        self.calls.append(("timeout", timeout))
        self.infos[sandbox_id] = replace(info, end_at=EPOCH + timedelta(seconds=timeout))

    async def refresh(self, sandbox_id: str, duration: int) -> None:
        await self.get(sandbox_id)
        self.calls.append(("refresh", duration))

    async def set_network(self, sandbox_id: str, network: NetworkOptions) -> None:
        info = await self.get(sandbox_id)
        self.infos[sandbox_id] = replace(info, network=network)

    async def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricPoint]:
        await self.get(sandbox_id)
        return self.metric_store.window(sandbox_id, start, end)

    async def latest_metric(self, sandbox_id: str) -> MetricPoint | None:
        await self.get(sandbox_id)
        return self.metric_store.latest(sandbox_id)

    async def logs(self, sandbox_id: str, query: LogQuery) -> Sequence[LogEntry]:
        await self.get(sandbox_id)
        return self.log_store.query(sandbox_id, query)

    async def templates(self) -> Sequence[TemplateInfo]:
        self._fail()
        return list(self.template_infos)

    async def template(self, name: str) -> TemplateInfo:
        self._fail()
        for info in self.template_infos:
            if name == info.id or name in info.names:
                return info
        raise NotFoundError(f"template {name} was not found")

    async def delete_template(self, name: str) -> None:
        self.template_infos.remove(await self.template(name))
