"""Chains of layers stay short: in the background, neighbouring layers of a sandbox become one.

What is merged is the record's list, from which the next machine and the next snapshot are made, and the live disk's.
The RAM of a running machine goes on with the files it has; snapshots keep theirs, and get short chains because those of
their sandboxes are.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aenv.errors import AenvError
from aenv.sandbox.live import Sandbox
from aenv.sandbox.machines import Machines
from aenv.sandbox.store import Store
from aenv.snapshot.checkpoint import LAYER_SUFFIX, index_of, new_layer_id
from aenv.snapshot.compaction import compact, worth_merging

log = logging.getLogger("aenv.sandbox")


class Chains:
    """Shortens chains, one at a time: it competes with guests for disk and memory bandwidth."""

    def __init__(self, machines: Machines, store: Store) -> None:
        self._machines = machines
        self._store = store
        self._turn = asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: set[str] = set()

    def look_at(self, sandbox: Sandbox) -> None:
        """Merge layers of this sandbox soon if its chains have become long."""
        if sandbox.id in self._pending or not any(_candidates(self._machines, sandbox)):
            return
        self._pending.add(sandbox.id)
        task = asyncio.create_task(self._shorten(sandbox), name=f"compaction of {sandbox.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop what is under way, leaving nothing of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _shorten(self, sandbox: Sandbox) -> None:
        try:
            async with self._turn:
                disk, memory = _candidates(self._machines, sandbox)
                for names, of_memory in ((disk, False), (memory, True)):
                    if names and not sandbox.doomed:
                        await self._merge(sandbox, names, of_memory=of_memory)
        except (AenvError, OSError) as error:  # a long chain is slower, not wrong
            log.warning("the layers of sandbox %s could not be merged: %s", sandbox.id, error)
        finally:
            self._pending.discard(sandbox.id)

    async def _merge(self, sandbox: Sandbox, names: list[str], *, of_memory: bool) -> None:
        folder, merged = self._machines.directory(sandbox.id), f"{new_layer_id()}{LAYER_SUFFIX}"
        scratch = folder / f".{merged}"  # which `tidy` leaves alone
        await compact([folder / name for name in names], scratch, below=True)
        async with sandbox.lock:
            if sandbox.ending is not None:  # which may change what its machine is made of
                await asyncio.wait([sandbox.ending])
            record, machine = sandbox.record, sandbox.running or sandbox.parked
            chain = record.memory if of_memory else record.disk
            start = next((i for i in range(len(chain)) if chain[i : i + len(names)] == names), None)
            if start is None or sandbox.doomed:  # rolled back meanwhile, or gone
                scratch.unlink(missing_ok=True)
                return
            scratch.rename(folder / merged)
            shorter = [*chain[:start], merged, *chain[start + len(names) :]]
            if of_memory:
                if machine is not None:
                    await self._machines.remember(machine, sandbox.template.machine, shorter)
                record.memory = shorter
            else:
                if machine is not None:
                    await self._machines.replace(machine, shorter)
                record.disk = shorter
            self._store.save(record)
            self._machines.tidy(sandbox.record, *sandbox.machines)
            log.info("sandbox %s: %d layers became one", sandbox.id, len(names))


def _candidates(machines: Machines, sandbox: Sandbox) -> tuple[list[str], list[str]]:
    """Layers of disk and of memory that are worth merging."""
    folder, record = machines.directory(sandbox.id), sandbox.record
    return _choose(folder, record.disk), _choose(folder, record.memory)


def _choose(folder: Path, chain: list[str]) -> list[str]:
    above = chain[1:]
    paths = [folder / name for name in above]
    try:
        if any(index_of(path).exists() for path in paths):
            return []  # not sealed yet
        found = worth_merging([path.stat().st_size for path in paths])
    except FileNotFoundError:
        return []  # the sandbox is going away
    return above[found] if found is not None else []
