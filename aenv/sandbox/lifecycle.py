"""The operations that change what a sandbox is: create, pause, resume, end.

An operation takes the sandbox's lock, moves its record by compare-and-set, works, and moves it again. It runs in a task
of its own, so a caller that hangs up does not stop it halfway. Callers that come meanwhile wait for the lock and then
see what became of the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from aenv.config import Config
from aenv.errors import (
    AenvError,
    ConflictError,
    GuestError,
    LimitError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.network.base import Policy
from aenv.observe.events import Event
from aenv.sandbox.chains import Chains
from aenv.sandbox.greeting import Greeting
from aenv.sandbox.live import Sandbox
from aenv.sandbox.machines import Machines, Running
from aenv.sandbox.parking import Parking
from aenv.sandbox.policy import egress_policy
from aenv.sandbox.service import (
    CreateOptions,
    NetworkOptions,
    OnTimeout,
    SandboxInfo,
    SandboxState,
)
from aenv.sandbox.store import Machine, Record, Store, boot_id, now
from aenv.sandbox.telemetry import Telemetry
from aenv.sandbox.tokens import Tokens
from aenv.storage.repository import Repository, Template
from aenv.vmm.base import VmState

log = logging.getLogger("aenv.sandbox")
T = TypeVar("T")

HEALTH_TIMEOUT = 5.0  # seconds
SYNC_TIMEOUT = 30.0  # seconds in which a guest has to write its dirty pages to its disk
IO_RETRY_FIRST, IO_RETRY_LAST = 0.05, 5.0  # seconds until a failed disk request is tried again
# Seconds after the start of a program in which a pause waits for the guest to come to rest. In the middle of a start
# the expensive part would come once more after the resume: what was translated and cached for it goes with the process.
START_TIME = 0.5
PAUSE_RETRY = 30.0  # seconds until an automatic pause that failed is tried again
LINEAGE = 64  # ancestors that a record remembers
ALIVE = (
    SandboxState.RUNNING,
    SandboxState.SNAPSHOTTING,
    SandboxState.FORKING,
    SandboxState.PAUSING,
    SandboxState.PAUSED,
    SandboxState.RESUMING,
)


class Lifecycle:
    """All sandboxes of this node and what can be done to one. `own` runs an operation, `settle` waits for all."""

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
        self.config = config
        self.machines = machines
        self.repository = repository
        self.store = store
        self.sandboxes: dict[str, Sandbox] = {}
        self.closing = False
        self.telemetry = Telemetry(self.envd_token)
        self.chains = Chains(machines, store)
        self.parking = Parking(
            machines,
            config["vmm.parked"],
            config["vmm.parked_time"],
            own=self.own,
            retire=self.retire,
            settle=self.settle,
        )
        self._tokens = tokens
        self._domain = domain
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greeting = Greeting(config["agent.timeout"])

    # Operations: each holds the lock and moves the record

    def add(
        self, template: Template, options: CreateOptions, lineage: list[str], sandbox_id: str | None = None
    ) -> Sandbox:
        """A new sandbox on record. Its template is checked; nothing of it runs yet."""
        moment = now()
        record = Record(
            id=sandbox_id or self.machines.reserve(template),
            template_id=template.id,
            options=options,
            started_at=moment,
            end_at=moment + options.timeout,
            lineage=lineage[:LINEAGE],
        )
        self.store.insert(record)
        sandbox = self.sandboxes[record.id] = Sandbox(record, template)
        return sandbox

    async def create(self, sandbox: Sandbox, making: Coroutine[Any, Any, Running], origin: str) -> SandboxInfo:
        """Bring up a new sandbox with the machine that `making` gives. It is forgotten when that fails."""
        async with sandbox.lock:
            try:
                running = await making
                await self._bring_up(sandbox, running, (SandboxState.STARTING,), sandbox.record.options.timeout)
            except BaseException as error:
                await self.forget(sandbox)
                if not isinstance(error, AenvError):
                    log.exception("create of sandbox %s failed", sandbox.id)
                raise
            self.event(sandbox, Event.CREATED, f"from {origin}")
            return self.info(sandbox)

    async def pause(
        self, sandbox: Sandbox, *, memory: bool, reason: str, require_healthy: bool = False, expired: bool = False
    ) -> None:
        """RUNNING → PAUSED. When its time has `expired` it is left alone if it was given more meanwhile."""
        async with sandbox.lock:
            if sandbox.state is SandboxState.PAUSED:
                raise ConflictError(f"sandbox {sandbox.id} is already paused")
            running = self.machine_of(sandbox)
            if require_healthy or not memory:
                await self.ask_agent(sandbox, running, sync=not memory)
            if expired and sandbox.timer is not None:
                raise ConflictError(f"sandbox {sandbox.id} has more time")
            record = sandbox.record
            self.store.transition(record, (SandboxState.RUNNING,), SandboxState.PAUSING)
            self.stop_timer(sandbox)
            running.close()
            before = (record.disk, record.memory, record.upper)
            captured = None
            try:
                if memory:
                    if sandbox.since_start < START_TIME:
                        await running.vm.quiet(START_TIME - sandbox.since_start)
                    captured = await self.machines.capture(
                        running, sandbox.template.machine, restack=self.parking.open, goes_on=False
                    )
                    record.memory, record.state_file = [*running.memory_layers, captured.memory], captured.state
                    stats = captured.stats
                    detail = f"{reason}; {stats.stored_pages} pages in {stats.total_s * 1000:.0f} ms"
                else:
                    await running.vm.pause()
                    record.memory, record.state_file = [], None
                    detail = f"{reason}; disk only"
                # A machine that may be parked has a new layer for what it will write; else its last one is to be kept.
                last = () if running.disk.upper != record.upper else (running.disk.upper,)
                record.disk, record.upper = [*running.disk.layers, *last], None
                record.machine, record.unsettled = None, boot_id()
                # The files are in the page cache, which outlives every process; `_end_former` has them reach the disk.
                self.store.transition(record, (SandboxState.PAUSING,), SandboxState.PAUSED)
            except BaseException as error:
                record.disk, record.memory, record.upper = before
                record.state_file = record.unsettled = None
                await self._unpause(sandbox, running)
                if not isinstance(error, AenvError):
                    log.exception("pause of sandbox %s failed", sandbox.id)
                raise
            self.event(sandbox, Event.PAUSED, detail)
            # The capture is whole: the process can go after the answer, or wait. Whoever resumes waits for that.
            sandbox.running = None
            if captured is None or not self.parking.park(sandbox, running, captured):
                self.retire(sandbox, running)
            await self.machines.expect(sandbox.template.machine)

    def retire(self, sandbox: Sandbox, running: Running) -> None:
        """End a machine that is no longer on record, in the background; the next resume waits for that."""
        sandbox.running = None
        sandbox.former = running
        sandbox.ending = self.own(self._end_former(sandbox))

    async def _unpause(self, sandbox: Sandbox, running: Running) -> None:
        """A pause failed: the guest goes on, with fresh connections, unless its machine is dead."""
        if sandbox.doomed:
            return
        try:
            await running.vm.resume()
        except Exception as error:
            await self.lose(sandbox, f"pause failed and the machine did not go on: {error}")
            return
        revived = running.revived()
        sandbox.running = revived
        sandbox.note_restack(revived.disk)
        sandbox.record.machine = machine_record(revived)
        self.store.transition(sandbox.record, (SandboxState.PAUSING,), SandboxState.RUNNING)
        self.watch(sandbox, revived)
        self.machines.tidy(sandbox.record, *sandbox.machines)
        self.set_end(sandbox, max(sandbox.record.end_at, now() + PAUSE_RETRY))

    async def resume(
        self, sandbox: Sandbox, timeout: int, *, memory: bool, on_timeout: OnTimeout | None = None, boot: bool = True
    ) -> bool:
        """True when it was paused and runs now, False when it ran already. Without `boot` only with its memory."""
        if sandbox.is_up and not sandbox.doomed:
            return False
        async with sandbox.lock:
            if sandbox.is_up and not sandbox.doomed:
                return False
            if self.closing:
                raise UnavailableError("the daemon is stopping")
            if sandbox.doomed:
                raise NotFoundError(f"sandbox {sandbox.id} does not exist")
            if sandbox.state is SandboxState.PAUSED:
                if not boot and sandbox.record.state_file is None:
                    raise ConflictError(f"sandbox {sandbox.id} has no memory to resume from")
                self.check_room()
            await self.resume_locked(sandbox, timeout, memory=memory, on_timeout=on_timeout)
            return True

    async def resume_locked(
        self, sandbox: Sandbox, timeout: int, *, memory: bool = True, on_timeout: OnTimeout | None = None
    ) -> None:
        """PAUSED → RUNNING; back to PAUSED with nothing lost when it fails. The caller holds the lock."""
        record = sandbox.record
        self.store.transition(record, (SandboxState.PAUSED,), SandboxState.RESUMING)
        began = asyncio.get_running_loop().time()
        kept = record.memory, record.state_file
        try:
            if on_timeout is not None:
                record.options = replace(record.options, on_timeout=on_timeout)
            parked = memory and await self._unpark(sandbox, timeout)
            if not parked:
                record.memory, record.state_file = kept
                running = await self._remake(sandbox, memory=memory)
                await self._bring_up(sandbox, running, (SandboxState.RESUMING,), timeout)
        except BaseException as error:
            if not sandbox.doomed and sandbox.state is SandboxState.RESUMING:
                # What the guest has written meanwhile went to a layer of its own, which is gone with its machine.
                record.memory, record.state_file = kept
                record.machine = None
                self.store.transition(record, (SandboxState.RESUMING,), SandboxState.PAUSED)
                self.machines.tidy(record, *sandbox.machines)
                if record.unsettled is not None:
                    sandbox.ending = self.own(self._end_former(sandbox))
            if not isinstance(error, AenvError):
                log.exception("resume of sandbox %s failed", sandbox.id)
            raise
        if parked:
            self.own(self._go_on(sandbox))
        else:
            self.machines.tidy(sandbox.record, *sandbox.machines)
            self.chains.look_at(sandbox)
        took = (asyncio.get_running_loop().time() - began) * 1000
        self.event(sandbox, Event.RESUMED, f"in {took:.0f} ms")

    async def _unpark(self, sandbox: Sandbox, timeout: int) -> bool:
        """Go on with the machine of the pause. False when there is none, or it has died and nobody had noticed."""
        running = await self.parking.take(sandbox)
        if running is None:
            return False
        try:
            await self._bring_up(sandbox, running, (SandboxState.RESUMING,), timeout)
        except VmmError as error:
            if sandbox.doomed:
                raise
            log.warning("the parked machine of sandbox %s did not go on: %s", sandbox.id, error)
            return False
        return True

    async def _remake(self, sandbox: Sandbox, *, memory: bool) -> Running:
        """A new machine for a paused sandbox."""
        self.parking.drop(sandbox)
        if sandbox.ending is not None:
            await asyncio.wait([sandbox.ending])
            sandbox.ending = None
        if sandbox.former is not None:  # the first attempt failed
            await self.machines.end(sandbox.former)
            sandbox.former = None
        checkpoint = sandbox.checkpoint(self.machines.directory(sandbox.id))
        policy = egress_policy(sandbox.record.options.network)
        if memory and checkpoint.state is not None:
            self.machines.require(sandbox.template)
            return await self.machines.restore(checkpoint, policy)
        sandbox.template.manifest.require_boot_files()
        return await self.machines.boot(checkpoint, policy)

    async def _go_on(self, sandbox: Sandbox) -> None:
        """Clean up after the pause of a sandbox that goes on with its machine, as soon as its files are not in use, and
        prepare for its next pause."""
        if sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
        async with sandbox.lock:
            under_way = sandbox.settling is not None and not sandbox.settling.done()
            if sandbox.running is None or sandbox.doomed or under_way:
                return  # somebody else's business by now
            sandbox.settling = None
            self.machines.tidy(sandbox.record, *sandbox.machines)
            await self.machines.seal(self.machines.directory(sandbox.id), sandbox.record.disk)
            await self.machines.ready_to_capture(sandbox.running, sandbox.template.machine)
            self.chains.look_at(sandbox)

    async def _bring_up(
        self, sandbox: Sandbox, running: Running, sources: tuple[SandboxState, ...], timeout: int
    ) -> None:
        """Let the vCPUs run, initialise the agent and move the record to RUNNING. Ends the machine when that fails.

        The machine is on record before its first instruction, so that a daemon that is killed here finds it again.
        """
        sandbox.running = running
        record = sandbox.record
        try:
            if sandbox.doomed:  # killed before there was a machine to close
                running.close()
            record.disk, record.memory = list(running.disk.layers), list(running.memory_layers)
            record.machine, record.upper = machine_record(running), running.disk.upper
            self.store.save(record)
            await running.vm.resume()
            await self.initialise(sandbox, running)
            record.end_at = now() + timeout
            state, record.state_file, record.unsettled = record.state_file, None, None
            try:
                self.store.transition(record, sources, SandboxState.RUNNING)
            except BaseException:
                record.state_file = state
                raise
        except BaseException:
            sandbox.running = None
            if await self.end_machine(sandbox, running):
                await self.machines.drop_upper(running)
            record.upper = None
            raise
        self.watch(sandbox, running)
        self.set_end(sandbox, record.end_at)

    async def initialise(self, sandbox: Sandbox, running: Running) -> None:
        """Tell the guest's agent who it is now, as soon as it listens. Raises GuestError, NotFoundError."""
        late = await self._greeting.greet(sandbox, running, self.envd_token(sandbox))
        if late is not None:
            self.own(late)

    async def apply_network(self, sandbox: Sandbox, network: NetworkOptions, policy: Policy) -> None:
        async with sandbox.lock:
            running = self.machine_of(sandbox)
            await running.slot.apply(policy)
            sandbox.record.options = _with_network(sandbox.record.options, network)
            self.store.save(sandbox.record)
            self.event(sandbox, Event.UPDATED, "network")

    async def end(self, sandbox: Sandbox, event: Event, reason: str) -> None:
        """Kill in any state. A start or resume under way fails at once because its machine dies."""
        if sandbox.doomed:
            async with sandbox.lock:  # another caller ends it: join
                return
        # On record before anybody is told that it does not exist: a daemon that is killed now must not bring it back.
        sandbox.record.killed = True
        try:
            self.store.save(sandbox.record)
        except BaseException:
            sandbox.record.killed = False
            raise
        sandbox.doomed = True
        if sandbox.running is not None:
            sandbox.running.close()
        async with sandbox.lock:
            if self.sandboxes.get(sandbox.id) is not sandbox:
                return
            self.event(sandbox, event, reason)
            if sandbox.state is not SandboxState.KILLING:
                self.store.transition(sandbox.record, list(SandboxState), SandboxState.KILLING)
            await self.forget(sandbox)

    async def lose(self, sandbox: Sandbox, reason: str) -> None:
        """The machine is dead: the sandbox is gone, with the reason in its log. The caller holds the lock."""
        self.event(sandbox, Event.FAILED, reason)
        log.error("sandbox %s lost: %s", sandbox.id, reason)
        sandbox.doomed = True
        self.store.transition(sandbox.record, list(SandboxState), SandboxState.KILLING)
        await self.forget(sandbox)

    async def forget(self, sandbox: Sandbox) -> None:
        """Remove all that there is of a sandbox. The record goes last: a daemon killed here finds it and goes on."""
        self.stop_timer(sandbox)
        sandbox.doomed = True
        running, sandbox.running = sandbox.running, None
        self.parking.drop(sandbox)
        if running is not None:
            await self.end_machine(sandbox, running)
        if under_way := [task for task in (sandbox.ending, sandbox.settling) if task is not None]:
            await asyncio.wait(under_way)
        if sandbox.former is not None:  # the first attempt failed
            await self._end_former(sandbox)
        await asyncio.to_thread(shutil.rmtree, self.machines.directory(sandbox.id), ignore_errors=True)
        self.store.delete(sandbox.id)
        self.sandboxes.pop(sandbox.id, None)
        self.telemetry.forget(sandbox)

    async def _end_former(self, sandbox: Sandbox) -> None:
        """End the machine of the last pause and let what it left reach the disk."""
        if sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
            sandbox.settling = None
        if sandbox.former is not None and not await self.end_machine(sandbox, sandbox.former):
            return
        sandbox.former = None
        if not sandbox.doomed:
            await self.settle(sandbox)

    async def settle(self, sandbox: Sandbox) -> None:
        """Make the pause of a sandbox durable. What fails now is tried again at the next resume or start."""
        record, durable = sandbox.record, True
        checkpoint = sandbox.checkpoint(self.machines.directory(sandbox.id))
        try:
            await self.machines.settle(checkpoint)
        except (AenvError, OSError) as error:
            log.warning("the pause of sandbox %s is not on the disk yet: %s", sandbox.id, error)
            durable = False
        # A resume that waits for this has moved the record already; it has made no machine yet.
        if sandbox.doomed or sandbox.state not in (SandboxState.PAUSED, SandboxState.RESUMING):
            return
        self.machines.tidy(record, *sandbox.machines)
        if durable and record.state_file == checkpoint.state:
            record.unsettled = None
            self.store.save(record, durable=True)
            self.chains.look_at(sandbox)

    async def end_machine(self, sandbox: Sandbox, running: Running) -> bool:
        """End a machine. What cannot be ended now holds up nobody: the next start of the daemon sweeps it."""
        try:
            await self.machines.end(running)
        except Exception:
            log.exception("the machine of sandbox %s could not be ended", sandbox.id)
            return False
        return True

    # Timers and watching

    def set_end(self, sandbox: Sandbox, end_at: float) -> None:
        self.stop_timer(sandbox)
        sandbox.record.end_at = end_at
        self.store.save(sandbox.record)
        delay = max(0.0, end_at - now())
        sandbox.timer = asyncio.get_running_loop().call_later(delay, self._expire, sandbox)

    def extend(self, sandbox: Sandbox, timeout: int) -> None:
        if sandbox.is_up and now() + timeout > sandbox.record.end_at:
            self.set_end(sandbox, now() + timeout)

    def stop_timer(self, sandbox: Sandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
            sandbox.timer = None

    def _expire(self, sandbox: Sandbox) -> None:
        sandbox.timer = None  # whoever gives it more time now makes another
        self.own(self._expired(sandbox))

    async def _expired(self, sandbox: Sandbox) -> None:
        options = sandbox.record.options
        try:
            if options.on_timeout is OnTimeout.PAUSE:
                await self.pause(sandbox, memory=options.pause_memory, reason="time-out reached", expired=True)
            elif sandbox.timer is None:
                await self.end(sandbox, Event.EXPIRED, "killed")
        except ConflictError:
            pass  # somebody was faster: it is paused, which is what the timer wanted, or has more time
        except AenvError as error:
            if sandbox.doomed:
                return  # killed meanwhile
            log.error("sandbox %s could not be paused at its time-out: %s", sandbox.id, error)
            if sandbox.state is SandboxState.RUNNING:
                self.event(sandbox, Event.FAILED, f"pause at time-out failed: {error.message}")
                self.set_end(sandbox, max(sandbox.record.end_at, now() + PAUSE_RETRY))

    def watch(self, sandbox: Sandbox, running: Running) -> None:
        """Notice the end of a machine."""
        running.vm.exited.add_done_callback(lambda _: self._machine_ended(sandbox, running))
        running.vm.on_io_error = lambda problem: self._io_failed(sandbox, running, problem)

    def _io_failed(self, sandbox: Sandbox, running: Running, problem: str) -> None:
        if sandbox.running is running and not sandbox.doomed and not running.retrying:
            running.retrying = True
            self.event(sandbox, Event.FAILED, f"the disk does not answer, the guest waits: {problem}")
            self.own(self._retry_io(sandbox, running))

    async def _retry_io(self, sandbox: Sandbox, running: Running) -> None:
        """The guest stands still because its disk failed (the host's is full, the block server is being restarted): it
        has seen nothing, and the request is tried again until it works or the machine's time is over."""
        delay = IO_RETRY_FIRST
        while sandbox.running is running and not sandbox.doomed and not self.closing:
            events: list[asyncio.Future[Any]] = [running.vm.exited, running.closed]
            await asyncio.wait(events, timeout=delay)
            async with sandbox.lock:
                if sandbox.running is not running or running.vm.state is not VmState.IO_ERROR:
                    break  # it has run for all of `delay`, or is gone
                delay = min(delay * 2, IO_RETRY_LAST)
                try:
                    await running.vm.resume()
                except VmmError as error:
                    log.warning("sandbox %s: %s", sandbox.id, error)
        running.retrying = False

    def _machine_ended(self, sandbox: Sandbox, running: Running) -> None:
        if sandbox.running is running and not sandbox.doomed:
            running.close()
            self.own(self._lost(sandbox, running))

    async def _lost(self, sandbox: Sandbox, running: Running) -> None:
        outcome = running.vm.exited.result()
        await self.lose_machine(sandbox, running, f"{outcome.reason}\n{outcome.serial_tail}".strip())

    async def lose_machine(self, sandbox: Sandbox, running: Running, reason: str) -> None:
        """`lose` a sandbox whose machine is of no use any more, unless it has another one by now."""
        async with sandbox.lock:
            if sandbox.running is running and not sandbox.doomed:
                await self.lose(sandbox, reason)

    # Small things

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an operation in a task of its own; a cancelled caller leaves it running."""
        return await asyncio.shield(self.own(work))

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, AenvError):
            log.error("an operation failed: %r", error)

    async def idle(self) -> None:
        """Wait until no operation is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ask_agent(self, sandbox: Sandbox, running: Running, *, sync: bool) -> None:
        """Have the guest write its dirty pages to its disk, or just answer. Raises UnavailableError."""
        agent = running.agent(self.envd_token(sandbox))
        try:
            async with asyncio.timeout(SYNC_TIMEOUT if sync else HEALTH_TIMEOUT):
                await (agent.sync() if sync else agent.health())
        except (GuestError, TimeoutError) as error:
            raise UnavailableError(f"the guest agent does not answer: {error}") from error

    def machine_of(self, sandbox: Sandbox) -> Running:
        """Of a running sandbox. Raises NotFoundError, ConflictError."""
        if sandbox.doomed:
            raise NotFoundError(f"sandbox {sandbox.id} does not exist")
        if sandbox.state is not SandboxState.RUNNING or sandbox.running is None:
            raise ConflictError(f"sandbox {sandbox.id} is {sandbox.state.value}")
        return sandbox.running

    def envd_token(self, sandbox: Sandbox) -> str | None:
        return self._tokens.envd(sandbox.id) if sandbox.record.options.secure else None

    def traffic_token(self, sandbox: Sandbox) -> str | None:
        return None if sandbox.record.options.network.allow_public_traffic else self._tokens.traffic(sandbox.id)

    def info(self, sandbox: Sandbox) -> SandboxInfo:
        return sandbox.info(
            envd_token=self.envd_token(sandbox), traffic_token=self.traffic_token(sandbox), domain=self._domain
        )

    def event(self, sandbox: Sandbox, event: Event, detail: str) -> None:
        self.telemetry.event(sandbox, event, detail)

    def check_room(self, count: int = 1) -> None:
        """Raise LimitError when `count` more running sandboxes would be too many."""
        running = sum(s.state not in (SandboxState.PAUSED, SandboxState.KILLING) for s in self.sandboxes.values())
        if running + count > self.config["sandbox.max"]:
            raise LimitError(f"{running} sandboxes run already", hint="raise sandbox.max, or end some")


def machine_record(running: Running) -> Machine:
    return Machine(
        pid=running.vm.pid,
        start_time=running.vm.start_time,
        run_dir=str(running.vm.run_dir),
        slot=running.slot.index,
        disk=running.disk.image,
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
