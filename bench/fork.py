"""Fork: children of one running sandbox of 256 MiB, until all answer and until all have run a command.

Two planes: the official Python SDK in a process of its own, and the engine (calls inside this process). `warm` has a
VMM process waiting for each child, `none` has no process waiting for anybody. `frozen_ms` is how long the vCPUs of the
source stood still. The rival starts as many QEMUs that read the same guest's whole state by `-incoming`, all at once.

The row `idle-child` tells what a child costs that does nothing: see `bench/memory.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from aenv.agent.client import Agent
from aenv.config import Config
from aenv.node import Node
from aenv.sandbox.service import CreateOptions, SandboxInfo
from aenv.storage.repository import Template
from aenv.vmm import spawn
from bench.facts import figures, host_facts, ratio
from bench.guest import Guest
from bench.memory import available_kib, cost_of
from bench.rival import Rival, RivalGuest
from bench.templates import of_size, started, with_settings
from bench.timeline import Stages, Timeline, cpu_seconds

Say = Callable[[str], None]
Rows = list[dict[str, Any]]
Sample = dict[str, float]

MEMORY_MIB = 256
ROUNDS = {1: 1, 4: 2, 16: 5}  # children → which part of the samples is taken
OTHERS = 5  # SDK and rival: which part of that
MOST = max(ROUNDS)
IDLE_SECONDS = 10
TIMEOUT = 3600
SETTLE = 0.5  # seconds
PATIENCE = 20.0  # seconds until the pool should have filled
# One connection and one thread a child are there before the fork: they are not what is measured.
SDK = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from e2b import Sandbox
sandbox, count = Sandbox.connect(sys.argv[1]), int(sys.argv[2])
sandbox.commands.run("true")
threads = ThreadPoolExecutor(count)
list(threads.map(time.sleep, [0.3] * count))
began = time.perf_counter()
children = sandbox.fork(count=count, timeout=600)
answered = time.perf_counter()
list(threads.map(lambda child: child.commands.run("true"), children))
print(json.dumps([answered - began, time.perf_counter() - began]))
"""


async def run(config: Config, n: int, say: Say) -> dict[str, Any]:
    """`n` forks of one child with each pool, half as many of 4, a fifth of 16; and a fifth of these by the SDK."""
    facts = host_facts()
    rows: Rows = []
    async with of_size(config, MEMORY_MIB, say) as name:
        for pool in ("warm", "none"):
            settings = with_settings(
                config,
                vmm__pool=1 if pool == "warm" else 0,
                vmm__pool_max=MOST,
                vmm__hot=1,
                network__pool=MOST,
                sandbox__fork_limit=MOST,
            )
            async with started(settings) as node:
                template = node.repository.find(name)
                with Timeline() as timeline:
                    rows += await _Bench(node, template, timeline, pool, say).rows(n)
    facts |= {
        "vmm": f"{node.vmm.kind.value} {node.vmm.version}",
        "guest_memory_mib": MEMORY_MIB,
        "vcpus": template.manifest.vcpus,
        "load_after": round(os.getloadavg()[0], 2),
    }
    return {"host": facts, "rows": rows + _ratios(rows)}


class _Bench:
    def __init__(self, node: Node, template: Template, timeline: Timeline, pool: str, say: Say) -> None:
        self.node = node
        self.template = template
        self.timeline = timeline
        self.pool = pool
        self.say = say
        self.source = ""

    async def rows(self, n: int) -> Rows:
        made = await self.node.manager.create(CreateOptions(template=self.template.id, timeout=TIMEOUT))
        self.source = made.id
        await (await Guest.of(self.node, made.id)).true()
        rows: Rows = []
        async with Rival.start(self.node, self.template) as rival:
            if self.pool == "none":
                await rival.migrate()
            for count, part in ROUNDS.items():
                rows += await self._forks(count, max(2, n // part), rival)
        if self.pool == "none":
            rows.append(await self._idle())
        rows += await self._phases(MOST, max(2, n // 10))
        await self.node.manager.kill(self.source)
        return rows

    async def _forks(self, count: int, rounds: int, rival: Rival) -> Rows:
        samples: dict[str, list[Sample]] = defaultdict(list)
        for number in range(rounds):
            await self._settle(count)
            samples["engine"].append(await self._engine(count))
            if number < max(2, rounds // OTHERS):
                await self._settle(count)
                samples["sdk"].append(await self._sdk(count))
                if self.pool == "none":
                    samples["rival"].append(await self._rival(rival, count))
            self.say(f"pool {self.pool}, {count} children: {number + 1} of {rounds}")
        theirs = samples.pop("rival", [])
        rows = [figures("fork", s, children=count, plane=plane, pool=self.pool) for plane, s in samples.items()]
        return rows + ([figures("rival", theirs, children=count, of="-incoming")] if theirs else [])

    async def _settle(self, waiting: int) -> None:
        """Until a process waits for each child, if there is a pool. It grows by demand: a fork shows it."""
        machines, shape = self.node.machines, self.template.machine
        if self.pool == "warm":
            deadline = time.monotonic()
            while machines._prepared.count(shape) < waiting:
                if time.monotonic() >= deadline:
                    await self._kill(await self._fork(waiting))
                    deadline = time.monotonic() + PATIENCE
                await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE)

    async def _fork(self, count: int) -> list[str]:
        made = await self.node.manager.fork(self.source, count, TIMEOUT)
        failed = [child.error for child in made if not isinstance(child, SandboxInfo)]
        if failed:
            raise failed[0]
        return [child.id for child in made if isinstance(child, SandboxInfo)]

    async def _kill(self, children: Sequence[str]) -> None:
        await asyncio.gather(*(self.node.manager.kill(child) for child in children))

    async def _engine(self, count: int) -> Sample:
        pid = await self._pid(self.source)
        waiting = self.node.machines._prepared._ready.get(self.template.machine, ())
        self.timeline.clear()
        before = {item.vm.pid: cpu_seconds(item.vm.pid) for item in waiting}
        daemon, blocks = time.process_time(), self._blocks_cpu()
        began = time.perf_counter()
        children = await self._fork(count)
        answered = time.perf_counter() - began
        daemon, blocks = time.process_time() - daemon, self._blocks_cpu() - blocks
        machines = [await self._pid(child) for child in children]
        first = sum(cpu_seconds(machine) - before.get(machine, 0.0) for machine in machines)
        looked = time.perf_counter() - began - answered
        guests = [await Guest.of(self.node, child) for child in children]
        await asyncio.gather(*(guest.true() for guest in guests))
        commands = time.perf_counter() - began - looked
        second = sum(cpu_seconds(machine) - before.get(machine, 0.0) for machine in machines)
        await self._kill(children)
        return {
            "frozen_ms": self.timeline.frozen(pid) * 1000,
            "answered_ms": answered * 1000,
            "commands_ms": commands * 1000,
            # CPU time until all had answered, and of the machines until all had run their command.
            "daemon_cpu_ms": daemon * 1000,
            "blocks_cpu_ms": blocks * 1000,
            "vmm_cpu_ms": first * 1000,
            "vmm_commands_cpu_ms": second * 1000,
        }

    async def _pid(self, sandbox: str) -> int:
        return (await self.node.manager.reach(sandbox))[1].vm.pid

    def _blocks_cpu(self) -> float:
        pid = self.node.machines._disks._blocks.pid
        return 0.0 if pid is None else cpu_seconds(pid)

    async def _sdk(self, count: int) -> Sample:
        pid = await self._pid(self.source)
        url = self.node.url
        sdk = os.environ | {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": self.node.api_key}
        self.timeline.clear()
        try:
            done = await spawn.run([sys.executable, "-c", SDK, self.source, str(count)], env=sdk, timeout=300)
        finally:
            others = [box.id for box in await self.node.manager.sandboxes() if box.id != self.source]
            await self._kill(others)
        answered, commands = json.loads(done.stdout)
        return {
            "frozen_ms": self.timeline.frozen(pid) * 1000,
            "answered_ms": answered * 1000,
            "commands_ms": commands * 1000,
        }

    async def _rival(self, rival: Rival, count: int) -> Sample:
        disks = [await rival.overlay() for _ in range(count)]
        started: list[RivalGuest] = []

        async def child(number: int) -> None:
            guest = await rival.incoming(disks[number])
            started.append(guest)
            await guest.vm.resume()
            await Agent(guest.connect, None).health()

        try:
            began = time.perf_counter()
            await asyncio.gather(*(child(number) for number in range(count)))
            answered = time.perf_counter() - began
            await asyncio.gather(*(Guest.behind(guest).true() for guest in started))
            commands = time.perf_counter() - began
        finally:
            await asyncio.gather(*(rival.end(guest) for guest in started))
            for disk in disks:
                disk.unlink()
        return {"answered_ms": answered * 1000, "commands_ms": commands * 1000}

    async def _idle(self) -> dict[str, Any]:
        """What a child costs that nobody uses, after some seconds."""
        self.say(f"{MOST} children are idle for {IDLE_SECONDS} s")
        await self._settle(0)
        before = available_kib()
        children = await self._fork(MOST)
        await asyncio.sleep(IDLE_SECONDS)
        after = available_kib()
        costs = []
        for child in children:
            _, running = await self.node.manager.reach(child)
            costs.append(await asyncio.to_thread(cost_of, await running.vm.memory_regions()))
        await self._kill(children)
        samples = [cost.figures() for cost in costs]
        return figures("idle-child", samples, children=MOST, memory_mib=MEMORY_MIB, after_s=IDLE_SECONDS) | {
            "available_mib_each": round((before - after) / MOST / 1024, 2),
            "vmm_parts_mib": costs[0].parts_mib(),
        }

    async def _phases(self, count: int, rounds: int) -> Rows:
        """The steps of a fork. CPU time is not told: all children are at work at once."""
        stages = Stages(f"fork of {count}, pool {self.pool}")
        for number in range(rounds):
            await self._settle(count)
            self.timeline.clear()
            began = time.perf_counter()
            children = await self._fork(count)
            stages.add(self.timeline.spans, began)
            await self._kill(children)
            self.say(f"phases of a fork: {number + 1} of {rounds}")
        return stages.rows()


def _ratios(rows: Rows) -> Rows:
    ours = {(r["children"], r["pool"]): r for r in rows if r["bench"] == "fork" and r["plane"] == "engine"}
    theirs = {r["children"]: r for r in rows if r["bench"] == "rival"}
    return [
        ratio(f"fork {figure}", ours[count, pool][figure]["p50"], "-incoming", theirs[count][figure]["p50"])
        | {"children": count, "pool": pool}
        for count, pool in ours
        if count in theirs
        for figure in ("answered_ms", "commands_ms")
    ]
