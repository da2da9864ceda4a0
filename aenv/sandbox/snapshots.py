"""Snapshots of sandboxes: capture one, fork it, take it back, and keep chains of layers short.

A capture stops a guest for an instant: device state, changed memory and a new writable disk layer. What was captured is
on record before the guest's RAM is mapped to it: whoever is killed in between has a chain of layers that is true.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from aenv.errors import AenvError, ConflictError, NotFoundError, UnavailableError, VmmError
from aenv.network.base import Policy
from aenv.observe.events import Event
from aenv.sandbox.lifecycle import LINEAGE, Lifecycle
from aenv.sandbox.live import Sandbox
from aenv.sandbox.machines import Captured, Running, new_sandbox_id
from aenv.sandbox.policy import egress_policy
from aenv.sandbox.service import ForkFailure, SandboxInfo, SandboxState
from aenv.sandbox.store import now
from aenv.snapshot.checkpoint import Checkpoint
from aenv.snapshot.manifest import MANIFEST_NAME, Disk, Manifest, SnapshotKind
from aenv.storage.repository import Template, new_template_id
from aenv.vmm.base import MemoryMap

log = logging.getLogger("aenv.sandbox")

STARTS_AT_ONCE = 32  # children of one fork that are brought up at a time


class Snapshots:
    """Operations on the sandboxes of a `Lifecycle`; `staging` is for what is not committed yet."""

    def __init__(self, lifecycle: Lifecycle, staging: Path) -> None:
        self._life = lifecycle
        self._machines = lifecycle.machines
        self._store = lifecycle.store
        self._staging = staging

    def sweep(self) -> None:
        """Remove what an earlier daemon had not committed when it was killed."""
        for state in (SandboxState.SNAPSHOTTING, SandboxState.FORKING):
            for left in self._staging.glob(f"{state.value}-*"):
                shutil.rmtree(left, ignore_errors=True)

    # Snapshot

    async def snapshot(self, sandbox: Sandbox, *, name: str | None, memory: bool) -> Template:
        """Commit the state of a running or paused sandbox to the repository."""
        if name is not None:
            self._life.repository.check_snapshot_name(name)
        async with AsyncExitStack() as stack:
            async with sandbox.lock:
                staged = self._staged(sandbox, SandboxState.SNAPSHOTTING, memory=memory)
                checkpoint = await stack.enter_async_context(staged)
                manifest = self._manifest(sandbox, checkpoint)
                self._set_lineage(sandbox, [manifest.id, *sandbox.record.lineage])
            try:
                # Nobody waits for the disk but the one who asked: what was captured has links of its own.
                await self._machines.settle(checkpoint)
                template = await asyncio.to_thread(self._commit, checkpoint.directory, manifest, name)
            except BaseException:
                self._set_lineage(sandbox, [known for known in sandbox.record.lineage if known != manifest.id])
                raise
        if not sandbox.doomed:
            self._life.event(sandbox, Event.CHECKPOINTED, f"snapshot {template.title}")
            self._life.own(self._seal(sandbox))
        await self._machines.expect(template.machine)
        return template

    def _set_lineage(self, sandbox: Sandbox, lineage: list[str]) -> None:
        sandbox.record.lineage = lineage[:LINEAGE]
        if not sandbox.doomed:
            self._store.save(sandbox.record)

    def _commit(self, staged: Path, manifest: Manifest, name: str | None) -> Template:
        (staged / MANIFEST_NAME).unlink()  # a link to the template's
        manifest.save(staged)
        return self._life.repository.commit(staged, [] if name is None else [name])

    def _manifest(self, sandbox: Sandbox, checkpoint: Checkpoint) -> Manifest:
        return msgspec.structs.replace(
            sandbox.template.manifest,
            id=new_template_id(),
            build_id=str(uuid.uuid4()),
            kind=SnapshotKind.SNAPSHOT,
            created=time.time(),
            memory=list(checkpoint.memory),
            disk=Disk(list(checkpoint.disk), checkpoint.disk_size),
            state=checkpoint.state,
            parent=self._parent(sandbox),
            sandbox=sandbox.id,
        )

    def _parent(self, sandbox: Sandbox) -> str:
        """The nearest ancestor that is a template or a snapshot; one that was deleted if there is no other."""
        stored = {template.id for template in self._life.repository.templates()}
        lineage = sandbox.record.lineage
        return next((identity for identity in lineage if identity in stored), sandbox.template.id)

    @asynccontextmanager
    async def _staged(self, sandbox: Sandbox, state: SandboxState, *, memory: bool = True) -> AsyncIterator[Checkpoint]:
        """A checkpoint of the sandbox in a scratch directory, which goes away afterwards unless it was moved. The
        caller holds the lock until this yields; the guest runs on by then. Nothing is durable yet."""
        staged = self._staging / f"{state.value}-{secrets.token_hex(6)}"
        staged.mkdir(mode=0o711)
        try:
            if sandbox.state is SandboxState.PAUSED:
                if under_way := [task for task in (sandbox.ending, sandbox.settling) if task is not None]:
                    await asyncio.wait(under_way)
                checkpoint = sandbox.checkpoint(self._machines.directory(sandbox.id))
                if not memory:
                    checkpoint = replace(checkpoint, memory=(), state=None)
            else:
                checkpoint = await self._capture(sandbox, state, memory=memory)
            try:
                staged_checkpoint = self._link(checkpoint, staged)
            finally:
                if sandbox.is_up:  # the device state is of use only with the memory as it was
                    self._machines.tidy(sandbox.record, *sandbox.machines)
            yield staged_checkpoint
        finally:
            if staged.exists():
                await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)

    @staticmethod
    def _link(checkpoint: Checkpoint, staged: Path) -> Checkpoint:
        (staged / MANIFEST_NAME).hardlink_to(checkpoint.directory / MANIFEST_NAME)
        return checkpoint.link_into(staged)

    async def _capture(self, sandbox: Sandbox, state: SandboxState, *, memory: bool) -> Checkpoint:
        """Capture a running sandbox, which runs on. The files are in its directory."""
        life, record = self._life, sandbox.record
        running = life.machine_of(sandbox)
        if not memory:
            await life.ask_agent(sandbox, running, sync=True)
        self._store.transition(record, (SandboxState.RUNNING,), state)
        captured, whole = None, True
        try:
            if memory:
                captured = await self._machines.capture(running, sandbox.template.machine, restack=True, goes_on=True)
            else:
                await self._machines.restack(running)
            sandbox.note_restack(running.disk)
            if captured is not None:
                record.memory = [*running.memory_layers, captured.memory]
            self._store.save(record)
            if captured is not None:
                whole = False  # until it has succeeded
                await self._rehome(sandbox, running, captured)
                whole = True
        except BaseException as error:
            await self._go_on(sandbox, running, state, str(error), whole=whole)
            if not isinstance(error, AenvError):
                log.exception("capture of sandbox %s failed", sandbox.id)
            raise
        await self._go_on(sandbox, running, state)
        try:
            await self._machines.ready_to_capture(running, sandbox.template.machine)
        except (AenvError, OSError) as error:  # the next capture tries again, and says so if it must
            log.warning("sandbox %s: %s", sandbox.id, error)
        return Checkpoint(
            running.disk.folder,
            sandbox.template.machine,
            tuple(record.disk),
            sandbox.template.disk_size,
            () if captured is None else tuple(record.memory),
            None if captured is None else captured.state,
        )

    async def _rehome(self, sandbox: Sandbox, running: Running, captured: Captured) -> None:
        try:
            await self._machines.rehome(running, captured, sandbox.template.machine)
        except VmmError:
            raise
        except (AenvError, OSError) as error:  # nothing was mapped: its pages are its own for longer
            log.warning("sandbox %s does not share its pages with its snapshot: %s", sandbox.id, error)

    async def _go_on(
        self, sandbox: Sandbox, running: Running, state: SandboxState, problem: str = "", *, whole: bool = True
    ) -> None:
        """Let the guest run again after a capture, well or ill. A machine that cannot is the end of its sandbox."""
        life = self._life
        if sandbox.doomed:
            raise NotFoundError(f"sandbox {sandbox.id} was killed")
        try:
            if not whole:
                raise VmmError(problem)
            await running.vm.resume()
        except Exception as error:
            reason = f"the machine did not go on after a capture: {error}"
            await life.lose(sandbox, reason)
            raise VmmError(reason) from error
        sandbox.note_restack(running.disk)
        self._store.transition(sandbox.record, (state,), SandboxState.RUNNING)

    # Fork

    async def fork(self, sandbox: Sandbox, count: int, timeout: int) -> Sequence[SandboxInfo | ForkFailure]:
        """Capture once, start `count` children. The source is free as soon as the capture is done."""
        life = self._life
        life.check_room(count)
        async with AsyncExitStack() as stack:
            async with sandbox.lock:
                life.machine_of(sandbox)
                checkpoint = await stack.enter_async_context(self._staged(sandbox, SandboxState.FORKING))
            memory = await self._machines.map_memory(checkpoint)
            turn = asyncio.Semaphore(STARTS_AT_ONCE)
            children = await asyncio.gather(
                *(self._child(sandbox, checkpoint, memory, timeout, turn) for _ in range(count))
            )
        if not sandbox.doomed:
            started = sum(isinstance(child, SandboxInfo) for child in children)
            life.event(sandbox, Event.CHECKPOINTED, f"fork: {started} of {count} children started")
            life.own(self._seal(sandbox))
        return children

    async def _seal(self, sandbox: Sandbox) -> None:
        """What a capture has frozen of the disk becomes an ordinary layer, in the background."""
        async with sandbox.lock:
            if not sandbox.doomed:
                await self._machines.seal(self._machines.directory(sandbox.id), sandbox.record.disk)
                self._life.chains.look_at(sandbox)

    async def _child(
        self, source: Sandbox, checkpoint: Checkpoint, memory: MemoryMap, timeout: int, turn: asyncio.Semaphore
    ) -> SandboxInfo | ForkFailure:
        life = self._life
        async with turn:
            try:
                if life.closing:
                    raise UnavailableError("the daemon is stopping")
                life.check_room()
                options = replace(source.record.options, timeout=timeout)
                lineage = [source.id, *source.record.lineage]
                child = life.add(source.template, options, lineage, new_sandbox_id())
                making = self._machines.branch(source.template, checkpoint, child.id, _policy(source), memory=memory)
                return await life.create(child, making, f"sandbox {source.id}")
            except AenvError as error:
                return ForkFailure(error)
            except Exception as error:
                log.exception("a child of sandbox %s could not be started", source.id)
                return ForkFailure(VmmError(f"{type(error).__name__}: {error}"))

    # Rollback

    async def rollback(self, sandbox: Sandbox, snapshot: Template) -> SandboxInfo:
        """Take a sandbox back to a snapshot of its own, in place."""
        life, record = self._life, sandbox.record
        async with sandbox.lock:
            if sandbox.doomed:
                raise NotFoundError(f"sandbox {sandbox.id} does not exist")
            if life.closing:
                raise UnavailableError("the daemon is stopping")
            if sandbox.state not in (SandboxState.RUNNING, SandboxState.PAUSED):
                raise ConflictError(f"sandbox {sandbox.id} is {sandbox.state.value}")
            if sandbox.state is SandboxState.PAUSED:
                life.check_room()
            known = snapshot.id in record.lineage or snapshot.id == record.template_id
            if not known and snapshot.manifest.sandbox != sandbox.id:
                raise ConflictError(f"snapshot {snapshot.title} is not one of sandbox {sandbox.id}")
            if snapshot.checkpoint.state is not None:
                self._machines.require(snapshot)
            source = self._links(sandbox, snapshot)
            left = max(1, round(record.end_at - now())) if sandbox.is_up else record.options.timeout
            state, running = sandbox.state, sandbox.running
            record.disk, record.memory, record.state_file = list(source.disk), list(source.memory), source.state
            record.upper = record.machine = record.unsettled = None
            record.lineage = self._ancestry(sandbox, snapshot)
            # From this commit on it is at the snapshot; the machine that has no record any more is ended by whoever
            # finds it.
            self._store.transition(record, (state,), SandboxState.PAUSED)
            life.parking.drop(sandbox)
            if running is not None:
                life.stop_timer(sandbox)
                running.close()
                life.retire(sandbox, running)
            life.event(sandbox, Event.ROLLED_BACK, f"to snapshot {snapshot.title}")
            await life.resume_locked(sandbox, left)
            return life.info(sandbox)

    def _links(self, sandbox: Sandbox, snapshot: Template) -> Checkpoint:
        """A snapshot's checkpoint in the directory of a sandbox. Raises NotFoundError when it was just deleted."""
        try:
            return snapshot.checkpoint.link_into(self._machines.directory(sandbox.id))
        except OSError as error:
            self._machines.tidy(sandbox.record, *sandbox.machines)
            if not snapshot.directory.exists():
                raise NotFoundError(f"snapshot {snapshot.title} does not exist") from error
            raise

    def _ancestry(self, sandbox: Sandbox, snapshot: Template) -> list[str]:
        """The lineage of a sandbox that is at `snapshot` now: parents as far as they are stored, then what it knows."""
        known, parents = sandbox.record.lineage, {t.id: t.manifest.parent for t in self._life.repository.templates()}
        found: list[str] = []
        identity: str | None = snapshot.id
        while identity is not None and identity not in known and identity not in found:
            found.append(identity)
            identity = parents.get(identity)
        if identity is None:  # a parent was deleted
            identity = sandbox.template.id
        return [*found, *(known[known.index(identity) :] if identity in known else [])][:LINEAGE]


def _policy(sandbox: Sandbox) -> Policy:
    return egress_policy(sandbox.record.options.network)
