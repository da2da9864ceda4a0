"""The life cycle of all sandboxes of a node: the implementation of `SandboxService`.

An operation takes the sandbox's lock, moves its record by compare-and-set, works, and moves it again. It runs in a task
of the manager's own, so a caller that hangs up does not stop it halfway. Callers that come meanwhile wait for the lock
and then see what became of the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import string
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aenv.agent.client import identity
from aenv.config import Config
from aenv.errors import (
    AenvError,
    ConflictError,
    GuestError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.network.base import Policy
from aenv.observe.events import Event
from aenv.observe.events import record as record_event
from aenv.observe.logs import LogEntry, LogQuery, LogStore
from aenv.observe.metrics import MetricPoint, MetricStore
from aenv.sandbox.live import ENVD_VERSION, Sandbox
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.policy import egress_policy
from aenv.sandbox.service import (
    BuildStatus,
    CreateOptions,
    NetworkOptions,
    OnTimeout,
    SandboxInfo,
    SandboxState,
    TemplateInfo,
)
from aenv.sandbox.store import Machine, Record, Store, now
from aenv.sandbox.tokens import Tokens
from aenv.storage.repository import Repository, Template

log = logging.getLogger("aenv.sandbox")
T = TypeVar("T")

ID_ALPHABET = string.ascii_lowercase + string.digits
PAUSE_NAME = "pause"
METRICS_INTERVAL = 5.0  # seconds
HEALTH_TIMEOUT = 5.0  # seconds
SYNC_TIMEOUT = 30.0  # seconds in which a guest has to write its dirty pages to its disk
WARM_UP_PATIENCE = 5.0  # seconds that a start of the daemon waits for a warm machine
PAUSES_AT_STOP = 4  # at a time
PAUSE_RETRY = 30.0  # seconds until an automatic pause that failed is tried again
ALIVE = (SandboxState.RUNNING, SandboxState.PAUSING, SandboxState.PAUSED, SandboxState.RESUMING)
HAS_MACHINE = (
    SandboxState.RUNNING,
    SandboxState.PAUSING,
    SandboxState.RESUMING,
    SandboxState.SNAPSHOTTING,
    SandboxState.FORKING,
)


def new_sandbox_id() -> str:
    """`i` and 20 lower-case letters or digits, the form the E2B clients know."""
    return "i" + "".join(secrets.choice(ID_ALPHABET) for _ in range(20))


class Manager:
    """All sandboxes of this node. `open` before use, `close` after."""

    def __init__(
        self,
        config: Config,
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
        self._domain = domain
        self._sandboxes: dict[str, Sandbox] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deleting: set[str] = set()  # ids of templates
        self._orphans: set[str] = set()  # paused sandboxes whose template is missing or damaged
        self._logs = LogStore()
        self._metrics = MetricStore()
        self._sampler: asyncio.Task[None] | None = None
        self._closing = False

    # Start and stop of the daemon

    async def open(self) -> None:
        """Take over what an earlier daemon left: adopt live machines, finish or undo what it was in the middle of."""
        records = self._store.load()
        keep = {Path(r.machine.run_dir) for r in records if r.machine is not None}
        await self._machines.sweep(keep)
        await asyncio.gather(*(self._recover(record) for record in records))  # a hung guest must not hold up the others
        for folder in self._machines.folders():
            if folder.name not in self._sandboxes and folder.name not in self._orphans:
                shutil.rmtree(folder, ignore_errors=True)
        self._sampler = asyncio.create_task(self._sample(), name="metrics sampler")

    async def warm_up(self) -> None:
        """Begin to keep machines ready for the newest templates, and wait some seconds for the first, so that the first
        create is as fast as the others."""
        templates = self._repository.templates()[-self._config["vmm.hot"] :]
        for template in templates:
            await self._machines.warm(template.id)
        if templates:
            try:
                async with asyncio.timeout(WARM_UP_PATIENCE):
                    await self._machines.warmed(templates[-1].id)
            except TimeoutError:
                log.warning("no machine of template %s is ready yet", templates[-1].title)

    async def close(self) -> None:
        """Pause every running sandbox, so that nothing runs without a daemon and nothing is lost."""
        self._closing = True
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.gather(self._sampler, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        limit = asyncio.Semaphore(PAUSES_AT_STOP)
        await asyncio.gather(*(self._stop(sandbox, limit) for sandbox in list(self._sandboxes.values())))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._machines.close()
        self._store.close()

    async def _stop(self, sandbox: Sandbox, limit: asyncio.Semaphore) -> None:
        self._stop_timer(sandbox)
        async with limit:
            if sandbox.state is not SandboxState.RUNNING:
                return
            try:
                await self._do(self._pause(sandbox, memory=True, reason="daemon stops"))
            except (ConflictError, NotFoundError):
                pass  # its timer was faster: it is paused already, or gone
            except Exception as error:
                log.error("sandbox %s could not be paused and is ended: %s", sandbox.id, error)
                await self._do(self._end(sandbox, Event.FAILED, "daemon stops, and the pause failed"))

    # SandboxService

    async def create(self, options: CreateOptions) -> SandboxInfo:
        template = self._repository.find(options.template)
        self._check_timeout("timeout", options.timeout)
        egress_policy(options.network)  # refuse what cannot be enforced before anything is made
        if self._closing:
            raise UnavailableError("the daemon is stopping")
        if template.id in self._deleting:
            raise NotFoundError(f"template {options.template!r} does not exist")
        self._check_room()
        moment = now()
        record = Record(
            id=new_sandbox_id(),
            template_id=template.id,
            options=options,
            started_at=moment,
            end_at=moment + options.timeout,
        )
        self._store.insert(record)
        sandbox = self._sandboxes[record.id] = Sandbox(record, template)
        return await self._do(self._create(sandbox))

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return self._info(self._visible(sandbox_id))

    async def sandboxes(self) -> Sequence[SandboxInfo]:
        return [self._info(s) for s in self._sandboxes.values() if s.state in ALIVE and not s.doomed]

    async def kill(self, sandbox_id: str) -> None:
        sandbox = self._find(sandbox_id)
        await self._do(self._end(sandbox, Event.KILLED, "on request"))

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        sandbox = self._visible(sandbox_id)
        await self._do(self._pause(sandbox, memory=memory, require_healthy=require_healthy, reason="on request"))

    async def connect(self, sandbox_id: str, timeout: int, *, memory: bool = True) -> tuple[SandboxInfo, bool]:
        self._check_timeout("timeout", timeout)
        sandbox = self._visible(sandbox_id)
        resumed = await self._do(self._resume(sandbox, timeout, memory=memory))
        if not resumed:
            self._extend(sandbox, timeout)
        return self._info(sandbox), resumed

    async def resume(
        self, sandbox_id: str, timeout: int, *, on_timeout: OnTimeout | None = None, memory: bool = True
    ) -> SandboxInfo:
        self._check_timeout("timeout", timeout)
        sandbox = self._visible(sandbox_id)
        if not await self._do(self._resume(sandbox, timeout, memory=memory, on_timeout=on_timeout)):
            raise ConflictError(f"sandbox {sandbox_id} is already running")
        return self._info(sandbox)

    async def set_timeout(self, sandbox_id: str, timeout: int) -> None:
        sandbox = self._running(sandbox_id)
        self._check_timeout("timeout", timeout, low=0)
        self._set_end(sandbox, now() + timeout)
        self._event(sandbox, Event.UPDATED, f"time-out in {timeout} s")

    async def refresh(self, sandbox_id: str, duration: int) -> None:
        sandbox = self._running(sandbox_id)
        self._check_timeout("duration", duration, low=0)
        self._extend(sandbox, duration)

    async def set_network(self, sandbox_id: str, network: NetworkOptions) -> None:
        sandbox = self._running(sandbox_id)
        policy = egress_policy(network)
        await self._do(self._apply_network(sandbox, network, policy))

    async def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricPoint]:
        self._visible(sandbox_id)
        return self._metrics.window(sandbox_id, start, end)

    async def latest_metric(self, sandbox_id: str) -> MetricPoint | None:
        self._visible(sandbox_id)
        return self._metrics.latest(sandbox_id)

    async def logs(self, sandbox_id: str, query: LogQuery) -> Sequence[LogEntry]:
        self._visible(sandbox_id)
        return self._logs.query(sandbox_id, query)

    async def templates(self) -> Sequence[TemplateInfo]:
        return [_template_info(t) for t in self._repository.templates()]

    async def template(self, name: str) -> TemplateInfo:
        return _template_info(self._repository.find(name))

    async def delete_template(self, name: str) -> None:
        template = self._repository.find(name)
        users = [s.id for s in self._sandboxes.values() if s.template.id == template.id]
        if users:
            raise ConflictError(f"template {name} is in use by {len(users)} sandboxes, {users[0]} among them")
        self._deleting.add(template.id)
        try:
            await self._machines.cool(template.id)
            await asyncio.to_thread(self._repository.delete, template)
        finally:
            self._deleting.discard(template.id)

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
        if sandbox.state is not SandboxState.RUNNING and sandbox.record.options.auto_resume and not self._closing:
            try:
                await self._do(self._resume(sandbox, max(sandbox.record.options.timeout, 300), memory=True, boot=False))
            except ConflictError as error:
                raise NotFoundError(f"sandbox {sandbox_id} is not running") from error
        if sandbox.state is not SandboxState.RUNNING or sandbox.running is None:
            raise NotFoundError(f"sandbox {sandbox_id} is not running")
        return sandbox, sandbox.running

    def envd_token(self, sandbox: Sandbox) -> str | None:
        return self._tokens.envd(sandbox.id) if sandbox.record.options.secure else None

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        return None if sandbox.record.options.network.allow_public_traffic else self._tokens.traffic(sandbox.id)

    def traffic_token_of(self, sandbox_id: str) -> str | None:
        """The token traffic for this sandbox must show, known without waking it; None when there is no such sandbox."""
        sandbox = self._sandboxes.get(sandbox_id)
        return None if sandbox is None else self.traffic_token(sandbox)

    # Operations: each holds the lock and moves the record

    async def _create(self, sandbox: Sandbox) -> SandboxInfo:
        async with sandbox.lock:
            try:
                policy = egress_policy(sandbox.record.options.network)
                running = await self._machines.start(sandbox.template, sandbox.id, policy)
                await self._bring_up(sandbox, running, (SandboxState.STARTING,), sandbox.record.options.timeout)
            except BaseException as error:
                await self._forget(sandbox)
                if not isinstance(error, AenvError):
                    log.exception("create of sandbox %s failed", sandbox.id)
                raise
            self._event(sandbox, Event.CREATED, f"from template {sandbox.template.title}")
            return self._info(sandbox)

    async def _pause(self, sandbox: Sandbox, *, memory: bool, reason: str, require_healthy: bool = False) -> None:
        async with sandbox.lock:
            if sandbox.state is SandboxState.PAUSED:
                raise ConflictError(f"sandbox {sandbox.id} is already paused")
            running = self._machine_of(sandbox)
            agent = running.agent(self.envd_token(sandbox))
            if require_healthy or not memory:
                try:
                    async with asyncio.timeout(HEALTH_TIMEOUT if memory else SYNC_TIMEOUT):
                        await (agent.health() if memory else agent.sync())
                except (GuestError, TimeoutError) as error:
                    raise UnavailableError(f"the guest agent does not answer: {error}") from error
            self._store.transition(sandbox.record, (SandboxState.RUNNING,), SandboxState.PAUSING)
            self._stop_timer(sandbox)
            target = self._machines.directory(sandbox.id) / PAUSE_NAME
            try:
                running.close()
                if memory:
                    stats = await self._machines.capture_pause(running, sandbox.template, target)
                    detail = f"{reason}; {stats.stored_pages} pages in {stats.total_s * 1000:.0f} ms"
                else:
                    await running.vm.pause()
                    detail = f"{reason}; disk only"
                sandbox.record.machine = None
                sandbox.record.memory_kept = memory
                # On record for good before the answer: the only other copy of the memory is about to go.
                self._store.transition(sandbox.record, (SandboxState.PAUSING,), SandboxState.PAUSED, durable=True)
            except BaseException as error:
                await self._unpause(sandbox, running, target)
                if not isinstance(error, AenvError):
                    log.exception("pause of sandbox %s failed", sandbox.id)
                raise
            sandbox.running = None
            self._event(sandbox, Event.PAUSED, detail)
            # The capture is whole: the process can go after the answer. Whoever resumes waits for it.
            sandbox.former = running
            sandbox.ending = self._own(self._end_former(sandbox))
            await self._machines.expect_resume(sandbox.template.id)

    async def _unpause(self, sandbox: Sandbox, running: Running, target: Path) -> None:
        """A pause failed: the guest goes on, with fresh connections, unless its machine is dead."""
        shutil.rmtree(target, ignore_errors=True)
        if sandbox.doomed:
            return
        try:
            await running.vm.resume()
        except Exception as error:
            await self._lose(sandbox, f"pause failed and the machine did not go on: {error}")
            return
        revived = running.revived()
        sandbox.running = revived
        sandbox.record.machine = _machine_record(revived)
        self._store.transition(sandbox.record, (SandboxState.PAUSING,), SandboxState.RUNNING)
        self._watch(sandbox, revived)
        self._set_end(sandbox, max(sandbox.record.end_at, now() + PAUSE_RETRY))

    async def _resume(
        self, sandbox: Sandbox, timeout: int, *, memory: bool, on_timeout: OnTimeout | None = None, boot: bool = True
    ) -> bool:
        """True when it was paused and runs now, False when it ran already. Without `boot` only with its memory."""
        async with sandbox.lock:
            if sandbox.state is SandboxState.RUNNING and not sandbox.doomed:
                return False
            if self._closing:
                raise UnavailableError("the daemon is stopping")
            if sandbox.doomed:
                raise NotFoundError(f"sandbox {sandbox.id} does not exist")
            if sandbox.state is SandboxState.PAUSED:
                if not boot and not sandbox.record.memory_kept:
                    raise ConflictError(f"sandbox {sandbox.id} has no memory to resume from")
                self._check_room()
            self._store.transition(sandbox.record, (SandboxState.PAUSED,), SandboxState.RESUMING)
            began = asyncio.get_running_loop().time()
            sandbox.has_run = False
            target = self._machines.directory(sandbox.id) / PAUSE_NAME
            try:
                if sandbox.ending is not None:
                    await asyncio.wait([sandbox.ending])
                    sandbox.ending = None
                if sandbox.former is not None:  # the first attempt failed
                    await self._machines.end(sandbox.former)
                    sandbox.former = None
                disk = self._machines.disk(sandbox.id, sandbox.template)
                policy = egress_policy(sandbox.record.options.network)
                if memory and sandbox.record.memory_kept:
                    running = await self._machines.restore(sandbox.template, disk, policy, paused=target)
                else:
                    running = await self._machines.boot(sandbox.template, disk, policy)
                if on_timeout is not None:
                    sandbox.record.options = replace(sandbox.record.options, on_timeout=on_timeout)
                await self._bring_up(sandbox, running, (SandboxState.RESUMING,), timeout)
            except BaseException as error:
                if not sandbox.doomed and sandbox.state is SandboxState.RESUMING:
                    sandbox.record.machine = None
                    if sandbox.has_run:
                        self._drop_memory(sandbox, f"resume failed: {error}")
                    self._store.transition(sandbox.record, (SandboxState.RESUMING,), SandboxState.PAUSED)
                if not isinstance(error, AenvError):
                    log.exception("resume of sandbox %s failed", sandbox.id)
                raise
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)
            took = (asyncio.get_running_loop().time() - began) * 1000
            self._event(sandbox, Event.RESUMED, f"in {took:.0f} ms")
            return True

    async def _bring_up(
        self, sandbox: Sandbox, running: Running, sources: tuple[SandboxState, ...], timeout: int
    ) -> None:
        """Let the vCPUs run, initialise the agent and move the record to RUNNING. Ends the machine when that fails.

        The machine is on record before its first instruction: from then on its disk differs from any snapshot, so a
        daemon that is killed here must find this machine again, not start another one.
        """
        sandbox.running = running
        try:
            if sandbox.doomed:  # killed before there was a machine to close
                running.close()
            sandbox.record.machine = _machine_record(running)
            self._store.save(sandbox.record)
            sandbox.has_run = True
            await running.vm.resume()
            await self._initialise(sandbox, running)
            sandbox.record.end_at = now() + timeout
            self._store.transition(sandbox.record, sources, SandboxState.RUNNING)
        except BaseException:
            sandbox.running = None
            await self._end_machine(sandbox, running)
            raise
        self._watch(sandbox, running)
        self._set_end(sandbox, sandbox.record.end_at)

    async def _initialise(self, sandbox: Sandbox, running: Running) -> None:
        """POST /init until the agent has answered: a restored one does so at once, a booting one in some seconds."""
        manifest, options = sandbox.template.manifest, sandbox.record.options
        agent = running.agent(None)
        limit = self._config["agent.timeout"]
        deadline = asyncio.get_running_loop().time() + limit
        body = identity(
            sandbox.id,
            sandbox.template.id,
            token=self.envd_token(sandbox),
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
            body.timestamp = datetime.now(UTC).isoformat()
            try:
                await self._first(agent.init(body), running, deadline)
                return
            except (GuestError, TimeoutError) as error:
                last = str(error) or last
            if running.vm.exited.done():
                outcome = running.vm.exited.result()
                raise GuestError(f"the machine ended while it started: {outcome.reason}\n{outcome.serial_tail}".strip())
            if asyncio.get_running_loop().time() >= deadline:
                tail = await running.vm.serial_tail()
                raise GuestError(
                    f"the guest agent did not answer within {limit} s ({last}); end of the serial console:\n{tail}"
                )
            await asyncio.wait([running.vm.exited], timeout=0.05)  # it boots: nothing tells when its agent listens

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

    async def _apply_network(self, sandbox: Sandbox, network: NetworkOptions, policy: Policy) -> None:
        async with sandbox.lock:
            running = self._machine_of(sandbox)
            await running.slot.apply(policy)
            sandbox.record.options = _with_network(sandbox.record.options, network)
            self._store.save(sandbox.record)
            self._event(sandbox, Event.UPDATED, "network")

    async def _end(self, sandbox: Sandbox, event: Event, reason: str) -> None:
        """Kill in any state. A start or resume under way fails at once because its machine dies."""
        if sandbox.doomed:
            async with sandbox.lock:  # another caller ends it: join
                return
        sandbox.doomed = True
        if sandbox.running is not None:
            sandbox.running.close()
        async with sandbox.lock:
            if self._sandboxes.get(sandbox.id) is not sandbox:
                return
            self._event(sandbox, event, reason)
            if sandbox.state is not SandboxState.KILLING:
                self._store.transition(sandbox.record, list(SandboxState), SandboxState.KILLING)
            await self._forget(sandbox)

    async def _lose(self, sandbox: Sandbox, reason: str) -> None:
        """The machine is dead: the sandbox is gone, with the reason in its log. The caller holds the lock."""
        self._event(sandbox, Event.FAILED, reason)
        log.error("sandbox %s lost: %s", sandbox.id, reason)
        sandbox.doomed = True
        self._store.transition(sandbox.record, list(SandboxState), SandboxState.KILLING)
        await self._forget(sandbox)

    async def _forget(self, sandbox: Sandbox) -> None:
        """Remove all that there is of a sandbox. The record goes last: a daemon killed here finds it and goes on."""
        self._stop_timer(sandbox)
        sandbox.doomed = True
        running, sandbox.running = sandbox.running, None
        if running is not None:
            await self._end_machine(sandbox, running)
        if sandbox.ending is not None:
            await asyncio.wait([sandbox.ending])
        await self._end_former(sandbox)
        await asyncio.to_thread(shutil.rmtree, self._machines.directory(sandbox.id), ignore_errors=True)
        self._store.delete(sandbox.id)
        self._sandboxes.pop(sandbox.id, None)
        self._metrics.forget(sandbox.id)
        self._logs.forget(sandbox.id)

    async def _end_former(self, sandbox: Sandbox) -> None:
        if sandbox.former is not None and await self._end_machine(sandbox, sandbox.former):
            sandbox.former = None

    async def _end_machine(self, sandbox: Sandbox, running: Running) -> bool:
        """End a machine. What cannot be ended now holds up nobody: the next start of the daemon sweeps it."""
        try:
            await self._machines.end(running)
        except Exception:
            log.exception("the machine of sandbox %s could not be ended", sandbox.id)
            return False
        return True

    async def _recover(self, record: Record) -> None:
        """One record found at start."""
        try:
            template = self._repository.find(record.template_id)
        except (NotFoundError, InvalidInputError) as error:
            await self._abandon(record)
            if record.state is SandboxState.PAUSED:  # it comes back when its template does
                log.error("sandbox %s is left alone: %s", record.id, error)
                self._orphans.add(record.id)
            else:
                log.error("sandbox %s is removed: %s", record.id, error)
                self._store.delete(record.id)
            return
        sandbox = self._sandboxes[record.id] = Sandbox(record, template)
        state, machine = record.state, record.machine
        if state is SandboxState.PAUSED or (state is SandboxState.RESUMING and machine is None):
            await self._abandon(record)
            record.machine = None
            self._store.transition(record, (state,), SandboxState.PAUSED)
            return
        if state in HAS_MACHINE and machine is not None:
            running: Running | None = None
            try:
                running = await self._machines.adopt(machine)
                await running.vm.resume()  # a capture that was under way had stopped it
                await self._initialise(sandbox, running)
            except (AenvError, OSError) as error:
                async with sandbox.lock:
                    if running is not None:
                        await self._end_machine(sandbox, running)
                    else:
                        await self._abandon(record)
                    if state is SandboxState.PAUSING and (self._machines.directory(record.id) / PAUSE_NAME).is_dir():
                        record.machine = None  # the capture was whole, and the machine has not run since
                        record.memory_kept = True
                        self._store.transition(record, (state,), SandboxState.PAUSED)
                        return
                    if state is SandboxState.RESUMING:
                        record.machine = None
                        self._drop_memory(sandbox, "its machine died while it was resumed")
                        self._store.transition(record, (state,), SandboxState.PAUSED)
                        return
                    await self._lose(sandbox, f"its machine did not survive the daemon: {error}")
                return
            for leftover in (PAUSE_NAME, PAUSE_NAME + ".part"):
                shutil.rmtree(self._machines.directory(record.id) / leftover, ignore_errors=True)
            sandbox.running = running
            if state is not SandboxState.RUNNING:
                self._store.transition(record, (state,), SandboxState.RUNNING)
            self._watch(sandbox, running)
            self._set_end(sandbox, record.end_at)
            return
        async with sandbox.lock:  # starting or killing: what it was is not worth keeping
            await self._abandon(record)
            await self._forget(sandbox)

    def _drop_memory(self, sandbox: Sandbox, reason: str) -> None:
        """A resumed guest has run and is dead: its disk has moved on, so the memory of the pause no longer fits it.
        What is left is a disk as after a power cut; the next resume boots from it."""
        sandbox.record.memory_kept = False
        shutil.rmtree(self._machines.directory(sandbox.id) / PAUSE_NAME, ignore_errors=True)
        self._event(sandbox, Event.FAILED, f"{reason}; the disk is kept, the memory is lost")

    async def _abandon(self, record: Record) -> None:
        if record.machine is not None:
            try:
                await self._machines.abandon(record.machine)
            except Exception:
                log.exception("the machine of sandbox %s could not be ended", record.id)

    # Timers and watching

    def _set_end(self, sandbox: Sandbox, end_at: float) -> None:
        self._stop_timer(sandbox)
        sandbox.record.end_at = end_at
        self._store.save(sandbox.record)
        delay = max(0.0, end_at - now())
        sandbox.timer = asyncio.get_running_loop().call_later(delay, self._expire, sandbox)

    def _extend(self, sandbox: Sandbox, timeout: int) -> None:
        if sandbox.state is SandboxState.RUNNING and now() + timeout > sandbox.record.end_at:
            self._set_end(sandbox, now() + timeout)

    def _stop_timer(self, sandbox: Sandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
            sandbox.timer = None

    def _expire(self, sandbox: Sandbox) -> None:
        self._own(self._expired(sandbox))

    async def _expired(self, sandbox: Sandbox) -> None:
        options = sandbox.record.options
        try:
            if options.on_timeout is OnTimeout.PAUSE:
                await self._pause(sandbox, memory=options.pause_memory, reason="time-out reached")
            else:
                await self._end(sandbox, Event.EXPIRED, "killed")
        except ConflictError:
            pass  # somebody was faster: it is paused or gone, which is what the timer wanted
        except AenvError as error:
            log.error("sandbox %s could not be paused at its time-out: %s", sandbox.id, error)
            if sandbox.state is SandboxState.RUNNING and not sandbox.doomed:
                self._event(sandbox, Event.FAILED, f"pause at time-out failed: {error.message}")
                self._set_end(sandbox, max(sandbox.record.end_at, now() + PAUSE_RETRY))

    def _watch(self, sandbox: Sandbox, running: Running) -> None:
        running.vm.exited.add_done_callback(lambda _: self._machine_ended(sandbox, running))

    def _machine_ended(self, sandbox: Sandbox, running: Running) -> None:
        if sandbox.running is running and not sandbox.doomed:
            running.close()
            self._own(self._lost(sandbox, running))

    async def _lost(self, sandbox: Sandbox, running: Running) -> None:
        async with sandbox.lock:
            if sandbox.running is running and not sandbox.doomed:
                outcome = running.vm.exited.result()
                await self._lose(sandbox, f"{outcome.reason}\n{outcome.serial_tail}".strip())

    async def _sample(self) -> None:
        """Ask every running guest for its metrics and what it wrote to its console, once an interval."""
        while True:
            await asyncio.gather(*(self._sample_one(s) for s in list(self._sandboxes.values())))
            await asyncio.sleep(METRICS_INTERVAL)

    async def _sample_one(self, sandbox: Sandbox) -> None:
        running = sandbox.running
        if sandbox.state is not SandboxState.RUNNING or running is None:
            return
        try:
            async with asyncio.timeout(METRICS_INTERVAL):
                for line in await running.console_lines():
                    self._logs.ring(sandbox.id).append(line, fields={"source": "console"})
                m = await running.agent(self.envd_token(sandbox)).metrics()
        except (GuestError, VmmError, TimeoutError) as error:
            log.debug("no metrics of sandbox %s: %s", sandbox.id, error)
            return
        if sandbox.running is not running:
            return  # it went away meanwhile: what it said belongs to nobody
        self._metrics.add(
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

    # Small things

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation in a task of its own; a cancelled caller leaves it running."""
        return await asyncio.shield(self._own(work))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, AenvError):
            log.error("an operation failed: %r", error)

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
        if sandbox.state is not SandboxState.RUNNING:
            raise ConflictError(f"sandbox {sandbox_id} is {sandbox.state.value}")
        return sandbox

    def _machine_of(self, sandbox: Sandbox) -> Running:
        if sandbox.doomed:
            raise NotFoundError(f"sandbox {sandbox.id} does not exist")
        if sandbox.state is not SandboxState.RUNNING or sandbox.running is None:
            raise ConflictError(f"sandbox {sandbox.id} is {sandbox.state.value}")
        return sandbox.running

    def _info(self, sandbox: Sandbox) -> SandboxInfo:
        return sandbox.info(
            envd_token=self.envd_token(sandbox), traffic_token=self.traffic_token(sandbox), domain=self._domain
        )

    def _event(self, sandbox: Sandbox, event: Event, detail: str) -> None:
        log.info("sandbox %s %s: %s", sandbox.id, event.value, detail)
        record_event(self._logs.ring(sandbox.id), event, detail)

    def _check_room(self) -> None:
        """Raise LimitError when one more running sandbox would be too many."""
        running = sum(s.state not in (SandboxState.PAUSED, SandboxState.KILLING) for s in self._sandboxes.values())
        if running >= self._config["sandbox.max"]:
            raise LimitError(f"{running} sandboxes run already", hint="raise sandbox.max, or end some")

    def _check_timeout(self, field: str, seconds: int, low: int = 1) -> None:
        limit = self._config["sandbox.max_timeout"]
        if not low <= seconds <= limit:
            raise InvalidInputError(field, f"must be from {low} to {limit} seconds, got {seconds}")


def _machine_record(running: Running) -> Machine:
    return Machine(
        pid=running.vm.pid,
        start_time=running.vm.start_time,
        run_dir=str(running.vm.run_dir),
        slot=running.slot.index,
        incarnation=running.incarnation,
    )


def _with_network(options: CreateOptions, network: NetworkOptions) -> CreateOptions:
    """Egress rules are replaced as a whole; what concerns inbound traffic stays."""
    old = options.network
    merged = replace(
        network,
        allow_public_traffic=old.allow_public_traffic,
        mask_request_host=old.mask_request_host,
        https_ports=old.https_ports,
    )
    return replace(options, network=merged)


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
