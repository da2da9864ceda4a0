"""The form of results: percentiles, rows, phase tables, memory of a process, and what the command prints."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.cli.bench import BENCHES, _cell
from aenv.config import load
from aenv.storage.disks import Disks
from aenv.vmm.base import MemoryRegion
from bench.facts import figures, host_facts, percentile, ratio, row, spread
from bench.memory import cost_of, parse
from bench.templates import with_settings
from bench.timeline import Phases, Span, Stages, Timeline, cpu_seconds


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([50, 95, 99]))
def test_percentiles_are_nearest_rank(values: list[float], per_cent: int) -> None:
    found = percentile(values, per_cent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= per_cent * len(values)
    assert sum(value < found for value in values) * 100 < per_cent * len(values)


def test_a_row_has_what_a_reader_needs() -> None:
    line = row("resume", [3.0, 1.0, 2.0], end="A", pool="warm")
    assert (line["n"], line["p50_ms"], line["min_ms"], line["max_ms"]) == (3, 2.0, 1.0, 3.0)
    assert line["samples_ms"] == [3.0, 1.0, 2.0]
    several = figures("snapshot", [{"frozen_ms": 1.0, "stored_mib": 8.0}, {"frozen_ms": 2.0, "stored_mib": 8.0}], mib=8)
    assert several["frozen_ms"] == spread([1.0, 2.0])
    assert (several["n"], several["mib"], len(several["samples"])) == (2, 8, 2)
    assert ratio("x", 2.0, "other", 9.0)["ratio"] == 4.5
    assert {"cpu", "cores", "kernel", "load_before", "memory_mib"} <= host_facts().keys()


def test_cells_for_people() -> None:
    assert _cell(spread([1.0, 2.0, 3.0])) == "2/3/3"
    assert _cell({"heap": 4.5, "libc": 0.25}) == "heap 4.5, libc 0.25"
    assert _cell(7) == "7"


def test_every_bench_has_a_module() -> None:
    folder = Path(__file__).parents[2] / "bench"
    assert all((folder / f"{name}.py").is_file() for name in BENCHES)


def test_settings_of_a_bench_leave_the_others() -> None:
    config = load({}, {})
    changed = with_settings(config, vmm__pool=0)
    assert (changed["vmm.pool"], changed["listen"]) == (0, config["listen"])
    assert config["vmm.pool"] != 0


def test_a_timeline_notes_calls_and_lets_go() -> None:
    original = Disks.seal

    async def seal() -> None:
        with Timeline(lambda: {"daemon": [os.getpid()]}) as timeline:
            await Disks(None).seal(Path("/nowhere"), [])  # type: ignore[arg-type]  # nothing to seal: it asks nobody
            (span,) = timeline.of("Disks.seal")
            assert span.end >= span.begin
            assert span.cpu["daemon"] >= 0
            timeline.clear()
            assert not timeline.spans

    asyncio.run(seal())
    assert Disks.seal is original


def test_a_call_that_fails_is_no_step() -> None:
    async def fails() -> None:
        with Timeline() as timeline:
            with pytest.raises(TypeError):
                await Disks(None).seal(None, ["x"])  # type: ignore[arg-type]
            assert timeline.of("Disks.seal") == []

    asyncio.run(fails())


def test_frozen_is_from_stop_to_go() -> None:
    timeline = Timeline()
    timeline.spans += [
        Span("QemuVm.resume", 7, 0.0, 0.5),
        Span("QemuVm.pause", 7, 1.0, 1.1),
        Span("QemuVm.pause", 8, 1.2, 1.3),
        Span("QemuVm.resume", 7, 2.0, 2.25),
    ]
    assert timeline.frozen(7) == 1.25


def test_phases_in_the_order_of_time() -> None:
    phases = Phases("x")
    for begin in (10.0, 20.0):
        spans = [
            Span("b", 1, begin + 2, begin + 3, cpu={"vmm": 0.5}),
            Span("a", 1, begin + 1, begin + 2),
            Span("a", 1, begin + 4, begin + 6),
            Span("never ended", 1, begin),
        ]
        phases.add(spans, begin)
    phases.add([Span("rare", 1, 30.0, 31.0)], 30.0)
    rows = phases.rows()
    assert [(r["step"], r["at_ms"], r["wall_ms"]) for r in rows] == [
        ("a", 1000, 1000), ("b", 2000, 1000), ("a #2", 4000, 2000)
    ]  # fmt: skip
    assert rows[1]["vmm_cpu_ms"] == 500


def test_stages_of_many_at_once() -> None:
    stages = Stages("x")
    stages.add([Span("a", 1, 1.0, 2.0), Span("a", 2, 1.5, 4.5), Span("a", 3, 1.2, 2.2)], 1.0)
    (line,) = stages.rows()
    assert (line["calls"], line["at_ms"], line["end_ms"], line["wall_ms"]) == (3, 0, 3500, 1000)


SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                 100 kB
Pss:                  60 kB
Private_Clean:        10 kB
Private_Dirty:        20 kB
VmFlags: rd wr mr mw me ac
7f0000400000-7f0000800000 r--p 00000000 08:01 12                         /lib/a b.so
Rss:                   8 kB
Pss:                   4 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
"""


def test_smaps_are_read() -> None:
    first, second = parse(SMAPS)
    assert (first.start, first.access, first.name, first.private) == (0x7F0000000000, "rw-p", "", 30)
    assert (second.name, second.values["Pss"]) == ("/lib/a b.so", 4)


def test_memory_is_divided_into_guest_and_rest() -> None:
    """Of this process, with its heap for guest memory."""
    heap = next(m for m in parse(Path("/proc/self/smaps").read_text()) if m.name == "[heap]")
    cost = cost_of([MemoryRegion(os.getpid(), heap.start, 0, heap.end - heap.start)])
    assert [m.name for m in cost.guest] == ["[heap]"]
    found = cost.figures()
    assert found["pss_mib"] > 0
    assert found["vmm_fixed_mib"] >= sum(cost.parts_mib().values()) - 0.1


def test_time_of_a_process_grows_and_ends() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(10**6))
    assert cpu_seconds(os.getpid()) > before
    assert cpu_seconds(2**22 + 1) == 0  # no such process
