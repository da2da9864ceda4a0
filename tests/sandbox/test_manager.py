"""Sandboxes come and go: create, kill, death, limits."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import (
    ConflictError,
    GuestError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    VmmError,
)
from aenv.observe.logs import LogQuery
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import NetworkOptions, SandboxState
from aenv.storage.repository import Template
from tests.sandbox import doubles
from tests.sandbox.world import (
    BASE,
    ENDED,
    World,
    agree,
    gone,
    options,
    run,
    settled,
    slot_of,
    until,
    vm_of,
)

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
        vm, slot = vm_of(manager, info.id), slot_of(manager, info.id)
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
        inits += slot_of(manager, info.id).inits
        for _ in range(3):
            await manager.pause(info.id)
            await manager.connect(info.id, 300)
            inits += slot_of(manager, info.id).inits
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
        assert slot_of(manager, opened.id).inits[0]["accessToken"] is None

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


@pytest.mark.parametrize("step", ["create layer", "prepare", "resume"])
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


@pytest.mark.parametrize("moment", ["prepare", "resume", "answer"])
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


@pytest.mark.parametrize("moment", ["prepare", "resume", "answer"])
@ENDED
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
@ENDED
def test_a_machine_that_cannot_be_ended_does_not_keep_the_sandbox(world: World, error: Exception) -> None:
    async def scenario(manager: Manager) -> None:
        killed, paused = await manager.create(BASE), await manager.create(BASE)
        world.host.fail["kill"] = error
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
        world.host.fail["kill"] = error
        await settled(manager)
        await manager.kill(paused.id)
        world.host.fail.clear()
        assert world.folders() == set()
        assert await world.machines.sweep([]) >= 1  # as the next start of the daemon does

    run(world, scenario)


# Death of a machine


@pytest.mark.parametrize("during", ["nothing", "capture"])
def test_a_dead_machine_is_noticed_and_its_reason_logged(
    world: World, during: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(manager: Manager) -> None:
        info = await manager.create(BASE)
        vm = vm_of(manager, info.id)
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
        slot = slot_of(manager, info.id)
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
        world.host.fail.clear()
        await manager.pause(info.id)
        await manager.connect(info.id, 300)
        assert "8.8.4.4" in slot_of(manager, info.id).policy.deny

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


def test_nothing_starts_from_a_template_that_is_being_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(manager: Manager) -> None:
        cool = world.machines.cool

        async def slow(template: Template) -> None:
            await world.host.step("cool")
            await cool(template)

        monkeypatch.setattr(world.machines, "cool", slow)
        world.host.hold["cool"] = asyncio.Event()
        deleting = asyncio.create_task(manager.delete_template("base"))
        await world.host.until("cool")
        with pytest.raises(NotFoundError):
            await manager.create(BASE)
        world.host.hold["cool"].set()
        await deleting

    run(world, scenario)
