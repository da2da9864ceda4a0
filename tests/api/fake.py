"""A sandbox service without sandboxes: it keeps what it is told, so that tests see what the API asked for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from aenv.errors import ConflictError, LimitError, NotFoundError, UnavailableError
from aenv.naming import split_name
from aenv.observe import events
from aenv.observe.logs import LogEntry, LogQuery, LogStore
from aenv.observe.metrics import MetricPoint, MetricStore
from aenv.sandbox.service import (
    CreateOptions,
    ForkFailure,
    NetworkOptions,
    NodeKind,
    OnTimeout,
    PauseMode,
    SandboxInfo,
    SandboxState,
    SnapshotInfo,
    TemplateInfo,
    TreeNode,
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


FORK_LIMIT = 16


class FakeService:
    """`failure`, when set, is raised by every call; `gate`, when set, holds creates back until it is set. A fork gives
    the first `room` children a place."""

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
        self.snapshot_infos: list[SnapshotInfo] = []
        self.room = FORK_LIMIT

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
        stored = name.removesuffix(":default")
        for info in self.template_infos:
            if stored == info.id or stored in info.names:
                return info
        for snapshot in self.snapshot_infos:
            if stored == snapshot.id or stored in snapshot.names:
                return template_info(snapshot.id, *snapshot.names)
        raise NotFoundError(f"template {name} was not found")

    async def delete_template(self, name: str) -> None:
        found = await self.template(name)
        self.template_infos = [info for info in self.template_infos if info.id != found.id]
        self.snapshot_infos = [info for info in self.snapshot_infos if info.id != found.id]

    def add_snapshot(self, **changes: object) -> SnapshotInfo:
        """A snapshot that did not come through `snapshot`; a later one is newer."""
        number = len(self.snapshot_infos) + 1
        base = SnapshotInfo(
            id=f"s{number}",
            names=(),
            sandbox_id="i1",
            parent_id="basetemplateid",
            created_at=EPOCH + timedelta(seconds=number),
            cpu_count=2,
            memory_mib=512,
            disk_mib=1024,
            memory=True,
            memory_bytes=7 << 20,
            disk_bytes=3 << 20,
        )
        info = replace(base, **changes)  # type: ignore[arg-type]
        self.snapshot_infos.append(info)
        return info

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        source = await self.get(sandbox_id)
        if name is not None:
            assert name == split_name(name), "the API hands names down as they are stored"
            if any(name in info.names for info in self.template_infos):
                raise ConflictError(f"a template is called {name}")
        self.calls.append(("snapshot", name, memory))
        self.snapshot_infos = [
            replace(info, names=tuple(n for n in info.names if n != name)) for info in self.snapshot_infos
        ]
        names = () if name is None else (name,)
        return self.add_snapshot(sandbox_id=source.id, parent_id=source.template_id, names=names, memory=memory)

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        self._fail()
        return self.snapshot_infos[::-1]

    async def fork(self, sandbox_id: str, count: int, timeout: int) -> Sequence[SandboxInfo | ForkFailure]:
        source = await self.get(sandbox_id)
        if count > FORK_LIMIT:
            raise LimitError(f"a fork may start {FORK_LIMIT} children")
        if source.state is not SandboxState.RUNNING:
            raise ConflictError(f"sandbox {sandbox_id} is {source.state}")
        self.calls.append(("fork", count, timeout))
        snapshot = self.add_snapshot(sandbox_id=source.id, parent_id=source.template_id)
        full = ForkFailure(UnavailableError("no memory left", hint="end some sandboxes"))
        return [
            self.add(template_id=snapshot.id, envd_token=f"token-{number}") if number < self.room else full
            for number in range(count)
        ]

    async def rollback(self, sandbox_id: str, snapshot: str) -> SandboxInfo:
        source = await self.get(sandbox_id)
        target = await self.template(snapshot)
        if not any(info.id == target.id and info.sandbox_id == source.id for info in self.snapshot_infos):
            raise ConflictError(f"{snapshot} is not a snapshot of sandbox {sandbox_id}")
        self.calls.append(("rollback", target.id))
        self.infos[sandbox_id] = replace(source, state=SandboxState.RUNNING)
        return self.infos[sandbox_id]

    async def tree(self) -> Sequence[TreeNode]:
        self._fail()
        return [
            *(
                TreeNode(NodeKind.TEMPLATE, info.id, None, info.names, info.created_at, None, 50 << 20, 400 << 20)
                for info in self.template_infos
            ),
            *(
                TreeNode(
                    NodeKind.SNAPSHOT, info.id, info.parent_id, info.names, info.created_at, None,
                    info.memory_bytes, info.disk_bytes,
                )
                for info in self.snapshot_infos
            ),
            *(
                TreeNode(
                    NodeKind.SANDBOX, info.id, info.template_id, (), info.started_at, info.state, 0, 4096,
                    *((80 << 20, 5 << 20) if info.state is SandboxState.RUNNING else (None, None)),
                )
                for info in self.infos.values()
            ),
        ]  # fmt: skip
