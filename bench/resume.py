"""From "give me a sandbox" to the three ends: A the VM runs, B its agent is initialised, C a first command has ended.

Two planes in one run: the engine (calls inside this process) and HTTP (a request to a daemon in this process). The
engine is measured with three kinds of pool: `warm`, a machine restored ahead that has answered once; `prepared`, a VMM
process that waits for its state; and `none`, everything from nothing. What is resumed is the template, or (from a
prepared process) a paused sandbox and a snapshot of one. Over HTTP, what is resumed is `parked`: the machine of a pause
a moment ago. The rival is what one does without this system: QEMU's own
save of the whole machine to a file and `-incoming` from it, on the same guest, interleaved.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from aenv.agent.client import Agent, Init, identity
from aenv.config import Config
from aenv.network.base import Policy
from aenv.node import Node
from aenv.sandbox.machines import Machines, Running
from aenv.snapshot.checkpoint import Checkpoint
from aenv.storage.repository import Template
from aenv.vmm.base import Vm
from bench.client import Client
from bench.facts import host_facts, row
from bench.guest import Guest, Reachable
from bench.rival import Rival
from bench.templates import started

PAUSE_BETWEEN = 0.6  # seconds: the pool refills while nobody is measured
Ends = dict[str, float]
M = TypeVar("M", bound="Started")
T = TypeVar("T")


class Started(Reachable, Protocol):
    """A machine of ours or of the rival."""

    @property
    def vm(self) -> Vm: ...


async def run(config: Config, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`n` rounds; each starts a machine in every way, and one sandbox over HTTP."""
    facts = host_facts()
    samples: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)

    def note(plane: str, pool: str, source: str, ends: Ends) -> None:
        for end, milliseconds in ends.items():
            samples[plane, end, pool, source].append(milliseconds)

    async with started(config) as node:
        machines = node.machines
        template = node.repository.find("base")
        await machines.warm(template)
        await machines.expect(template.machine)
        async with _paused(node, template) as paused, _snapshot(node) as snapshot, Rival.start(node, template) as rival:
            await rival.migrate()
            for number in range(n):
                for pool in ("warm", "prepared", "none"):
                    await _settle(machines, template)
                    note("engine", pool, "template", await _engine(machines, template, pool))
                await _settle(machines, template)
                note("engine", "prepared", "paused", await _resumed(machines, paused, template))
                await _settle(machines, template)
                note("engine", "prepared", "snapshot", await _engine(machines, snapshot, "prepared"))
                await _settle(machines, template)
                note("rival: QEMU -incoming", "none", "template", await _rival(rival, template))
                await _settle(machines, template)
                created, resumed = await _over_http(node)
                note("http", "warm", "template", created)
                note("http", "parked", "paused", resumed)
                say(f"round {number + 1} of {n}")
    facts |= {
        "vmm": f"{node.vmm.kind.value} {node.vmm.version}",
        "guest_memory_mib": template.manifest.memory_mib,
        "vcpus": template.manifest.vcpus,
        "load_after": round(os.getloadavg()[0], 2),
    }
    rows = [
        row("resume", values, plane=plane, end=end, pool=pool, source=source)
        for (plane, end, pool, source), values in samples.items()
    ]
    return {"host": facts, "rows": rows}


@asynccontextmanager
async def _paused(node: Node, template: Template) -> AsyncIterator[Checkpoint]:
    """What a sandbox that has run a command leaves when it is paused."""
    machines, name = node.machines, f"bench{secrets.token_hex(6)}"
    running = await machines.start(template, name, Policy())
    try:
        try:
            await running.vm.resume()
            await running.agent(None).init(_identity(name, template))
            await Guest.behind(running).true()
            captured = await machines.capture(running, template.machine, restack=False, goes_on=False)
        finally:
            await machines.end(running)
        checkpoint = Checkpoint(
            machines.directory(name),
            template.machine,
            (*running.disk.layers, running.disk.upper),
            template.disk_size,
            (*running.memory_layers, captured.memory),
            captured.state,
        )
        await machines.settle(checkpoint)
        yield checkpoint
    finally:
        await asyncio.to_thread(shutil.rmtree, machines.directory(name))


@asynccontextmanager
async def _snapshot(node: Node) -> AsyncIterator[Template]:
    """A snapshot of a sandbox that has run a command."""
    client = Client(node)
    box = await client.create()
    try:
        await box.true()
        made = await node.manager.snapshot(box.id)
    finally:
        await client.kill(box)
        client.close()
    try:
        yield node.repository.find(made.id)
    finally:
        await node.manager.delete_template(made.id)


async def _settle(machines: Machines, template: Template) -> None:
    while 0 in machines.ready(template):
        await asyncio.sleep(0.02)
    await asyncio.sleep(PAUSE_BETWEEN)


async def _engine(machines: Machines, template: Template, pool: str) -> Ends:
    name = machines.reserve(template) if pool == "warm" else f"bench{secrets.token_hex(6)}"
    if pool == "warm":
        starting = machines.start(template, name, Policy())
    else:
        starting = machines.branch(template, template.checkpoint, name, Policy(), pooled=pool == "prepared")
    try:
        return await _ends(starting, template, name, machines.end)
    finally:
        shutil.rmtree(machines.directory(name), ignore_errors=True)


async def _resumed(machines: Machines, checkpoint: Checkpoint, template: Template) -> Ends:
    async def end(running: Running) -> None:
        await machines.end(running)
        await machines.drop_upper(running)

    return await _ends(machines.restore(checkpoint, Policy()), template, checkpoint.directory.name, end)


async def _rival(rival: Rival, template: Template) -> Ends:
    disk = await rival.overlay()
    try:
        return await _ends(rival.incoming(disk), template, "rival", rival.end)
    finally:
        disk.unlink()


async def _ends(starting: Awaitable[M], template: Template, name: str, end: Callable[[M], Awaitable[None]]) -> Ends:
    """Milliseconds from now to the ends A, B and C of the machine that `starting` gives."""
    began = time.perf_counter()
    machine = await starting
    try:
        await machine.vm.resume()
        ends = {"A": time.perf_counter() - began}
        await Agent(machine.connect, None).init(_identity(name, template))
        ends["B"] = time.perf_counter() - began
        await Guest.behind(machine).true()
        ends["C"] = time.perf_counter() - began
    finally:
        await end(machine)
    return {name: seconds * 1000 for name, seconds in ends.items()}


def _identity(name: str, template: Template) -> Init:
    context = template.manifest.context
    return identity(
        name,
        template.id,
        token=None,
        env=context.env,
        user=context.user,
        workdir=context.workdir or "",
        incarnation=name,
        machine_id=secrets.token_hex(16),
    )


async def _over_http(node: Node) -> tuple[Ends, Ends]:
    """What a client waits for: create, pause and kill; and the resume right after the pause."""
    client = Client(node)

    async def timed(work: Awaitable[T]) -> tuple[T, float]:
        began = time.perf_counter()
        return await work, (time.perf_counter() - began) * 1000

    box, created = await timed(client.create())
    _, first = await timed(box.true())
    _, paused = await timed(client.call("POST", f"/sandboxes/{box.id}/pause", {}))
    _, resumed = await timed(client.call("POST", f"/v2/sandboxes/{box.id}/connect", {}))
    _, command = await timed(box.true())
    _, killed = await timed(client.kill(box))
    client.close()
    ends = {"created": created, "C": created + first, "first command": first, "pause": paused, "killed": killed}
    return ends, {"B": resumed, "C": resumed + command}
