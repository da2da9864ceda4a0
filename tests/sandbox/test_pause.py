"""Pause, resume, time and traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import (
    ConflictError,
    GuestError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import NetworkOptions, OnTimeout, PauseMode, SandboxState
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeSlot
from tests.sandbox.world import (
    BASE,
    ENDED,
    World,
    agree,
    gone,
    options,
    read,
    run,
    settled,
    until,
    vm_of,
    write,
)

# Pause and resume


@ENDED
def test_pause_and_connect(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        paused = await manager.get(info.id)
        assert (paused.state, paused.pause_mode) == (SandboxState.PAUSED, PauseMode.FULL)
        await settled(manager)
        assert world.host.alive == {}
        with pytest.raises(ConflictError):
            await manager.pause(info.id)
        with pytest.raises(ConflictError):
            await manager.set_timeout(info.id, 5)
        with pytest.raises(ConflictError):
            await manager.set_network(info.id, NetworkOptions())
        resumed, flag = await manager.connect(info.id, 1000)
        assert flag
        assert resumed.state is SandboxState.RUNNING
        assert resumed.pause_mode is None
        again, flag = await manager.connect(info.id, 10)
        assert not flag
        assert again.end_at == resumed.end_at  # never shorter
        with pytest.raises(ConflictError):
            await manager.resume(info.id, 300)

    run(world, scenario)


@ENDED
def test_connect_waits_for_a_pause_under_way_and_for_the_old_machine(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.hold = {"capture": asyncio.Event(), "kill": asyncio.Event()}
        pausing = asyncio.create_task(manager.pause(info.id))
        await world.host.until("capture")
        connecting = asyncio.create_task(manager.connect(info.id, 300))
        world.host.hold["capture"].set()
        await pausing
        await world.host.until("kill")
        assert world.host.count["prepare"] == 1  # of the create: the old process still holds the disk
        world.host.hold["kill"].set()
        assert (await connecting)[1]

    run(world, scenario)


@ENDED
def test_many_connects_resume_once(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        results = await asyncio.gather(*(manager.connect(info.id, 300) for _ in range(8)))
        assert sorted(flag for _, flag in results) == [False] * 7 + [True]
        assert world.host.count["started"] == 2

    run(world, scenario)


def test_pause_without_memory_boots_from_the_disk(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id, memory=False)
        assert world.host.count["sync"] == 1  # while the guest could still write
        assert (await manager.get(info.id)).pause_mode is PauseMode.FILESYSTEM
        await manager.connect(info.id, 300)
        assert world.host.count["boot"] == 1
        await manager.pause(info.id)
        assert world.host.count["sync"] == 1  # what is not written yet is in the memory that is kept
        await manager.connect(info.id, 300, memory=False)
        assert world.host.count["boot"] == 2

    run(world, scenario)


@pytest.mark.parametrize("how", [{"require_healthy": True}, {"memory": False}])
def test_a_pause_that_needs_a_healthy_guest_refuses_a_sick_one(world: World, how: dict[str, bool]) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.listens = False
        with pytest.raises(UnavailableError):
            await manager.pause(info.id, **how)
        assert (await manager.get(info.id)).state is SandboxState.RUNNING
        assert vm_of(manager, info.id).runs

    run(world, scenario)


@pytest.mark.parametrize("error", [VmmError("no"), OSError(28, "No space left on device")])
def test_a_failed_capture_leaves_the_guest_running(world: World, error: Exception) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        before = manager._sandboxes[info.id].running
        assert before is not None
        world.host.fail["capture"] = error
        with pytest.raises(type(error)):
            await manager.pause(info.id)
        world.host.fail.clear()
        assert (await manager.get(info.id)).state is SandboxState.RUNNING
        assert vm_of(manager, info.id).runs
        assert before.closed.done()  # its connections were told
        assert not manager._sandboxes[info.id].running.closed.done()  # type: ignore[union-attr]
        vm_of(manager, info.id).die()  # and it is still watched
        await settled(manager)
        assert await gone(manager, info.id)

    run(world, scenario)


@pytest.mark.parametrize("error", [VmmError("no"), OSError(28, "No space left on device")])
def test_a_failed_capture_of_a_machine_that_does_not_go_on_loses_it(
    world: World, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.fail |= {"capture": VmmError("no"), "resume": error}
        with pytest.raises(VmmError):
            await manager.pause(info.id)
        world.host.fail.clear()
        assert await gone(manager, info.id)
        assert world.host.alive == {}

    with caplog.at_level(logging.ERROR):
        run(world, scenario)
    assert "did not go on" in caplog.text


@pytest.mark.parametrize("step", ["prepare", "create layer", "open image", "map", "load", "resume", "answer", "damage"])
@ENDED
def test_a_failed_resume_stays_paused_with_memory_and_disk(tmp_path: Path, step: str) -> None:
    """Also when its guest has run: what that wrote went to a layer of its own, which is gone with it."""
    world = World(tmp_path / "home", **{"agent.timeout": 1})
    told = []

    async def misbehaves(slot: FakeSlot, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert slot.vm is not None
        assert slot.vm.disk is not None
        if slot.vm.runs:
            slot.vm.write("a", "wrong")
            slot.vm.write_disk("a", "wrong")
            told.append(slot.vm)
        await doubles.silent(slot, reader, writer)

    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        write(manager, info.id, a="1")
        await manager.pause(info.id)
        await settled(manager)
        files = world.files(info.id)
        if step == "answer":
            world.host.guest = misbehaves
        elif step == "damage":
            state = next((world.home.sandboxes / info.id).glob("*.state"))
            state.rename(tmp_path / "state")
        else:
            world.host.fail[step] = VmmError("no")
        with pytest.raises((VmmError, GuestError)):
            await manager.connect(info.id, 300)
        paused = await manager.get(info.id)
        assert (paused.state, paused.pause_mode) == (SandboxState.PAUSED, PauseMode.FULL)
        assert bool(told) == (step == "answer")
        assert world.host.alive == {}
        world.host.fail.clear()
        world.host.guest = doubles.healthy
        if step == "damage":
            (tmp_path / "state").rename(state)
        assert world.files(info.id) == files
        assert (await manager.connect(info.id, 300))[1]
        assert read(manager, info.id) == ({"a": "1"}, {"a": "1"})

    run(world, scenario)


@pytest.mark.parametrize("memory", [True, False])
def test_what_a_guest_has_in_memory_and_on_disk_survives_pauses(world: World, memory: bool) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        expected: doubles.Content = {}
        for number in range(12):  # enough for layers to be merged
            write(manager, info.id, **{f"new{number}": f"{number}", "same": f"{number % 2}"})
            expected |= {f"new{number}": f"{number}", "same": f"{number % 2}"}
            await manager.pause(info.id, memory=memory)
            await settled(manager)
            await manager.connect(info.id, 300)
            assert read(manager, info.id) == (expected if memory else {}, expected)
        record = manager._sandboxes[info.id].record
        assert len(record.disk) < 12
        assert len(record.memory) < 12

    run(world, scenario)


@ENDED
def test_a_caller_that_is_cancelled_does_not_stop_the_operation(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        operations: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("prepare", lambda: manager.create(BASE)),
            ("capture", lambda: manager.pause(next(iter(manager._sandboxes)))),
            ("prepare", lambda: manager.connect(next(iter(manager._sandboxes)), 300)),
            ("kill", lambda: manager.kill(next(iter(manager._sandboxes)))),
        ]
        for step, operation in operations:
            await settled(manager)
            world.host.reached.clear()
            world.host.hold[step] = asyncio.Event()
            caller = asyncio.ensure_future(operation())
            await world.host.until(step)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            world.host.hold.pop(step).set()
            await settled(manager)
            states = [s.state for s in manager._sandboxes.values()]
            expected = {"capture": [SandboxState.PAUSED], "prepare": [SandboxState.RUNNING], "kill": []}[step]
            assert states == expected, step
            agree(world, manager)

    run(world, scenario)


# Time


def test_time_out_kills(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.set_timeout(info.id, 0)
        await until(lambda: info.id not in manager._sandboxes)

    run(world, scenario)


def test_time_out_pauses_when_asked_and_as_asked(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        for memory, mode in ((True, PauseMode.FULL), (False, PauseMode.FILESYSTEM)):
            info = await manager.create(options(on_timeout=OnTimeout.PAUSE, pause_memory=memory))
            sandbox = manager._sandboxes[info.id]
            await manager.set_timeout(info.id, 0)
            await until(lambda sandbox=sandbox: sandbox.state is SandboxState.PAUSED)  # type: ignore[misc]
            assert (await manager.get(info.id)).pause_mode is mode

    run(world, scenario)


@pytest.mark.parametrize("more", ["set_timeout", "refresh", "connect"])
@pytest.mark.parametrize("on_timeout", list(OnTimeout))
def test_who_was_told_that_there_is_more_time_has_it(world: World, more: str, on_timeout: OnTimeout) -> None:
    """Its time was over, but its end had to wait: for a snapshot that was under way, or only for its turn."""

    async def scenario(manager: Manager) -> None:
        sandbox = manager._sandboxes[(await manager.create(options(on_timeout=on_timeout))).id]
        if on_timeout is OnTimeout.PAUSE:
            world.host.hold["capture"] = asyncio.Event()
            under_way = asyncio.create_task(manager.snapshot(sandbox.id))
            await world.host.until("capture")
        manager._life.stop_timer(sandbox)
        manager._life._expire(sandbox)
        if more == "connect":
            manager._life.extend(sandbox, 300)  # which it does before anybody else has a turn
        else:
            await getattr(manager, more)(sandbox.id, 300)
        if on_timeout is OnTimeout.PAUSE:
            world.host.hold.pop("capture").set()
            await under_way
        await settled(manager)
        assert manager._sandboxes.get(sandbox.id) is sandbox
        assert sandbox.state is SandboxState.RUNNING

    run(world, scenario)


@pytest.mark.parametrize("by", ["snapshot", "time"])
def test_a_kill_while_a_time_out_pauses_is_no_error(world: World, by: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its time is over, and the pause waits for a snapshot that is under way, or is under way itself."""

    async def scenario(manager: Manager) -> None:
        sandbox = manager._sandboxes[(await manager.create(options(on_timeout=OnTimeout.PAUSE))).id]
        world.host.hold["capture"] = asyncio.Event()
        if by == "snapshot":
            under_way = [asyncio.create_task(manager.snapshot(sandbox.id))]
            await world.host.until("capture")
        manager._life.stop_timer(sandbox)
        manager._life._expire(sandbox)
        if by == "time":
            under_way = []
            await world.host.until("capture")
        killing = asyncio.create_task(manager.kill(sandbox.id))
        await until(lambda: sandbox.doomed)
        world.host.hold.pop("capture").set()
        await asyncio.gather(killing, *under_way, return_exceptions=True)
        await settled(manager)
        assert await gone(manager, sandbox.id)

    with caplog.at_level(logging.ERROR):
        run(world, scenario)
    assert caplog.text == ""


def test_resume_can_change_what_happens_at_the_end(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        resumed = await manager.resume(info.id, 60, on_timeout=OnTimeout.PAUSE)
        assert resumed.on_timeout is OnTimeout.PAUSE
        agree(world, manager)

    run(world, scenario)


@pytest.mark.parametrize("sick", ["capture", "health"])
def test_an_automatic_pause_that_fails_is_tried_again_later(world: World, sick: str) -> None:
    """Not at once, which would stop and start the guest without end, and not never."""

    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(on_timeout=OnTimeout.PAUSE, pause_memory=sick == "capture"))
        sandbox = manager._sandboxes[info.id]
        if sick == "capture":
            world.host.fail["capture"] = VmmError("no")
        else:
            world.host.listens = False
        before = asyncio.get_running_loop().time()
        await manager.set_timeout(info.id, 0)
        await until(lambda: sandbox.timer is not None and sandbox.timer.when() - before > 5)
        await settled(manager)
        assert sandbox.state is SandboxState.RUNNING
        assert world.host.count["capture"] == (sick == "capture")
        world.host.fail.clear()
        world.host.listens = True

    run(world, scenario)


def test_refresh_never_shortens_and_set_timeout_may(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(timeout=100))
        await manager.refresh(info.id, 10)
        assert (await manager.get(info.id)).end_at == info.end_at
        await manager.refresh(info.id, 500)
        longer = (await manager.get(info.id)).end_at
        assert longer > info.end_at
        await manager.set_timeout(info.id, 50)
        assert (await manager.get(info.id)).end_at < info.end_at
        with pytest.raises(InvalidInputError):
            await manager.set_timeout(info.id, 10**6)
        with pytest.raises(InvalidInputError):
            await manager.refresh(info.id, -1)

    run(world, scenario)


# Traffic


def test_reach_wakes_only_who_asked_for_it(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        sleeper = await manager.create(options(auto_resume=True))
        other = await manager.create(BASE)
        for info in (sleeper, other):
            assert (await manager.reach(info.id))[1].incarnation
            await manager.pause(info.id)
        woken = await asyncio.gather(*(manager.reach(sleeper.id) for _ in range(4)))
        assert len({running.incarnation for _, running in woken}) == 1
        with pytest.raises(NotFoundError):
            await manager.reach(other.id)
        with pytest.raises(NotFoundError):
            await manager.reach("nobody")

    run(world, scenario)


def test_reach_wakes_once_more_who_was_paused_before_it_could_be_used(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(auto_resume=True))
        await manager.pause(info.id)
        await settled(manager)
        world.host.hold["resume"] = asyncio.Event()
        reaching = asyncio.create_task(manager.reach(info.id))
        await world.host.until("resume")
        pausing = asyncio.create_task(manager.pause(info.id))  # waits for its turn, which comes at once then
        await asyncio.sleep(0.01)
        world.host.hold.pop("resume").set()
        sandbox, running = await reaching
        await pausing
        assert sandbox.running is running
        assert world.host.count["capture"] == 2

    run(world, scenario)


def test_traffic_never_boots_from_a_disk(world: World) -> None:
    """A sandbox without its memory is another one to whoever talked to it: only an explicit connect starts it."""

    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(auto_resume=True))
        await manager.pause(info.id, memory=False)
        for _ in range(2):
            with pytest.raises(NotFoundError):
                await manager.reach(info.id)
        assert (await manager.get(info.id)).state is SandboxState.PAUSED
        await manager.connect(info.id, 300)
        await manager.reach(info.id)
        await manager.pause(info.id)
        await manager.reach(info.id)

    run(world, scenario)


def test_incarnations_are_never_the_same(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        seen = set()
        for _ in range(4):
            _, running = await manager.reach(info.id)
            seen.add(running.incarnation)
            await manager.pause(info.id)
            assert running.closed.done()
            await manager.connect(info.id, 300)
        assert len(seen) == 4

    run(world, scenario)


def test_a_pause_waits_for_a_program_that_starts(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        for ended in (False, True):
            info = await manager.create(BASE)
            sandbox = manager._sandboxes[info.id]
            first, second = sandbox.begin_start(), sandbox.begin_start()
            second()
            second()  # may be told twice
            assert sandbox.since_start < 60
            if ended:
                first()
                assert sandbox.since_start == float("inf")
            before = world.host.count["quiet"]
            await manager.pause(info.id)
            assert world.host.count["quiet"] - before == (not ended)
            first()

    run(world, scenario)
