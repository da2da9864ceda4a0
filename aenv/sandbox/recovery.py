"""Start of a daemon over what an earlier one left: adopt live machines, finish or undo what it was in the middle of."""

from __future__ import annotations

import asyncio
import logging
import shutil

from aenv.errors import AenvError, InvalidInputError, NotFoundError
from aenv.sandbox.lifecycle import Lifecycle
from aenv.sandbox.live import Sandbox
from aenv.sandbox.service import SandboxState
from aenv.sandbox.store import Record, boot_id
from aenv.snapshot.manifest import Manifest
from aenv.storage.repository import Template

log = logging.getLogger("aenv.sandbox")

HAS_MACHINE = (
    SandboxState.RUNNING,
    SandboxState.PAUSING,
    SandboxState.RESUMING,
    SandboxState.SNAPSHOTTING,
    SandboxState.FORKING,
)


class Recovery:
    """One start. `run` fills the sandboxes of a `Lifecycle` that has none yet."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._life = lifecycle
        self._machines = lifecycle.machines
        self._store = lifecycle.store
        self._orphans: set[str] = set()  # paused sandboxes that nothing is known of but their record

    async def run(self) -> None:
        records = self._store.load()
        await self._machines.sweep([r.machine for r in records if r.machine is not None])
        await asyncio.gather(*(self._recover(record) for record in records))  # a hung guest must not hold up the others
        for folder in self._machines.folders():
            if folder.name not in self._life.sandboxes and folder.name not in self._orphans:
                shutil.rmtree(folder, ignore_errors=True)

    async def _recover(self, record: Record) -> None:
        """One record found at start."""
        template = self._template(record)
        if template is None:
            await self._abandon(record)
            if record.state is SandboxState.PAUSED and not record.killed:  # it comes back when its files do
                self._orphans.add(record.id)
            else:
                self._store.delete(record.id)
            return
        for scratch in self._machines.directory(record.id).glob(".*"):
            scratch.unlink()
        sandbox = self._life.sandboxes[record.id] = Sandbox(record, template)
        state = record.state
        if record.killed:
            await self._forget(sandbox)
        elif record.unsettled not in (None, boot_id()):
            async with sandbox.lock:
                await self._life.lose(sandbox, "the host went down before its pause was on the disk")
        elif state is SandboxState.PAUSED or (state is SandboxState.RESUMING and record.machine is None):
            await self._back_to_paused(sandbox)
        elif state in HAS_MACHINE and record.machine is not None:
            await self._adopt(sandbox)
        else:  # starting or killing: what it was is not worth keeping
            await self._forget(sandbox)

    async def _forget(self, sandbox: Sandbox) -> None:
        async with sandbox.lock:
            await self._abandon(sandbox.record)
            await self._life.forget(sandbox)

    def _template(self, record: Record) -> Template | None:
        """From the repository, or from the sandbox's own copy of the manifest when it was deleted there."""
        try:
            return self._life.repository.find(record.template_id)
        except (NotFoundError, InvalidInputError) as error:
            folder = self._machines.directory(record.id)
            try:
                return Template(folder, Manifest.load(folder), ())
            except AenvError as damage:
                log.error("sandbox %s is left out: %s; %s", record.id, error, damage)
                return None

    async def _adopt(self, sandbox: Sandbox) -> None:
        record, life = sandbox.record, self._life
        state, machine = record.state, record.machine
        assert machine is not None
        running = None
        try:
            running = await self._machines.adopt(machine, self._machines.directory(record.id))
            sandbox.note_restack(running.disk)
            await self._machines.remember(running, sandbox.template.machine, record.memory)
            await running.vm.resume()  # a capture that was under way had stopped it
            await life.initialise(sandbox, running)
        except (AenvError, OSError) as error:
            async with sandbox.lock:
                if running is not None:
                    await life.end_machine(sandbox, running)
                if state is SandboxState.RESUMING:
                    await self._back_to_paused(sandbox)
                else:
                    await self._abandon(record)
                    await life.lose(sandbox, f"its machine did not survive the daemon: {error}")
            return
        sandbox.running = running
        record.state_file = None
        if state is not SandboxState.RUNNING:
            self._store.transition(record, (state,), SandboxState.RUNNING)
        self._machines.tidy(sandbox.record, *sandbox.machines)
        life.watch(sandbox, running)
        life.set_end(sandbox, record.end_at)

    async def _back_to_paused(self, sandbox: Sandbox) -> None:
        """What a resume that was cut short wrote to its disk layer is dropped: nobody was told of it."""
        record = sandbox.record
        await self._abandon(record)
        record.machine = record.upper = None
        self._store.transition(record, (record.state,), SandboxState.PAUSED)
        self._machines.tidy(sandbox.record, *sandbox.machines)
        if record.unsettled is not None:
            sandbox.ending = self._life.own(self._life.settle(sandbox))

    async def _abandon(self, record: Record) -> None:
        if record.machine is not None:
            try:
                await self._machines.abandon(record.machine, self._machines.directory(record.id))
            except Exception:
                log.exception("the machine of sandbox %s could not be ended", record.id)
