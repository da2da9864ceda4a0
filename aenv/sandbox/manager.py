"""All sandboxes of a node, as the API and the command line see them: the implementation of `SandboxService`.

It finds and checks; what changes a sandbox is done by `Lifecycle` and `Snapshots`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from aenv.config import Config
from aenv.errors import ConflictError, InvalidInputError, LimitError, NotFoundError, UnavailableError, VmmError
from aenv.observe.events import Event
from aenv.observe.logs import LogEntry, LogQuery
from aenv.observe.metrics import MetricPoint
from aenv.sandbox.family import family, new_bytes
from aenv.sandbox.lifecycle import ALIVE, Lifecycle
from aenv.sandbox.live import ENVD_VERSION, Sandbox
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.policy import egress_policy
from aenv.sandbox.recovery import Recovery
from aenv.sandbox.service import (
    BuildStatus,
    CreateOptions,
    ForkFailure,
    NetworkOptions,
    OnTimeout,
    SandboxInfo,
    SnapshotInfo,
    TemplateInfo,
    TreeNode,
)
from aenv.sandbox.snapshots import Snapshots
from aenv.sandbox.store import Store, now
from aenv.sandbox.tokens import Tokens
from aenv.snapshot.manifest import SnapshotKind
from aenv.storage.home import Home
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import MemoryRegion

log = logging.getLogger("aenv.sandbox")

WARM_UP_PATIENCE = 5.0  # seconds that a start of the daemon waits for a warm machine
PAUSES_AT_STOP = 4  # at a time


class Manager:
    """All sandboxes of this node. `open` before use, `close` after."""

    def __init__(
        self,
        config: Config,
        home: Home,
        machines: Machines,
        repository: Repository,
        store: Store,
        tokens: Tokens,
        *,
        domain: str | None = None,
    ) -> None:
        self._config = config
        self._machines = machines
        self._repository = repository
        self._store = store
        self._tokens = tokens
        self._life = Lifecycle(config, machines, repository, store, tokens, domain=domain)
        self._snapshots = Snapshots(self._life, home.staging)
        self._sandboxes = self._life.sandboxes
        self._deleting: set[str] = set()  # ids of templates

    # Start and stop of the daemon

    async def open(self) -> None:
        """Take over what an earlier daemon left: adopt live machines, finish or undo what it was in the middle of."""
        self._snapshots.sweep()
        await Recovery(self._life).run()
        self._life.telemetry.start(lambda: list(self._sandboxes.values()))

    async def warm_up(self) -> None:
        """Begin to keep machines ready for the newest templates, and wait some seconds for the first, so that the first
        create is as fast as the others."""
        built = [t for t in self._repository.templates() if t.kind is SnapshotKind.TEMPLATE and t.manifest.memory]
        templates = built[-self._config["vmm.hot"] :]
        for template in templates:
            await self._machines.warm(template)
        for template in templates[-1:]:
            try:
                async with asyncio.timeout(WARM_UP_PATIENCE):
                    await self._machines.warmed(template)
            except TimeoutError:
                log.warning("no machine of template %s is ready yet", template.title)
            await self._machines.expect(template.machine)

    async def close(self) -> None:
        """Pause every running sandbox, so that nothing runs without a daemon and nothing is lost."""
        self._life.closing = True
        await self._life.telemetry.close()
        await self._life.chains.close()
        self._life.parking.close()
        await self._life.idle()
        limit = asyncio.Semaphore(PAUSES_AT_STOP)
        await asyncio.gather(*(self._stop(sandbox, limit) for sandbox in list(self._sandboxes.values())))
        await self._life.idle()
        await self._machines.close()
        self._store.close()

    async def _stop(self, sandbox: Sandbox, limit: asyncio.Semaphore) -> None:
        life = self._life
        life.stop_timer(sandbox)
        async with limit:
            if not sandbox.is_up:
                return
            try:
                await life.do(life.pause(sandbox, memory=True, reason="daemon stops"))
            except (ConflictError, NotFoundError):
                pass  # its timer was faster: it is paused already, or gone
            except Exception as error:
                log.error("sandbox %s could not be paused and is ended: %s", sandbox.id, error)
                await life.do(life.end(sandbox, Event.FAILED, "daemon stops, and the pause failed"))

    def blocks_restarted(self, survived: bool) -> None:
        """The block server died and another has taken its place. Unless the files that machines have open survived
        that, every machine has lost its disk and its memory image."""
        if survived:
            return
        for sandbox in list(self._sandboxes.values()):
            self._life.parking.drop(sandbox)
            if sandbox.running is not None:
                self._life.own(self._life.lose_machine(sandbox, sandbox.running, "the block server died"))

    # SandboxService

    async def create(self, options: CreateOptions) -> SandboxInfo:
        template = self._repository.find(options.template)
        self._check_timeout("timeout", options.timeout)
        policy = egress_policy(options.network)  # refuse what cannot be enforced before anything is made
        if self._life.closing:
            raise UnavailableError("the daemon is stopping")
        if template.id in self._deleting:
            raise NotFoundError(f"template {options.template!r} does not exist")
        self._life.check_room()
        parent = template.manifest.parent
        sandbox = self._life.add(template, options, [template.id] if parent is None else [template.id, parent])
        making = self._machines.start(template, sandbox.id, policy)
        return await self._life.do(self._life.create(sandbox, making, f"{template.kind.value} {template.title}"))

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return self._life.info(self._visible(sandbox_id))

    async def sandboxes(self) -> Sequence[SandboxInfo]:
        return [self._life.info(s) for s in self._sandboxes.values() if s.state in ALIVE and not s.doomed]

    async def kill(self, sandbox_id: str) -> None:
        await self._life.do(self._life.end(self._find(sandbox_id), Event.KILLED, "on request"))

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        sandbox = self._visible(sandbox_id)
        await self._life.do(
            self._life.pause(sandbox, memory=memory, require_healthy=require_healthy, reason="on request")
        )

    async def connect(self, sandbox_id: str, timeout: int, *, memory: bool = True) -> tuple[SandboxInfo, bool]:
        self._check_timeout("timeout", timeout)
        sandbox = self._visible(sandbox_id)
        resumed = await self._life.do(self._life.resume(sandbox, timeout, memory=memory))
        if not resumed:
            self._life.extend(sandbox, timeout)
        return self._life.info(sandbox), resumed

    async def resume(
        self, sandbox_id: str, timeout: int, *, on_timeout: OnTimeout | None = None, memory: bool = True
    ) -> SandboxInfo:
        self._check_timeout("timeout", timeout)
        sandbox = self._visible(sandbox_id)
        if not await self._life.do(self._life.resume(sandbox, timeout, memory=memory, on_timeout=on_timeout)):
            raise ConflictError(f"sandbox {sandbox_id} is already running")
        return self._life.info(sandbox)

    async def set_timeout(self, sandbox_id: str, timeout: int) -> None:
        sandbox = self._running(sandbox_id)
        self._check_timeout("timeout", timeout, low=0)
        self._life.set_end(sandbox, now() + timeout)
        self._life.event(sandbox, Event.UPDATED, f"time-out in {timeout} s")

    async def refresh(self, sandbox_id: str, duration: int) -> None:
        sandbox = self._running(sandbox_id)
        self._check_timeout("duration", duration, low=0)
        self._life.extend(sandbox, duration)

    async def set_network(self, sandbox_id: str, network: NetworkOptions) -> None:
        sandbox = self._running(sandbox_id)
        policy = egress_policy(network)
        await self._life.do(self._life.apply_network(sandbox, network, policy))

    async def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricPoint]:
        self._visible(sandbox_id)
        return self._life.telemetry.metrics.window(sandbox_id, start, end)

    async def latest_metric(self, sandbox_id: str) -> MetricPoint | None:
        self._visible(sandbox_id)
        return self._life.telemetry.metrics.latest(sandbox_id)

    async def logs(self, sandbox_id: str, query: LogQuery) -> Sequence[LogEntry]:
        self._visible(sandbox_id)
        return self._life.telemetry.logs.query(sandbox_id, query)

    async def templates(self) -> Sequence[TemplateInfo]:
        return [_template_info(t) for t in self._repository.templates() if t.kind is SnapshotKind.TEMPLATE]

    async def template(self, name: str) -> TemplateInfo:
        return _template_info(self._repository.find(name))

    async def delete_template(self, name: str) -> None:
        """Templates in use are kept; a snapshot can go at any time: its sandboxes have links to what they need."""
        try:
            template = self._repository.find(name)
        except InvalidInputError:  # it is damaged: nothing can use it
            await asyncio.to_thread(self._repository.delete, name)
            return
        users = [s.id for s in self._sandboxes.values() if s.template.id == template.id]
        if users and template.kind is SnapshotKind.TEMPLATE:
            raise ConflictError(f"template {name} is in use by {len(users)} sandboxes, {users[0]} among them")
        self._deleting.add(template.id)
        try:
            await self._machines.cool(template)
            await asyncio.to_thread(self._repository.delete, template.id)
        finally:
            self._deleting.discard(template.id)

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        sandbox = self._visible(sandbox_id)
        snapshot = await self._life.do(self._snapshots.snapshot(sandbox, name=name, memory=memory))
        for info in await self.snapshots():
            if info.id == snapshot.id:
                return info
        raise NotFoundError(f"snapshot {snapshot.title} was deleted meanwhile")

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        return (await asyncio.to_thread(_snapshot_infos, self._repository.templates()))[::-1]

    async def fork(self, sandbox_id: str, count: int, timeout: int) -> Sequence[SandboxInfo | ForkFailure]:
        sandbox = self._running(sandbox_id)
        self._check_timeout("timeout", timeout)
        if count < 1:
            raise InvalidInputError("count", f"must be at least 1, got {count}")
        limit = self._config["sandbox.fork_limit"]
        if count > limit:
            raise LimitError(
                f"a fork makes at most {limit} children, {count} were asked for", hint="raise sandbox.fork_limit"
            )
        if self._life.closing:
            raise UnavailableError("the daemon is stopping")
        return await self._life.do(self._snapshots.fork(sandbox, count, timeout))

    async def rollback(self, sandbox_id: str, snapshot: str) -> SandboxInfo:
        sandbox = self._visible(sandbox_id)
        return await self._life.do(self._snapshots.rollback(sandbox, self._repository.find(snapshot)))

    async def tree(self) -> Sequence[TreeNode]:
        templates = self._repository.templates()
        alive = [s for s in self._sandboxes.values() if s.state in ALIVE and not s.doomed]
        regions = {s.id: await _regions(s.running) for s in alive if s.running is not None}
        return await asyncio.to_thread(family, templates, alive, self._machines.directory, regions)

    # What the data plane needs

    def has(self, sandbox_id: str) -> bool:
        return sandbox_id in self._sandboxes

    async def reach(self, sandbox_id: str) -> tuple[Sandbox, Running]:
        """The running machine that traffic for a sandbox goes to; wakes a paused one that asked for auto-resume.

        Raises NotFoundError when it is not running and will not be woken.
        """
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.doomed:
            raise NotFoundError(f"sandbox {sandbox_id} does not exist")
        # More than once when it was paused again before its machine could be used.
        while not sandbox.is_up and sandbox.record.options.auto_resume and not self._life.closing:
            try:
                timeout = max(sandbox.record.options.timeout, 300)
                await self._life.do(self._life.resume(sandbox, timeout, memory=True, boot=False))
            except ConflictError as error:
                raise NotFoundError(f"sandbox {sandbox_id} is not running") from error
        if not sandbox.is_up or sandbox.running is None:
            raise NotFoundError(f"sandbox {sandbox_id} is not running")
        return sandbox, sandbox.running

    def envd_token(self, sandbox: Sandbox) -> str | None:
        return self._life.envd_token(sandbox)

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        return self._life.traffic_token(sandbox)

    def traffic_token_of(self, sandbox_id: str) -> str | None:
        """The token traffic for this sandbox must show, known without waking it; None when there is no such sandbox."""
        sandbox = self._sandboxes.get(sandbox_id)
        return None if sandbox is None else self.traffic_token(sandbox)

    # Small things

    def _find(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise NotFoundError(f"sandbox {sandbox_id} does not exist")
        return sandbox

    def _visible(self, sandbox_id: str) -> Sandbox:
        sandbox = self._find(sandbox_id)
        if sandbox.doomed or sandbox.state not in ALIVE:
            raise NotFoundError(f"sandbox {sandbox_id} does not exist")
        return sandbox

    def _running(self, sandbox_id: str) -> Sandbox:
        sandbox = self._visible(sandbox_id)
        if not sandbox.is_up:
            raise ConflictError(f"sandbox {sandbox_id} is {sandbox.state.value}")
        return sandbox

    def _check_timeout(self, field: str, seconds: int, low: int = 1) -> None:
        limit = self._config["sandbox.max_timeout"]
        if not low <= seconds <= limit:
            raise InvalidInputError(field, f"must be from {low} to {limit} seconds, got {seconds}")


async def _regions(running: Running) -> Sequence[MemoryRegion]:
    try:
        return await running.vm.memory_regions()
    except VmmError:
        return ()  # it has just ended


def _snapshot_infos(templates: Sequence[Template]) -> list[SnapshotInfo]:
    """Oldest first, like `templates`: a layer is counted for the oldest that has it."""
    counted: set[tuple[int, int]] = set()
    infos = []
    for template in templates:
        manifest = template.manifest
        memory = new_bytes(template.directory, manifest.memory, counted)
        disk = new_bytes(template.directory, manifest.disk.layers, counted)
        if manifest.sandbox is None or manifest.parent is None:
            continue
        infos.append(
            SnapshotInfo(
                id=template.id,
                names=template.names,
                sandbox_id=manifest.sandbox,
                parent_id=manifest.parent,
                created_at=datetime.fromtimestamp(manifest.created, UTC),
                cpu_count=manifest.vcpus,
                memory_mib=manifest.memory_mib,
                disk_mib=template.disk_size >> 20,
                memory=bool(manifest.memory),
                memory_bytes=memory,
                disk_bytes=disk,
            )
        )
    return infos


def _template_info(template: Template) -> TemplateInfo:
    manifest = template.manifest
    created = datetime.fromtimestamp(manifest.created, UTC)
    return TemplateInfo(
        id=template.id,
        build_id=manifest.build_id,
        names=template.names,
        cpu_count=manifest.vcpus,
        memory_mib=manifest.memory_mib,
        disk_mib=template.disk_size >> 20,
        created_at=created,
        updated_at=created,
        envd_version=ENVD_VERSION,
        status=BuildStatus.READY,
        public=True,
    )
