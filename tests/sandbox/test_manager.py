"""The life cycle of sandboxes, on stand-ins for machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from aenv.errors import (
    ConflictError,
    GuestError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    UnavailableError,
    VmmError,
)
from aenv.observe.logs import LogQuery
from aenv.sandbox.manager import PAUSES_AT_STOP, Manager
from aenv.sandbox.service import CreateOptions, NetworkOptions, OnTimeout, PauseMode, SandboxState
from tests.sandbox import doubles
from tests.sandbox.doubles import FakeSlot, FakeVm, World

BASE = CreateOptions(template="base", timeout=300)


def options(**changes: Any) -> CreateOptions:
    return CreateOptions(**{"template": "base", "timeout": 300, **changes})


def run(world: World, scenario: Callable[[Manager], Coroutine[Any, Any, None]]) -> None:
    """A scenario in one life of a daemon. At its end no machine may be left, and memory is what the store says."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with world.daemon() as manager:
                await scenario(manager)
                agree(world, manager)
        assert world.host.alive == {}
        assert world.host.count["started"] == world.host.count["ended"]

    asyncio.run(main())


def agree(world: World, manager: Manager) -> None:
    assert {r.id: r for r in world.store.load()} == {s.id: s.record for s in manager._sandboxes.values()}


def guest_of(manager: Manager, sandbox_id: str) -> tuple[FakeVm, FakeSlot]:
    running = manager._sandboxes[sandbox_id].running
    assert running is not None
    return cast(FakeVm, running.vm), cast(FakeSlot, running.slot)


async def settled(manager: Manager) -> None:
    """Wait for all operations under way, and for those that they begin."""
    await asyncio.sleep(0)
    while manager._tasks:
        await asyncio.wait(set(manager._tasks))
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def gone(manager: Manager, sandbox_id: str) -> bool:
    try:
        await manager.get(sandbox_id)
    except NotFoundError:
        return True
    return False


# Create


def test_create_initialises_the_agent_and_shows_the_sandbox(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(env={"A": "1"}, metadata={"user": "7"}, timeout=60))
        assert info.state is SandboxState.RUNNING
        assert info.template_id == world.template.id
        assert info.alias == "base"
        assert info.metadata == {"user": "7"}
        assert 59 <= (info.end_at - info.started_at).total_seconds() <= 61
        assert info.envd_token == world.tokens.envd(info.id)
        assert info.traffic_token is None
        vm, slot = guest_of(manager, info.id)
        assert vm.runs
        (init,) = slot.inits
        assert init["envVars"] == {"A": "1"}
        assert init["accessToken"] == info.envd_token
        assert init["sandboxID" if "sandboxID" in init else "sandboxId"] == info.id
        assert await manager.get(info.id) == info
        assert await manager.sandboxes() == [info]
        (entry,) = await manager.logs(info.id, LogQuery())
        assert "created" in entry.message

    run(world, scenario)


def test_every_incarnation_gets_entropy_of_its_own_and_one_machine_id(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        inits = []
        info = await manager.create(BASE)
        inits += guest_of(manager, info.id)[1].inits
        for _ in range(3):
            await manager.pause(info.id)
            await manager.connect(info.id, 300)
            inits += guest_of(manager, info.id)[1].inits
        assert len({i["entropy"] for i in inits}) == 4
        assert len({i["lifecycleID"] for i in inits}) == 4
        assert len({i["machineId"] if "machineId" in i else i["machineID"] for i in inits}) == 1

    run(world, scenario)


def test_tokens_follow_what_was_asked(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        private = await manager.create(options(network=NetworkOptions(allow_public_traffic=False)))
        opened = await manager.create(options(secure=False))
        assert private.traffic_token == world.tokens.traffic(private.id)
        assert opened.envd_token is None
        assert guest_of(manager, opened.id)[1].inits[0]["accessToken"] is None

    run(world, scenario)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"template": "nothing"}, NotFoundError),
        ({"template": "../etc"}, InvalidInputError),
        ({"timeout": 0}, InvalidInputError),
        ({"timeout": 10**6}, InvalidInputError),
        ({"network": NetworkOptions(allow_out=("example.com",))}, InvalidInputError),
        ({"network": NetworkOptions(rules={"example.com": {}})}, InvalidInputError),
    ],
)
def test_what_cannot_be_created_leaves_nothing(world: World, wrong: dict[str, Any], error: type[Exception]) -> None:
    async def scenario(manager: Manager) -> None:
        with pytest.raises(error):
            await manager.create(options(**wrong))
        assert world.folders() == set()
        assert world.host.count["started"] == 0

    run(world, scenario)


@pytest.mark.parametrize("step", ["new_disk", "restore", "resume"])
@pytest.mark.parametrize("error", [VmmError("broken"), OSError(28, "No space left on device")])
def test_a_create_that_fails_at_any_step_leaves_nothing(world: World, step: str, error: Exception) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.fail[step] = error
        with pytest.raises(type(error)):
            await manager.create(BASE)
        world.host.fail.clear()
        assert world.folders() == set()
        assert await manager.sandboxes() == []
        assert world.host.alive == {}

    run(world, scenario)


def test_a_guest_that_never_answers_is_given_up_with_its_console(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def scenario(manager: Manager) -> None:
        world.host.guest = doubles.silent
        with pytest.raises(GuestError, match=r"within 1 s[\s\S]*last words"):
            await manager.create(BASE)

    run(world, scenario)


def test_a_guest_that_dies_while_it_starts_is_reported_at_once(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.guest = doubles.silent
        creating = asyncio.create_task(manager.create(BASE))
        await until(lambda: bool(world.host.servers))
        next(iter(world.host.alive.values()))[0].die("out of memory")
        with pytest.raises(GuestError, match=r"ended while it started: out of memory[\s\S]*kernel panic"):
            await creating

    run(world, scenario)


def test_an_agent_that_listens_late_is_waited_for(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.listens = False
        creating = asyncio.create_task(manager.create(BASE))
        await world.host.until("resume")
        world.host.listens = True
        assert (await creating).state is SandboxState.RUNNING

    run(world, scenario)


# A kill while something else is under way


@pytest.mark.parametrize("moment", ["restore", "resume", "answer"])
def test_kill_during_create_ends_it(tmp_path: Path, moment: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 600})

    async def scenario(manager: Manager) -> None:
        world.host.guest = doubles.healthy if moment == "answer" else doubles.silent
        world.host.hold[moment] = asyncio.Event()
        creating = asyncio.create_task(manager.create(BASE))
        await world.host.until(moment)
        (sandbox_id,) = manager._sandboxes
        killing = asyncio.create_task(manager.kill(sandbox_id))
        await asyncio.sleep(0)
        if moment != "answer":
            world.host.hold[moment].set()
        with pytest.raises(NotFoundError):
            await creating
        await killing
        world.host.hold.clear()
        assert world.host.alive == {}
        assert world.folders() == set()

    run(world, scenario)


@pytest.mark.parametrize("moment", ["restore", "resume", "answer"])
def test_kill_during_resume_ends_it(tmp_path: Path, moment: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 600})

    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        await settled(manager)
        world.host.reached.clear()
        world.host.guest = doubles.healthy if moment == "answer" else doubles.silent
        world.host.hold[moment] = asyncio.Event()
        resuming = asyncio.create_task(manager.connect(info.id, 300))
        await world.host.until(moment)
        killing = asyncio.create_task(manager.kill(info.id))
        await asyncio.sleep(0)
        if moment != "answer":
            world.host.hold[moment].set()
        with pytest.raises(NotFoundError):
            await resuming
        await killing
        world.host.hold.clear()
        assert world.host.alive == {}
        assert world.folders() == set()

    run(world, scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_kill_during_pause_ends_it(world: World, fails: bool) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.hold["capture"] = asyncio.Event()
        pausing = asyncio.create_task(manager.pause(info.id))
        await world.host.until("capture")
        killing = asyncio.create_task(manager.kill(info.id))
        await asyncio.sleep(0)
        if fails:
            world.host.fail["capture"] = VmmError("no")
        world.host.hold["capture"].set()
        await asyncio.gather(pausing, return_exceptions=True)
        await killing
        assert world.host.alive == {}
        assert await gone(manager, info.id)

    run(world, scenario)


def test_kill_works_in_every_state_and_twice_at_once(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        running, paused = await manager.create(BASE), await manager.create(BASE)
        await manager.pause(paused.id)
        for info in (running, paused):
            await asyncio.gather(manager.kill(info.id), manager.kill(info.id))
            assert await gone(manager, info.id)
            with pytest.raises(NotFoundError):
                await manager.kill(info.id)
        assert world.folders() == set()

    run(world, scenario)


@pytest.mark.parametrize("error", [VmmError("stuck"), OSError(5, "Input/output error")])
def test_a_machine_that_cannot_be_ended_does_not_keep_the_sandbox(world: World, error: Exception) -> None:
    async def scenario(manager: Manager) -> None:
        killed, paused = await manager.create(BASE), await manager.create(BASE)
        world.host.fail["end"] = error
        await manager.kill(killed.id)
        assert await gone(manager, killed.id)
        await manager.pause(paused.id)
        await settled(manager)
        with pytest.raises(type(error)):  # never two machines on one disk
            await manager.connect(paused.id, 300)
        assert (await manager.get(paused.id)).state is SandboxState.PAUSED
        world.host.fail.clear()
        assert (await manager.connect(paused.id, 300))[1]
        await manager.pause(paused.id)
        world.host.fail["end"] = error
        await settled(manager)
        await manager.kill(paused.id)
        world.host.fail.clear()
        assert world.folders() == set()
        assert await world.machines.sweep(set()) >= 1  # as the next start of the daemon does

    run(world, scenario)


# Pause and resume


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


def test_connect_waits_for_a_pause_under_way_and_for_the_old_machine(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.hold = {"capture": asyncio.Event(), "end": asyncio.Event()}
        pausing = asyncio.create_task(manager.pause(info.id))
        await world.host.until("capture")
        connecting = asyncio.create_task(manager.connect(info.id, 300))
        world.host.hold["capture"].set()
        await pausing
        await world.host.until("end")
        assert world.host.count["restore"] == 1  # of the create: the old process still holds the disk
        world.host.hold["end"].set()
        assert (await connecting)[1]

    run(world, scenario)


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
        assert guest_of(manager, info.id)[0].runs

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
        assert guest_of(manager, info.id)[0].runs
        assert before.closed.done()  # its connections were told
        assert not manager._sandboxes[info.id].running.closed.done()  # type: ignore[union-attr]
        guest_of(manager, info.id)[0].die()  # and it is still watched
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


@pytest.mark.parametrize("step", ["restore", "resume", "apply", "answer"])
def test_a_failed_resume_stays_paused(tmp_path: Path, step: str) -> None:
    world = World(tmp_path / "home", **{"agent.timeout": 1})

    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        await settled(manager)
        if step == "answer":
            world.host.guest = doubles.silent
        elif step == "apply":
            (world.folder / "sandboxes" / info.id / "pause" / "state").rename(tmp_path / "state")
        else:
            world.host.fail[step] = VmmError("no")
        with pytest.raises((VmmError, GuestError)):
            await manager.connect(info.id, 300)
        paused = await manager.get(info.id)
        assert paused.state is SandboxState.PAUSED
        # Once its guest has run, its disk may have changed: the memory of the pause must not be used with it.
        assert paused.pause_mode is (PauseMode.FULL if step in ("restore", "apply") else PauseMode.FILESYSTEM)
        assert world.host.alive == {}
        world.host.fail.clear()
        world.host.guest = doubles.healthy
        if step == "apply":
            (tmp_path / "state").rename(world.folder / "sandboxes" / info.id / "pause" / "state")
        assert (await manager.connect(info.id, 300))[1]

    run(world, scenario)


def test_a_caller_that_is_cancelled_does_not_stop_the_operation(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        operations: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("restore", lambda: manager.create(BASE)),
            ("capture", lambda: manager.pause(next(iter(manager._sandboxes)))),
            ("restore", lambda: manager.connect(next(iter(manager._sandboxes)), 300)),
            ("end", lambda: manager.kill(next(iter(manager._sandboxes)))),
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
            expected = {"capture": [SandboxState.PAUSED], "restore": [SandboxState.RUNNING], "end": []}[step]
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


# Death of a machine


@pytest.mark.parametrize("during", ["nothing", "capture"])
def test_a_dead_machine_is_noticed_and_its_reason_logged(
    world: World, during: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        vm, _ = guest_of(manager, info.id)
        if during == "capture":
            world.host.hold["capture"] = asyncio.Event()
            world.host.fail["capture"] = VmmError("the machine is gone")
            pausing = asyncio.create_task(manager.pause(info.id))
            await world.host.until("capture")
            vm.die("killed by signal 11")
            world.host.hold["capture"].set()
            with pytest.raises(VmmError):
                await pausing
        else:
            vm.die("killed by signal 11")
        await asyncio.sleep(0)
        await settled(manager)
        assert await gone(manager, info.id)
        assert world.folders() == set()

    with caplog.at_level(logging.ERROR):
        run(world, scenario)
    assert "lost" in caplog.text
    assert ("killed by signal 11" if during == "nothing" else "machine is gone") in caplog.text


# Network


def test_set_network_replaces_egress_and_keeps_the_rest(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(options(network=NetworkOptions(allow_public_traffic=False, https_ports=(8443,))))
        _, slot = guest_of(manager, info.id)
        await manager.set_network(info.id, NetworkOptions(deny_out=("8.8.4.4",)))
        assert "8.8.4.4" in slot.policy.deny
        network = (await manager.get(info.id)).network
        assert network.deny_out == ("8.8.4.4",)
        assert not network.allow_public_traffic
        assert network.https_ports == (8443,)
        agree(world, manager)
        world.host.fail["apply"] = VmmError("nft")
        with pytest.raises(VmmError):
            await manager.set_network(info.id, NetworkOptions())
        assert (await manager.get(info.id)).network == network
        await manager.pause(info.id)
        await manager.connect(info.id, 300)
        assert "8.8.4.4" in guest_of(manager, info.id)[1].policy.deny

    run(world, scenario)


# Limits


def test_the_limit_counts_what_runs(tmp_path: Path) -> None:
    world = World(tmp_path / "home", **{"sandbox.max": 2})

    async def scenario(manager: Manager) -> None:
        first, second = await asyncio.gather(manager.create(BASE), manager.create(BASE))
        with pytest.raises(LimitError):
            await manager.create(BASE)
        await manager.pause(first.id)
        third = await manager.create(options(auto_resume=True))
        with pytest.raises(LimitError):
            await manager.connect(first.id, 300)  # it would be the third
        assert (await manager.get(first.id)).state is SandboxState.PAUSED
        assert (await manager.connect(third.id, 300))[1] is False
        await manager.kill(second.id)
        assert (await manager.connect(first.id, 300))[1]

    run(world, scenario)


# What is observed


def test_the_log_tells_the_life_of_a_sandbox(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        await manager.pause(info.id)
        await manager.connect(info.id, 300)
        await manager.set_timeout(info.id, 100)
        await manager.set_network(info.id, NetworkOptions())
        world.host.fail["capture"] = VmmError("no")
        with pytest.raises(VmmError):
            await manager.pause(info.id)
        world.host.fail.clear()
        entries = await manager.logs(info.id, LogQuery())
        assert [e.fields["event"] for e in entries] == ["created", "paused", "resumed", "updated", "updated"]
        await manager.kill(info.id)
        with pytest.raises(NotFoundError):
            await manager.logs(info.id, LogQuery())
        assert manager._logs._rings == {}

    run(world, scenario)


def test_metrics_are_sampled_while_it_runs(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        world.host.metrics = dict(doubles.METRICS, mem_used=77)
        await manager._sample_one(manager._sandboxes[info.id])
        point = (await manager.metrics(info.id, None, None))[-1]
        assert (point.mem_used, point.mem_total, point.cpu_used_pct) == (77, 100, 1.5)
        await manager.pause(info.id)
        before = await manager.metrics(info.id, None, None)
        await manager._sample_one(manager._sandboxes[info.id])
        assert await manager.metrics(info.id, None, None) == before

    run(world, scenario)


def test_the_console_of_the_guest_is_in_the_log(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        assert sandbox.running is not None
        vm = cast(FakeVm, sandbox.running.vm)
        for fresh in (b"first\r\n\nsec", b"ond\n", b"\xff bytes\n", b"x" * 5000, b"\nlast\n"):
            vm.console += fresh
            await manager._sample_one(sandbox)
        entries = await manager.logs(info.id, LogQuery())
        lines = [e.message for e in entries if e.fields["source"] == "console"]
        assert lines == ["first", "second", "\ufffd bytes", "x" * 5000, "last"]

    run(world, scenario)


HOSTILE_METRICS: list[dict[str, Any]] = [
    {"mem_used": 2**63},
    {"mem_used": 2**200},
    {"mem_used": -1},
    {"cpu_used_pct": "much"},
    {"cpu_count": None},
    {"extra": [[[]]]},
    {},
]


@pytest.mark.parametrize("hostile", HOSTILE_METRICS)
def test_what_one_guest_says_does_not_stop_the_metrics_of_others(world: World, hostile: dict[str, Any]) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        world.host.metrics = doubles.METRICS | hostile
        await manager._sample_one(sandbox)
        world.host.metrics = dict(doubles.METRICS)
        await manager._sample_one(sandbox)
        point = await manager.latest_metric(info.id)
        assert point is not None
        assert point.mem_used == 50

    run(world, scenario)


def test_metrics_of_a_guest_that_went_away_are_dropped(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        sandbox = manager._sandboxes[info.id]
        await until(lambda: manager._metrics.latest(info.id) is not None or world.host.count["answer"] > 0)
        world.host.hold["answer"] = asyncio.Event()
        sampling = asyncio.create_task(manager._sample_one(sandbox))
        world.host.reached.clear()
        await world.host.until("answer")
        await manager.kill(info.id)
        world.host.hold["answer"].set()
        await sampling
        assert manager._metrics.latest(info.id) is None

    run(world, scenario)


# Templates


def test_templates_in_use_are_kept(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        (listed,) = await manager.templates()
        assert listed.names == ("base",)
        info = await manager.create(BASE)
        await manager.pause(info.id)
        with pytest.raises(ConflictError, match=info.id):
            await manager.delete_template("base")
        await manager.kill(info.id)
        await manager.delete_template("base")
        with pytest.raises(NotFoundError):
            await manager.template("base")

    run(world, scenario)


def test_nothing_starts_from_a_template_that_is_being_deleted(world: World) -> None:
    async def scenario(manager: Manager) -> None:
        world.host.hold["cool"] = asyncio.Event()
        deleting = asyncio.create_task(manager.delete_template("base"))
        await world.host.until("cool")
        with pytest.raises(NotFoundError):
            await manager.create(BASE)
        world.host.hold["cool"].set()
        await deleting

    run(world, scenario)


# The end of the daemon


def test_close_pauses_all_and_the_next_daemon_has_them(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            infos = [await manager.create(BASE) for _ in range(5)]
            await manager.pause(infos[0].id)
        assert world.host.alive == {}
        assert world.machines.closed
        async with world.daemon() as manager:
            found = {s.id: s.state for s in await manager.sandboxes()}
            assert found == {i.id: SandboxState.PAUSED for i in infos}
            for info in infos:
                assert (await manager.connect(info.id, 300))[1]

    asyncio.run(main())


def test_close_waits_for_what_is_under_way_and_refuses_new_work(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            paused = await manager.create(options(auto_resume=True))
            await manager.pause(paused.id)
            await settled(manager)
            world.host.reached.clear()
            world.host.hold["restore"] = asyncio.Event()
            creating = asyncio.create_task(manager.create(BASE))
            await world.host.until("restore")
            closing = asyncio.create_task(manager.close())
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError):
                await manager.create(BASE)
            with pytest.raises(UnavailableError):
                await manager.connect(paused.id, 300)
            with pytest.raises(NotFoundError):
                await manager.reach(paused.id)
            world.host.hold["restore"].set()
            info = await creating
            await closing
            assert world.host.alive == {}
            assert manager._sandboxes[info.id].state is SandboxState.PAUSED

    asyncio.run(main())


def test_a_timer_that_fires_while_the_daemon_stops_costs_no_sandbox(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            infos = [await manager.create(options(on_timeout=OnTimeout.PAUSE)) for _ in range(3)]
            world.host.hold["capture"] = asyncio.Event()
            closing = asyncio.create_task(manager.close())
            await world.host.until("capture")
            for info in infos:
                manager._expire(manager._sandboxes[info.id])
            await asyncio.sleep(0)
            world.host.hold["capture"].set()
            await closing
            assert {s.state for s in manager._sandboxes.values()} == {SandboxState.PAUSED}
            assert len(manager._sandboxes) == 3

    asyncio.run(main())


def test_an_automatic_pause_that_is_first_when_the_daemon_stops_costs_no_sandbox(world: World) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            for _ in range(PAUSES_AT_STOP):  # they keep the stop busy, so that the timer of the last one is first
                await manager.create(BASE)
            slow = await manager.create(options(on_timeout=OnTimeout.PAUSE, pause_memory=False))
            await settled(manager)
            world.host.hold = {"capture": asyncio.Event(), "answer": asyncio.Event()}
            closing = asyncio.create_task(manager.close())
            await world.host.until("capture")
            world.host.reached.clear()
            manager._expire(manager._sandboxes[slow.id])
            await world.host.until("answer")  # it asks for the guest's health, and is still running
            world.host.hold["capture"].set()
            await until(lambda: waiting(manager, slow.id) == 1)
            world.host.hold["answer"].set()
            await closing
            assert manager._sandboxes[slow.id].state is SandboxState.PAUSED

    asyncio.run(main())


def waiting(manager: Manager, sandbox_id: str) -> int:
    """How many operations wait for a sandbox's lock."""
    return len(manager._sandboxes[sandbox_id].lock._waiters or ())


@pytest.mark.parametrize("error", [VmmError("no"), OSError(28, "No space left on device")])
def test_a_pause_that_fails_at_the_stop_ends_that_sandbox_only(world: World, error: Exception) -> None:
    async def main() -> None:
        async with world.daemon() as manager:
            await manager.create(BASE)
            world.host.fail["capture"] = error
        assert world.host.alive == {}
        assert world.machines.closed
        world.host.fail.clear()
        async with world.daemon() as manager:
            assert await manager.sandboxes() == []
            assert world.folders() == set()

    asyncio.run(main())
