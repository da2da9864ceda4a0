"""When calls of the engine begin and end, and what CPU time the processes took meanwhile.

The methods that make a step of an operation are wrapped while a `Timeline` is active. So what is measured is the code
that serves users, and a step that moves to another place in an operation is still measured.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aenv.agent.client import Agent
from aenv.sandbox.lifecycle import Lifecycle
from aenv.sandbox.machines import Machines
from aenv.sandbox.store import Store
from aenv.storage.disks import Disks
from aenv.storage.repository import Repository
from aenv.vmm.pool import WarmPool
from aenv.vmm.qemu import QemuVm
from bench.facts import percentile

STEPS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (WarmPool, ("take",)),
    (Disks, ("open", "restack", "seal")),
    (Machines, ("_map", "restore", "capture", "rehome", "remember", "settle", "end")),
    (QemuVm, ("attach_disk", "map_memory", "load_state", "pause", "save_state", "resume")),
    (Lifecycle, ("initialise",)),
    (Agent, ("init",)),
    (Store, ("save", "transition")),
    (Repository, ("commit",)),
)


@dataclass(slots=True)
class Span:
    """One call. Times are seconds of `perf_counter`; `cpu` is that of each process by its role."""

    step: str
    pid: int  # of the machine, when it is a machine's
    begin: float
    end: float = 0.0
    result: Any = None
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Timeline:
    """`with Timeline() as timeline:` notes every call; `clear` forgets them. With `processes` (role → pids) each span
    has the CPU time that they took during it, which costs some 100 µs a call."""

    def __init__(self, processes: Callable[[], dict[str, Sequence[int]]] | None = None) -> None:
        self.spans: list[Span] = []
        self.processes = processes
        self._originals: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Timeline:
        for owner, names in STEPS:
            for name in names:
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, self._wrapped(owner, name))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def clear(self) -> None:
        self.spans.clear()

    def of(self, step: str, pid: int | None = None) -> list[Span]:
        """The calls of a step that have ended, of one machine if `pid` is given, oldest first."""
        return [s for s in self.spans if s.step == step and s.end and pid in (None, s.pid)]

    def frozen(self, pid: int) -> float:
        """Seconds from the call that stopped a machine's vCPUs last until the one that let them go on had returned."""
        stop = self.of("QemuVm.pause", pid)[-1]
        return next(s.end for s in self.of("QemuVm.resume", pid) if s.begin >= stop.begin) - stop.begin

    def _wrapped(self, owner: type, name: str) -> Any:
        original = getattr(owner, name)
        step = f"{owner.__name__}.{name}"

        def begin(target: Any) -> Span:
            span = Span(step, getattr(target, "pid", 0), time.perf_counter(), cpu=self._cpu())
            self.spans.append(span)
            return span

        def end(span: Span, result: Any) -> None:
            span.end = time.perf_counter()
            span.result = result
            after = self._cpu()
            span.cpu = {role: after.get(role, 0.0) - seconds for role, seconds in span.cpu.items()}

        if owner is Store or owner is Repository:  # these two block

            @functools.wraps(original)
            def blocking(target: Any, *args: Any, **options: Any) -> Any:
                span = begin(target)
                result = original(target, *args, **options)
                end(span, result)
                return result

            return blocking

        @functools.wraps(original)
        async def awaited(target: Any, *args: Any, **options: Any) -> Any:
            span = begin(target)
            result = await original(target, *args, **options)
            end(span, result)
            return result

        return awaited

    def _cpu(self) -> dict[str, float]:
        if self.processes is None:
            return {}
        return {role: sum(map(cpu_seconds, pids)) for role, pids in self.processes().items()}


class Phases:
    """Steps of many runs of one operation, as a table: when a step began, how long it took, and whose CPU."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._seen: dict[str, list[tuple[float, float, dict[str, float]]]] = {}
        self._runs = 0

    def add(self, spans: Iterable[Span], began: float) -> None:
        """The spans of one run that was asked for at `began`. Steps that were done twice count as two."""
        counts: dict[str, int] = {}
        self._runs += 1
        for span in spans:
            if span.end:
                number = counts[span.step] = counts.get(span.step, 0) + 1
                name = span.step if number == 1 else f"{span.step} #{number}"
                self._seen.setdefault(name, []).append((span.begin - began, span.seconds, span.cpu))

    def rows(self) -> list[dict[str, Any]]:
        """In the order of their begin; steps that fewer than half of the runs had are left out."""
        rows = []
        for step, seen in self._seen.items():
            if 2 * len(seen) < self._runs:
                continue
            row: dict[str, Any] = {
                "bench": "phase",
                "operation": self._operation,
                "step": step,
                "n": len(seen),
                "at_ms": round(percentile([at for at, _, _ in seen], 50) * 1000, 2),
                "wall_ms": round(percentile([wall for _, wall, _ in seen], 50) * 1000, 2),
                "wall_max_ms": round(max(wall for _, wall, _ in seen) * 1000, 2),
            }
            for role in dict.fromkeys(role for _, _, cpu in seen for role in cpu):
                values = [cpu.get(role, 0.0) for _, _, cpu in seen]
                row[f"{role}_cpu_ms"] = round(percentile(values, 50) * 1000, 2)
            rows.append(row)
        return sorted(rows, key=lambda row: (row["at_ms"], -row["wall_ms"]))


class Stages:
    """Steps of an operation that does each of them many times at once: from the first begin to the last end."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._seen: dict[str, list[tuple[int, float, float, float]]] = {}

    def add(self, spans: Iterable[Span], began: float) -> None:
        """The spans of one run that was asked for at `began`."""
        calls: dict[str, list[Span]] = {}
        for span in spans:
            if span.end:
                calls.setdefault(span.step, []).append(span)
        for step, of_step in calls.items():
            middle = percentile([span.seconds for span in of_step], 50)
            first, last = min(span.begin for span in of_step), max(span.end for span in of_step)
            self._seen.setdefault(step, []).append((len(of_step), first - began, last - began, middle))

    def rows(self) -> list[dict[str, Any]]:
        """In the order of their begin; medians over the runs."""
        rows = []
        for step, seen in self._seen.items():
            calls, first, last, middle = (percentile(values, 50) for values in zip(*seen, strict=True))
            rows.append(
                {
                    "bench": "phase",
                    "operation": self._operation,
                    "step": step,
                    "n": len(seen),
                    "calls": int(calls),
                    "at_ms": round(first * 1000, 2),
                    "end_ms": round(last * 1000, 2),
                    "wall_ms": round(middle * 1000, 2),
                }
            )
        return sorted(rows, key=lambda row: (row["at_ms"], row["end_ms"]))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads that a process has now; 0 when it has ended."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return total / 1e9
    return total / 1e9
