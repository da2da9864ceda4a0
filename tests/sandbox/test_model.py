"""The manager against a model: exactly, one call after the other; and under eight clients at once, by what must always
hold."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aenv.errors import AenvError, ConflictError, LimitError, NotFoundError, VmmError
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import CreateOptions, NetworkOptions, OnTimeout, SandboxState
from tests.sandbox.doubles import FakeVm, World
from tests.sandbox.test_manager import agree, settled

T = TypeVar("T")
RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
LIMIT = 4
POLICY = NetworkOptions(deny_out=("8.8.8.8",))


class OneAfterTheOther(RuleBasedStateMachine):
    """`model` says which sandboxes exist and in which state; each call must do what the model says."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.world = World(Path(self.scratch.name) / "home", **{"sandbox.max": LIMIT})
        self.model: dict[str, SandboxState] = {}
        self.manager = self.world.new_manager()
        self.run(self.manager.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def expect(self, work: Coroutine[Any, Any, Any], error: type[AenvError] | None) -> Any:
        if error is None:
            return self.run(work)
        with pytest.raises(error):
            self.run(work)
        return None

    @property
    def full(self) -> bool:
        return sum(state is RUNNING for state in self.model.values()) >= LIMIT

    def known(self, sandbox_id: str) -> type[AenvError] | None:
        return None if sandbox_id in self.model else NotFoundError

    @rule(target=ids)
    def create(self) -> Any:
        info = self.expect(self.manager.create(CreateOptions("base", 300)), LimitError if self.full else None)
        if info is None:
            return multiple()
        self.model[info.id] = RUNNING
        return info.id

    @rule()
    def create_fails(self) -> None:
        if not self.full:
            self.world.host.fail["restore"] = VmmError("no")
            self.expect(self.manager.create(CreateOptions("base", 300)), VmmError)
            self.world.host.fail.clear()

    @rule(sandbox_id=ids, memory=st.booleans())
    def pause(self, sandbox_id: str, memory: bool) -> None:
        conflict = ConflictError if self.model.get(sandbox_id) is PAUSED else None
        self.expect(self.manager.pause(sandbox_id, memory=memory), self.known(sandbox_id) or conflict)
        if sandbox_id in self.model:
            self.model[sandbox_id] = PAUSED

    @rule(sandbox_id=ids)
    def pause_fails(self, sandbox_id: str) -> None:
        if self.model.get(sandbox_id) is RUNNING:
            self.world.host.fail["capture"] = VmmError("no")
            self.expect(self.manager.pause(sandbox_id), VmmError)
            self.world.host.fail.clear()

    @rule(sandbox_id=ids, memory=st.booleans())
    def connect(self, sandbox_id: str, memory: bool) -> None:
        was = self.model.get(sandbox_id)
        limit = LimitError if was is PAUSED and self.full else None
        answer = self.expect(self.manager.connect(sandbox_id, 300, memory=memory), self.known(sandbox_id) or limit)
        if answer is not None:
            assert answer[1] is (was is PAUSED)
            self.model[sandbox_id] = RUNNING

    @rule(sandbox_id=ids)
    def resume_fails(self, sandbox_id: str) -> None:
        if self.model.get(sandbox_id) is PAUSED and not self.full:
            self.world.host.fail["resume"] = VmmError("no")
            self.expect(self.manager.connect(sandbox_id, 300), VmmError)
            self.world.host.fail.clear()

    @rule(sandbox_id=ids)
    def end_of_time(self, sandbox_id: str) -> None:
        conflict = ConflictError if self.model.get(sandbox_id) is PAUSED else None
        self.expect(self.manager.set_timeout(sandbox_id, 0), self.known(sandbox_id) or conflict)
        if self.model.get(sandbox_id) is RUNNING:
            while sandbox_id in self.manager._sandboxes:
                self.run(asyncio.sleep(0.001))
            del self.model[sandbox_id]

    @rule(sandbox_id=ids)
    def death(self, sandbox_id: str) -> None:
        if self.model.get(sandbox_id) is RUNNING:
            cast(FakeVm, self.manager._sandboxes[sandbox_id].running.vm).die()  # type: ignore[union-attr]
            self.run(asyncio.sleep(0))
            self.run(settled(self.manager))
            del self.model[sandbox_id]

    @rule(sandbox_id=consumes(ids))
    def kill(self, sandbox_id: str) -> None:
        self.expect(self.manager.kill(sandbox_id), self.known(sandbox_id))
        self.model.pop(sandbox_id, None)

    @rule()
    def restart(self) -> None:
        self.run(self.manager.close())
        self.model = dict.fromkeys(self.model, PAUSED)
        self.manager = self.world.new_manager()
        self.run(self.manager.open())

    @rule()
    def crash(self) -> None:
        self.run(settled(self.manager))
        self.run(self.world.crash(self.manager))
        self.manager = self.world.new_manager()
        self.run(self.manager.open())

    @invariant()
    def as_the_model_says(self) -> None:
        self.run(settled(self.manager))
        assert {s.id: s.state for s in self.run(self.manager.sandboxes())} == self.model
        quiet(self.world, self.manager)

    def teardown(self) -> None:
        try:
            self.run(self.manager.close())
            self.run(self.world.host.close())
            assert self.world.host.alive == {}
            assert self.world.host.count["started"] == self.world.host.count["ended"]
        finally:
            self.loop.close()
            self.scratch.cleanup()


TestOneAfterTheOther = OneAfterTheOther.TestCase
TestOneAfterTheOther.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def quiet(world: World, manager: Manager) -> None:
    """What holds whenever no operation is under way."""
    agree(world, manager)
    sandboxes = manager._sandboxes.values()
    assert {s.state for s in sandboxes} <= {RUNNING, PAUSED}
    assert world.folders() == {s.id for s in sandboxes}
    running = {s.record.machine.slot for s in sandboxes if s.record.machine is not None}
    assert set(world.host.alive) == running
    for s in sandboxes:
        assert (
            (s.running is not None) == (s.state is RUNNING) == (s.record.machine is not None) == (s.timer is not None)
        )
        assert s.running is None or cast(FakeVm, s.running.vm).runs
        assert not s.doomed
        assert not s.lock.locked()


async def client(world: World, manager: Manager, chance: random.Random, calls: int) -> None:
    for _ in range(calls):
        ids = [*manager._sandboxes]
        sandbox_id = chance.choice(ids) if ids else "nobody"
        operation = chance.choice(
            [
                lambda: manager.create(
                    CreateOptions(
                        "base", 300, auto_resume=True, on_timeout=chance.choice(list(OnTimeout)),
                        pause_memory=chance.random() < 0.5,
                    )
                ),
                lambda i=sandbox_id: manager.pause(i, memory=chance.random() < 0.7),
                lambda i=sandbox_id: manager.connect(i, 300),
                lambda i=sandbox_id: manager.resume(i, 300),
                lambda i=sandbox_id: manager.reach(i),
                lambda i=sandbox_id: manager.set_timeout(i, chance.choice((0, 100))),
                lambda i=sandbox_id: manager.refresh(i, 400),
                lambda i=sandbox_id: manager.set_network(i, POLICY),
                lambda i=sandbox_id: manager.kill(i),
            ]
        )  # fmt: skip
        work = asyncio.ensure_future(operation())
        if chance.random() < 0.2:
            await asyncio.sleep(chance.random() * 0.003)
            work.cancel()
        await asyncio.wait([work])
        if not work.cancelled() and (error := work.exception()) is not None:
            assert isinstance(error, AenvError), error
        if chance.random() < 0.05 and world.host.alive:
            chance.choice(list(world.host.alive.values()))[0].die()
        if chance.random() < 0.1:
            world.host.fail = {chance.choice(("capture", "restore", "resume", "boot", "apply")): VmmError("chance")}
        elif chance.random() < 0.3:
            world.host.fail = {}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_eight_clients_at_once(seed: int) -> None:
    async def main(folder: Path) -> None:
        chance = random.Random(seed)
        world = World(folder / "home", **{"sandbox.max": 6, "agent.timeout": 1})
        world.host.jitter = lambda: chance.random() * 0.002
        async with asyncio.timeout(60):
            async with world.daemon() as manager:
                await asyncio.gather(*(client(world, manager, random.Random(f"{seed}{n}"), 25) for n in range(8)))
                world.host.fail = {}
                await settled(manager)
                for sandbox in list(manager._sandboxes.values()):  # a time-out of 0 may still be on its way
                    if sandbox.timer is not None and sandbox.timer.when() < asyncio.get_running_loop().time() + 1:
                        manager._expire(sandbox)
                await settled(manager)
                quiet(world, manager)
        assert world.host.alive == {}
        assert world.host.count["started"] == world.host.count["ended"]

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
