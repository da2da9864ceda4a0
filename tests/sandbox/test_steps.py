"""Everything that can be done to a sandbox, cut short at every step: by an error, and by kill -9 of the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import AenvError, VmmError
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import SandboxState
from tests.sandbox import doubles
from tests.sandbox.world import BASE, World, options, quiet, read, settled, write


async def _pause(manager: Manager, info: str) -> None:
    await manager.pause(info)


async def _pause_disk(manager: Manager, info: str) -> None:
    await manager.pause(info, memory=False)


async def _snapshot(manager: Manager, info: str) -> None:
    await manager.snapshot(info, name="new")


async def _snapshot_disk(manager: Manager, info: str) -> None:
    await manager.snapshot(info, name="new", memory=False)


async def _fork(manager: Manager, info: str) -> None:
    await manager.fork(info, 2, 300)


async def _rollback(manager: Manager, info: str) -> None:
    await manager.rollback(info, "old")


async def _connect(manager: Manager, info: str) -> None:
    await manager.connect(info, 300)


async def _boot(manager: Manager, info: str) -> None:
    await manager.connect(info, 300, memory=False)


async def _create(manager: Manager, info: str) -> None:
    await manager.create(options(template="old"))


async def _kill(manager: Manager, info: str) -> None:
    await manager.kill(info)


Contents = list[tuple[doubles.Content, doubles.Content]]
Operation = Callable[[Manager, str], Coroutine[Any, Any, None]]
NOW = {"a": "2", "b": "2"}
OLD = {"a": "1"}
# Where a failure costs a sandbox: its machine may be half mapped, or does not go on.
FATAL = ("rehome", "resume")
# Where one leaves something for the next start: a machine that cannot be killed, a slot or a disk that stays.
HARMLESS = ("kill", "release", "close image")

# Each with whether the sandbox is paused before, and what it may have in memory and on disk afterwards.
OPERATIONS: list[tuple[Operation, bool, Contents]] = [
    (_pause, False, [(NOW, NOW)]),
    (_pause_disk, False, [(NOW, NOW), ({}, NOW)]),
    (_snapshot, False, [(NOW, NOW)]),
    (_snapshot, True, [(NOW, NOW)]),
    (_snapshot_disk, False, [(NOW, NOW)]),
    (_fork, False, [(NOW, NOW)]),
    (_rollback, False, [(NOW, NOW), (OLD, OLD)]),
    (_rollback, True, [(NOW, NOW), (OLD, OLD)]),
    (_connect, True, [(NOW, NOW)]),
    (_boot, True, [(NOW, NOW), ({}, NOW)]),
    (_create, False, [(NOW, NOW)]),
    (_kill, False, [(NOW, NOW)]),
    (_kill, True, [(NOW, NOW)]),
]


async def prepare(manager: Manager, *, paused: bool) -> str:
    """A sandbox with a snapshot `old` of what it was before it became what it is."""
    source = await manager.create(BASE)
    write(manager, source.id, **OLD)
    await manager.snapshot(source.id, name="old")
    write(manager, source.id, **NOW)
    if paused:
        await manager.pause(source.id)
    await settled(manager)
    return source.id


async def check(world: World, manager: Manager, source: str, legal: Contents) -> None:
    """Every sandbox has what it may have, and can be paused and resumed; every snapshot has what it was made of."""
    sandboxes = {s.id: s.state for s in await manager.sandboxes()}
    for snapshot in await manager.snapshots():
        content = OLD if "old" in snapshot.names else NOW
        child = await manager.create(options(template=snapshot.id))
        assert read(manager, child.id) == (content if snapshot.memory else {}, content)
        await manager.kill(child.id)
    for sandbox_id, state in sandboxes.items():
        for turn in range(2):
            if state is SandboxState.PAUSED or turn:
                await manager.connect(sandbox_id, 300)
            assert read(manager, sandbox_id) in (legal if sandbox_id == source else [(NOW, NOW), (OLD, OLD)])
            await manager.pause(sandbox_id)
            await settled(manager)
    quiet(world, manager)


@pytest.mark.parametrize(("operation", "paused", "legal"), OPERATIONS)
def test_whatever_fails_at_any_step_of_anything_loses_nothing(
    tmp_path: Path, operation: Operation, paused: bool, legal: Contents
) -> None:
    """A sandbox is as it was or as it was to be; a machine that does not go on is the only reason to lose one."""

    async def failed_at(world: World, step: int) -> bool:
        async with world.daemon() as manager:
            source = await prepare(manager, paused=paused)
            world.host.error = VmmError("no") if step % 2 else OSError(28, "No space left on device")
            world.host.fail_at, world.host.stopped_at = step, ""
            outcome: object = None
            try:
                await operation(manager, source)
            except (AenvError, OSError) as problem:
                outcome = problem
            await settled(manager)
            failed = world.host.fail_at is None
            world.host.fail_at = None
            if failed and world.host.stopped_at in HARMLESS:
                return True
            assert operation is _kill or source in manager._sandboxes or world.host.stopped_at in FATAL, outcome
            quiet(world, manager)
            await check(world, manager, source, legal)
            return failed

    for step in range(100):
        world = World(tmp_path / f"home{step}")
        try:
            if not asyncio.run(failed_at(world, step)):
                return
        finally:
            world.clear()
    raise AssertionError("it never ends")


@pytest.mark.parametrize(("operation", "paused", "legal"), OPERATIONS)
def test_a_daemon_that_is_killed_at_any_step_of_anything_loses_nothing(
    tmp_path: Path, operation: Operation, paused: bool, legal: Contents
) -> None:
    """The next one has all sandboxes, each as it was or as it was to be; whole snapshots; and nothing that is of no
    use. Only who was being created, or killed, may be gone."""
    for step in range(100):
        world = World(tmp_path / f"home{step}")
        if not killed_at(world, step, operation, paused, legal):
            return
    raise AssertionError("it never ends")


def killed_at(world: World, step: int, operation: Operation, paused: bool, legal: Contents) -> bool:
    async def before() -> str:
        async with world.daemon(crash=True) as manager:
            return await prepare(manager, paused=paused)

    async def after() -> None:
        async with world.daemon() as manager:
            await settled(manager)
            quiet(world, manager)
            assert operation is _kill or source in manager._sandboxes
            await check(world, manager, source, legal)

    source = asyncio.run(before())
    stopped = world.killed(lambda manager: operation(manager, source), step)
    try:
        asyncio.run(after())
    finally:
        world.clear()
    return stopped
