"""What a command costs over the same command started inside the guest.

`inside` is fork, exec and wait of the shell line that the SDK sends, measured by a Python program in the guest;
`sdk` is `commands.run("true")` of the official Python SDK in a process of its own, `http` the same request without it.
All three in each round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from aenv.config import Config
from aenv.node import Node
from aenv.vmm import spawn
from bench.client import Client
from bench.facts import host_facts, row

INSIDE = """
import json, os, time
took = []
for _ in range({count}):
    began = time.perf_counter()
    pid = os.posix_spawn("/bin/bash", ["/bin/bash", "-l", "-c", "true"], os.environ)
    os.waitpid(pid, 0)
    took.append((time.perf_counter() - began) * 1000)
print(json.dumps(took))
"""
SDK = """
import json, sys, time
from e2b import Sandbox
sandbox = Sandbox.connect(sys.argv[1])
sandbox.commands.run("true")
took = []
for _ in range({count}):
    began = time.perf_counter()
    sandbox.commands.run("true")
    took.append((time.perf_counter() - began) * 1000)
print(json.dumps(took))
"""
PER_ROUND = 10


async def run(config: Config, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`n` samples a row, ten at a time in turn."""
    samples: dict[str, list[float]] = {"inside": [], "http": [], "sdk": []}
    node = await Node.start(config)
    try:
        client = Client(node)
        box = await client.create()
        sdk = os.environ | {"E2B_API_URL": node.url, "E2B_SANDBOX_URL": node.url, "E2B_API_KEY": node.api_key}
        await box.true()
        while len(samples["sdk"]) < n:
            samples["inside"] += json.loads(await box.output(["python3", "-c", INSIDE.format(count=PER_ROUND)]))
            for _ in range(PER_ROUND):
                samples["http"].append(await _timed(box.true()))
            program = SDK.format(count=PER_ROUND)
            done = await spawn.run([sys.executable, "-c", program, box.id], env=sdk)
            samples["sdk"] += json.loads(done.stdout)
            say(f"{len(samples['sdk'])} of {n}")
        await client.kill(box)
    finally:
        await node.close()
    rows = [row("exec", values, plane=plane) for plane, values in samples.items()]
    inside_p50 = rows[0]["p50_ms"]
    for line in rows:
        line["over_inside_ms"] = round(line["p50_ms"] - inside_p50, 2)
    return {"host": host_facts(vmm=f"{node.vmm.kind.value} {node.vmm.version}"), "rows": rows}


async def _timed(work: Any) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000
