"""The ublk front end inside the test machine of `tests/kernel`, against the kernel's loop device and qemu-nbd.

The machine is emulated: what an instruction costs there says nothing about a processor, but all rivals pay the same
price, in turn, on the same data. `-n` is the number of rounds, each of a second a cell.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aenv.config import Config
from aenv.errors import UnavailableError
from bench.facts import host_facts, row
from tests.kernel.inside.patterns import PATTERNS
from tests.kernel.kernel import ublk_kernel
from tests.kernel.root import build_initramfs, build_root, make_ext4
from tests.kernel.vm import Machine

RIVALS = ("loop", "loop-direct", "qemu-nbd")
DATA_BYTES = 4 << 30
PATIENCE = 120.0

Rows = list[dict[str, Any]]
Say = Callable[[str], None]


async def run(config: Config, n: int, say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        folder = Path(name)
        kernel = ublk_kernel(config.cache, say)
        build_initramfs(kernel, folder / "initramfs")
        build_root(kernel, folder, folder / "root.img", ["qemu-nbd", "qemu-img"])
        make_ext4(folder / "data.img", DATA_BYTES)
        machine = Machine(kernel, folder / "initramfs", folder / "root.img", folder / "data.img", folder, parallel=True)
        try:
            rows = disks(machine, min(n, 5), say) + attach(machine, min(n, 20))
        finally:
            machine.end()
    return {"host": host_facts(guest_kernel=kernel.release, guest="QEMU TCG, 2 vCPUs"), "rows": rows}


def call(machine: Machine, name: str, *arguments: Any) -> Any:
    answer = machine.request({"call": f"figures.{name}", "arguments": arguments}, PATIENCE)
    if "failure" in answer:
        raise UnavailableError(f"{name} failed in the machine: {answer['failure']}")
    return answer["result"]


def disks(machine: Machine, rounds: int, say: Say) -> Rows:
    names = ("ublk", *RIVALS)
    call(machine, "begin", names)
    found: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds):
        call(machine, "warm")
        for direction in ("read", "write"):
            for pattern in PATTERNS:
                for name in names:
                    found[pattern, direction, name].append(call(machine, "cell", name, pattern, direction))
        say(f"round {number + 1} of {rounds}")
    call(machine, "end")
    rows = []
    for (pattern, direction, name), theirs in found.items():
        ours = found[pattern, direction, "ublk"]
        rows.append({
            "bench": "ublk", "pattern": pattern, "direction": direction, "of": name,
            **{key: round(median(theirs, key), 1) for key in ("iops", "p50_us", "p99_us")},
            **({} if name == "ublk" else {"ublk_ratio": round(median(ours, "iops") / median(theirs, "iops"), 2)}),
        })  # fmt: skip
    return rows


def median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def attach(machine: Machine, rounds: int) -> Rows:
    return [row("attach", times, of=name) for name, times in call(machine, "attach", rounds).items()]
