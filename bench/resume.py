"""From "give me a sandbox" to the three ends: A the VM runs, B its agent is initialised, C a first command has ended.

Two planes in one run: the engine (calls inside this process) and HTTP (a request to a daemon in this process). The
engine is measured with three kinds of pool: `warm`, a machine restored ahead that has answered once; `prepared`, a VMM
process that waits for its state; and `none`, everything from nothing. The rival is what one does without this system:
QEMU's own save of the whole machine to a file and `-incoming` from it, on the same guest, interleaved.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from aenv.agent.client import ENVD_PORT, Init, identity
from aenv.agent.process import Processes
from aenv.config import Config
from aenv.http.client import Connection
from aenv.network.base import Policy
from aenv.node import Node
from aenv.sandbox.machines import Machines, Running
from aenv.storage.repository import Template
from bench.client import Client, run_true
from bench.facts import host_facts, row
from bench.rival import Rival

PAUSE_BETWEEN = 0.6  # seconds: the pool refills while nobody is measured


async def run(config: Config, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`n` rounds; each starts a machine from the pool, one without, and one sandbox over HTTP."""
    node = await Node.start(config)
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    rival: Rival | None = None
    try:
        machines = node.machines
        template = node.repository.find("base")
        await machines.expect_resume(template.id)
        rival = await Rival.save(node, template, node.home.staging)
        for number in range(n):
            for pool in ("warm", "prepared", "none"):
                await _settle(machines, template)
                for end, value in (await _engine(machines, template, pool)).items():
                    samples["engine", end, pool].append(value)
            await _settle(machines, template)
            for end, value in (await _ends(machines, rival.restore(), template, "rival")).items():
                samples["rival: QEMU -incoming", end, "none"].append(value)
            await _settle(machines, template)
            for end, value in (await _over_http(node)).items():
                samples["http", end, "warm"].append(value)
            say(f"round {number + 1} of {n}")
    finally:
        if rival is not None:
            rival.close()
        await node.close()
    return {
        "host": host_facts(
            vmm=f"{node.vmm.kind.value} {node.vmm.version}",
            guest_memory_mib=template.manifest.memory_mib,
            vcpus=template.manifest.vcpus,
        ),
        "rows": [
            row("resume", values, plane=plane, end=end, pool=pool) for (plane, end, pool), values in samples.items()
        ],
    }


async def _settle(machines: Machines, template: Template) -> None:
    while 0 in machines.ready(template.id):
        await asyncio.sleep(0.02)
    await asyncio.sleep(PAUSE_BETWEEN)


async def _engine(machines: Machines, template: Template, pool: str) -> dict[str, float]:
    name = f"bench{secrets.token_hex(6)}"
    if pool == "warm":
        restored = machines.start(template, name, Policy())
    else:
        restored = machines.restore_template(template, name, Policy(), pooled=pool == "prepared")
    try:
        return await _ends(machines, restored, template, name)
    finally:
        shutil.rmtree(machines.directory(name))


async def _ends(
    machines: Machines, restored: Coroutine[Any, Any, Running], template: Template, name: str
) -> dict[str, float]:
    """Milliseconds from now to the ends A, B and C of the machine that `restored` gives."""
    began = time.perf_counter()
    running = await restored
    try:
        await running.vm.resume()
        ends = {"A": time.perf_counter() - began}
        await running.agent(None).init(_identity(name, template))
        ends["B"] = time.perf_counter() - began
        await _first_command(running)
        ends["C"] = time.perf_counter() - began
    finally:
        await machines.end(running)
    return {end: seconds * 1000 for end, seconds in ends.items()}


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


async def _first_command(running: Running) -> None:
    async def dial() -> Connection:
        return await Connection.open(await running.connect(ENVD_PORT))

    await run_true(Processes(dial, {"Host": "guest"}))


async def _over_http(node: Node) -> dict[str, float]:
    client = Client(node)
    began = time.perf_counter()
    box = await client.create()
    ends = {"created": time.perf_counter() - began}
    await box.true()
    ends["C"] = time.perf_counter() - began
    ends["first command"] = ends["C"] - ends["created"]
    for name, method, path, body in (
        ("pause", "POST", "/sandboxes/{}/pause", {}),
        ("resumed", "POST", "/v2/sandboxes/{}/connect", {}),
        ("killed", "DELETE", "/sandboxes/{}", None),
    ):
        begin = time.perf_counter()
        await client.call(method, path.format(box.id), body)
        ends[name] = time.perf_counter() - begin
    client.close()
    return {end: seconds * 1000 for end, seconds in ends.items()}
