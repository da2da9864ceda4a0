"""The manager against a model: exactly, one call after the other; and under eight clients at once, by what must always
hold.

Guests have a content. The model knows what each sandbox and each snapshot has in its memory and on its disk, so nothing
that was acknowledged can be lost without being noticed.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aenv.errors import AenvError, ConflictError, LimitError, NotFoundError, UnavailableError, VmmError
from aenv.sandbox.manager import Manager
from aenv.sandbox.service import ForkFailure, NetworkOptions, OnTimeout, SandboxInfo, SandboxState
from tests.sandbox.doubles import Content, FakeVm
from tests.sandbox.world import BASE, World, options, quiet, read, settled, vm_of, write

T = TypeVar("T")
RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
LIMIT = 5
POLICY = NetworkOptions(deny_out=("8.8.8.8",))
KEYS = ("a", "b", "c")
CAPTURE_STEPS = ("capture", "vm.pause", "save", "collect", "restack", "seal")
START_STEPS = ("prepare", "slot", "create layer", "open image", "attach", "map", "load", "resume")


@dataclass
class Model:
    """One sandbox: what it has, and what it may be rolled back to."""

    state: SandboxState
    memory: Content = field(default_factory=dict)
    disk: Content = field(default_factory=dict)
    booted: bool = False  # memory was not kept: the next resume boots
    own: set[str] = field(default_factory=set)  # snapshots that were made of it, or that it was made from


@dataclass(frozen=True)
class Taken:
    """One snapshot."""

    memory: Content | None
    disk: Content


class OneAfterTheOther(RuleBasedStateMachine):
    """`model` says which sandboxes and snapshots there are, and with what; each call must do what the model says."""

    ids = Bundle("ids")
    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        # Exactly: a parked machine does without most of the steps that fail here (`test_parking` is about those).
        self.world = World(Path(self.scratch.name) / "home", **{"sandbox.max": LIMIT, "vmm.parked": 0})
        self.model: dict[str, Model] = {}
        self.snapshots: dict[str, Taken] = {}
        self.values = itertools.count()
        self.manager = self.run(self.world.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def expect(self, work: Coroutine[Any, Any, Any], error: type[AenvError] | None) -> Any:
        if error is None:
            return self.run(work)
        with pytest.raises(error):
            self.run(work)
        return None

    def room(self) -> int:
        return LIMIT - sum(sandbox.state is RUNNING for sandbox in self.model.values())

    def known(self, sandbox_id: str) -> type[AenvError] | None:
        return None if sandbox_id in self.model else NotFoundError

    def fails(self, work: Coroutine[Any, Any, Any], step: str) -> None:
        self.world.host.fail[step] = VmmError("no")
        self.expect(work, VmmError)
        self.world.host.fail.clear()

    # Sandboxes

    @rule(target=ids)
    def create(self) -> Any:
        info = self.expect(self.manager.create(BASE), None if self.room() else LimitError)
        if info is None:
            return multiple()
        self.model[info.id] = Model(RUNNING)
        return info.id

    @rule(step=st.sampled_from(START_STEPS))
    def create_fails(self, step: str) -> None:
        if self.room():
            self.fails(self.manager.create(BASE), step)

    @rule(target=ids, snapshot=taken)
    def create_from_snapshot(self, snapshot: str) -> Any:
        known = self.snapshots.get(snapshot)
        error = NotFoundError if known is None else None if self.room() else LimitError
        info = self.expect(self.manager.create(options(template=snapshot)), error)
        if info is None or known is None:
            return multiple()
        self.model[info.id] = Model(RUNNING, dict(known.memory or {}), dict(known.disk), own={snapshot})
        return info.id

    @rule(sandbox_id=ids, key=st.sampled_from(KEYS), old=st.booleans())
    def guest_writes(self, sandbox_id: str, key: str, old: bool) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING:
            value = "again" if old else f"v{next(self.values)}"  # what an earlier layer may say, too
            write(self.manager, sandbox_id, **{key: value})
            sandbox.memory[key] = sandbox.disk[key] = value

    @rule(sandbox_id=ids, memory=st.booleans())
    def pause(self, sandbox_id: str, memory: bool) -> None:
        sandbox = self.model.get(sandbox_id)
        error = NotFoundError if sandbox is None else ConflictError if sandbox.state is PAUSED else None
        self.expect(self.manager.pause(sandbox_id, memory=memory), error)
        if sandbox is not None and sandbox.state is RUNNING:
            sandbox.state, sandbox.booted = PAUSED, not memory

    @rule(sandbox_id=ids, step=st.sampled_from(("capture", "vm.pause", "save", "collect")))
    def pause_fails(self, sandbox_id: str, step: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING:
            self.fails(self.manager.pause(sandbox_id), step)

    @rule(sandbox_id=ids, memory=st.booleans())
    def connect(self, sandbox_id: str, memory: bool) -> None:
        sandbox = self.model.get(sandbox_id)
        error: type[AenvError] | None = NotFoundError
        if sandbox is not None:
            error = LimitError if sandbox.state is PAUSED and not self.room() else None
        answer = self.expect(self.manager.connect(sandbox_id, 300, memory=memory), error)
        if answer is not None and sandbox is not None:
            assert answer[1] is (sandbox.state is PAUSED)
            if sandbox.state is PAUSED and (sandbox.booted or not memory):
                sandbox.memory = {}
            sandbox.state = RUNNING

    @rule(sandbox_id=ids, step=st.sampled_from(START_STEPS))
    def resume_fails(self, sandbox_id: str, step: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is PAUSED and not sandbox.booted and self.room():
            self.fails(self.manager.connect(sandbox_id, 300), step)

    @rule(sandbox_id=ids)
    def end_of_time(self, sandbox_id: str) -> None:
        sandbox = self.model.get(sandbox_id)
        error = NotFoundError if sandbox is None else ConflictError if sandbox.state is PAUSED else None
        self.expect(self.manager.set_timeout(sandbox_id, 0), error)
        if error is None:
            while sandbox_id in self.manager._sandboxes:
                self.run(asyncio.sleep(0.001))
            del self.model[sandbox_id]

    @rule(sandbox_id=ids)
    def death(self, sandbox_id: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING:
            vm_of(self.manager, sandbox_id).die()
            self.run(asyncio.sleep(0))
            self.run(settled(self.manager))
            del self.model[sandbox_id]

    @rule(sandbox_id=consumes(ids))
    def kill(self, sandbox_id: str) -> None:
        self.expect(self.manager.kill(sandbox_id), self.known(sandbox_id))
        self.model.pop(sandbox_id, None)

    # Snapshots

    @rule(target=taken, sandbox_id=ids, memory=st.booleans())
    def snapshot(self, sandbox_id: str, memory: bool) -> Any:
        sandbox = self.model.get(sandbox_id)
        found = self.expect(self.manager.snapshot(sandbox_id, memory=memory), self.known(sandbox_id))
        if sandbox is None:
            return multiple()
        kept = memory and not (sandbox.state is PAUSED and sandbox.booted)
        assert found.memory is kept
        self.snapshots[found.id] = Taken(dict(sandbox.memory) if kept else None, dict(sandbox.disk))
        sandbox.own.add(found.id)
        return found.id

    @rule(sandbox_id=ids, step=st.sampled_from(CAPTURE_STEPS))
    def snapshot_fails(self, sandbox_id: str, step: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING:
            self.fails(self.manager.snapshot(sandbox_id), step)

    @rule(sandbox_id=ids, fatal=st.booleans())
    def rehoming_fails(self, sandbox_id: str, fatal: bool) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is None or sandbox.state is PAUSED:
            return
        if fatal:
            self.fails(self.manager.snapshot(sandbox_id), "rehome")
            del self.model[sandbox_id]
            return
        self.world.host.fail["rehome"] = UnavailableError("no")
        found = self.run(self.manager.snapshot(sandbox_id))
        self.world.host.fail.clear()
        self.snapshots[found.id] = Taken(dict(sandbox.memory), dict(sandbox.disk))
        sandbox.own.add(found.id)

    @rule(snapshot=consumes(taken))
    def delete_snapshot(self, snapshot: str) -> None:
        self.expect(self.manager.delete_template(snapshot), None if snapshot in self.snapshots else NotFoundError)
        self.snapshots.pop(snapshot, None)

    @rule(target=ids, sandbox_id=ids, count=st.integers(1, 3))
    def fork(self, sandbox_id: str, count: int) -> Any:
        sandbox = self.model.get(sandbox_id)
        error: type[AenvError] | None = NotFoundError
        if sandbox is not None:
            error = ConflictError if sandbox.state is PAUSED else LimitError if count > self.room() else None
        children = self.expect(self.manager.fork(sandbox_id, count, 300), error) or []
        for child in children:
            assert isinstance(child, SandboxInfo)
            self.model[child.id] = replace(copy.deepcopy(self.model[sandbox_id]), own=set())
        return multiple(*(child.id for child in children))

    @rule(sandbox_id=ids, step=st.sampled_from(("capture", "collect", "restack")))
    def fork_fails(self, sandbox_id: str, step: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING and self.room():
            self.fails(self.manager.fork(sandbox_id, 1, 300), step)

    @rule(sandbox_id=ids, step=st.sampled_from(("prepare", "open image", "load", "map")))
    def children_fail(self, sandbox_id: str, step: str) -> None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is not None and sandbox.state is RUNNING and self.room() >= 2:
            self.world.host.fail[step] = VmmError("no")
            children = self.run(self.manager.fork(sandbox_id, 2, 300))
            self.world.host.fail.clear()
            assert all(isinstance(child, ForkFailure) for child in children)

    def goes_back(self, sandbox_id: str, snapshot: str) -> type[AenvError] | None:
        sandbox = self.model.get(sandbox_id)
        if sandbox is None or snapshot not in self.snapshots:
            return NotFoundError
        if sandbox.state is PAUSED and not self.room():
            return LimitError
        lineage = self.manager._sandboxes[sandbox_id].record.lineage
        return None if snapshot in sandbox.own or snapshot in lineage else ConflictError

    @rule(sandbox_id=ids, snapshot=taken)
    def rollback(self, sandbox_id: str, snapshot: str) -> None:
        error = self.goes_back(sandbox_id, snapshot)
        self.expect(self.manager.rollback(sandbox_id, snapshot), error)
        if error is None:
            self.at(sandbox_id, snapshot, RUNNING)

    @rule(sandbox_id=ids, snapshot=taken, step=st.sampled_from(("prepare", "open image", "load", "resume")))
    def rollback_fails(self, sandbox_id: str, snapshot: str, step: str) -> None:
        if self.goes_back(sandbox_id, snapshot) is None and self.snapshots[snapshot].memory is not None:
            self.fails(self.manager.rollback(sandbox_id, snapshot), step)
            self.at(sandbox_id, snapshot, PAUSED)

    def at(self, sandbox_id: str, snapshot: str, state: SandboxState) -> None:
        sandbox, known = self.model[sandbox_id], self.snapshots[snapshot]
        sandbox.state, sandbox.booted = state, known.memory is None
        sandbox.memory, sandbox.disk = dict(known.memory or {}), dict(known.disk)

    # Daemons

    @rule()
    def restart(self) -> None:
        self.run(self.world.stop(self.manager))
        for sandbox in self.model.values():
            if sandbox.state is RUNNING:
                sandbox.state, sandbox.booted = PAUSED, False
        self.manager = self.run(self.world.start())

    @rule()
    def crash(self) -> None:
        self.run(settled(self.manager))
        self.run(self.world.crash(self.manager))
        self.manager = self.run(self.world.start())

    @invariant()
    def as_the_model_says(self) -> None:
        self.run(settled(self.manager))
        assert {s.id: s.state for s in self.run(self.manager.sandboxes())} == {
            identity: sandbox.state for identity, sandbox in self.model.items()
        }
        for identity, sandbox in self.model.items():
            if sandbox.state is RUNNING:
                assert read(self.manager, identity) == (sandbox.memory, sandbox.disk)
        assert {s.id for s in self.run(self.manager.snapshots())} == set(self.snapshots)
        quiet(self.world, self.manager)

    def teardown(self) -> None:
        try:
            self.world.host.fail.clear()
            for identity, sandbox in self.model.items():  # what is paused has not been looked at
                if sandbox.state is PAUSED:
                    while not self.room():
                        victim = next(i for i, s in self.model.items() if s.state is RUNNING)
                        self.run(self.manager.pause(victim))
                        self.model[victim].state = PAUSED
                    self.run(self.manager.connect(identity, 300))
                    memory = {} if sandbox.booted else sandbox.memory
                    assert read(self.manager, identity) == (memory, sandbox.disk)
                    sandbox.state = RUNNING
            self.run(self.world.stop(self.manager))
            assert self.world.host.alive == {}
            assert self.world.host.slots == {}
            assert self.world.host.count["started"] == self.world.host.count["ended"]
        finally:
            self.world.clear()
            self.loop.close()
            self.scratch.cleanup()


TestOneAfterTheOther = OneAfterTheOther.TestCase
TestOneAfterTheOther.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class Client:
    """One of those that do at random what can be done, to sandboxes that all of them know."""

    def __init__(self, world: World, manager: Manager, seed: str) -> None:
        self.world = world
        self.manager = manager
        self.chance = random.Random(seed)

    def operation(self, sandbox_id: str, snapshots: list[str]) -> Coroutine[Any, Any, Any]:
        manager, chance = self.manager, self.chance
        snapshot = chance.choice(snapshots) if snapshots else "none"
        asked = options(
            template=chance.choice(("base", *snapshots)), auto_resume=True, on_timeout=chance.choice(list(OnTimeout)),
            pause_memory=chance.random() < 0.5,
        )  # fmt: skip
        operations: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: manager.create(asked),
            lambda: manager.pause(sandbox_id, memory=chance.random() < 0.7),
            lambda: manager.connect(sandbox_id, 300),
            lambda: manager.resume(sandbox_id, 300),
            lambda: manager.reach(sandbox_id),
            lambda: manager.set_timeout(sandbox_id, chance.choice((0, 100))),
            lambda: manager.refresh(sandbox_id, 400),
            lambda: manager.set_network(sandbox_id, POLICY),
            lambda: manager.kill(sandbox_id),
            lambda: manager.snapshot(sandbox_id, memory=chance.random() < 0.7),
            lambda: manager.snapshot(sandbox_id, name=f"name{chance.randrange(3)}"),
            lambda: manager.fork(sandbox_id, chance.randrange(1, 4), 300),
            lambda: manager.rollback(sandbox_id, snapshot),
            lambda: manager.delete_template(snapshot),
            manager.tree,
        ]
        return chance.choice(operations)()

    async def run(self, calls: int) -> None:
        chance, host, sandboxes = self.chance, self.world.host, self.manager._sandboxes
        for _ in range(calls):
            sandbox_id = chance.choice([*sandboxes]) if sandboxes else "nobody"
            running = sandboxes[sandbox_id].running if sandboxes else None
            if running is not None and cast(FakeVm, running.vm).runs:
                write(self.manager, sandbox_id, **{chance.choice(KEYS): str(chance.randrange(4))})
            snapshots = [s.id for s in await self.manager.snapshots()]
            work = asyncio.ensure_future(self.operation(sandbox_id, snapshots))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.003)
                work.cancel()
            await asyncio.wait([work])
            if not work.cancelled() and (error := work.exception()) is not None:
                assert isinstance(error, AenvError), error
            if chance.random() < 0.03 and host.alive:
                chance.choice(list(host.alive.values()))[0].die()
            if chance.random() < 0.1:
                host.fail = {chance.choice((*CAPTURE_STEPS, *START_STEPS, "boot", "apply")): VmmError("chance")}
            elif chance.random() < 0.3:
                host.fail = {}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_eight_clients_at_once(seed: int) -> None:
    async def main(world: World, chance: random.Random) -> None:
        world.host.jitter = lambda: chance.random() * 0.002
        async with asyncio.timeout(60):
            async with world.daemon() as manager:
                await asyncio.gather(*(Client(world, manager, f"{seed}{n}").run(25) for n in range(8)))
                world.host.fail = {}
                await settled(manager)
                for sandbox in list(manager._sandboxes.values()):  # a time-out of 0 may still be on its way
                    if sandbox.timer is not None and sandbox.timer.when() < asyncio.get_running_loop().time() + 1:
                        manager._life._expire(sandbox)
                await settled(manager)
                quiet(world, manager)
                for sandbox in list(manager._sandboxes.values()):
                    if sandbox.state is RUNNING:
                        content = read(manager, sandbox.id)
                        await manager.pause(sandbox.id)
                        await manager.connect(sandbox.id, 300)
                        assert read(manager, sandbox.id) == content
        assert world.host.alive == {}
        assert world.host.slots == {}
        assert world.host.count["started"] == world.host.count["ended"]

    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "home", **{"sandbox.max": 6, "agent.timeout": 1})
        asyncio.run(main(world, random.Random(seed)))
        world.clear()
