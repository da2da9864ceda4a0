"""What a VMM process costs in memory: the guest's, and the rest.

PSS (proportional set size) counts a page that N processes have mapped as one Nth. Private pages are those no other
process has. All sizes in KiB, as the kernel gives them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aenv.vmm.base import MemoryRegion

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)")
PARTS = 8  # that are named


@dataclass(slots=True)
class Mapping:
    """One mapping of a process; `values` are the lines of its entry in smaps."""

    start: int
    end: int
    access: str
    name: str
    values: dict[str, int] = field(default_factory=dict)

    @property
    def private(self) -> int:
        return self.values["Private_Clean"] + self.values["Private_Dirty"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one VMM process."""

    guest: tuple[Mapping, ...]  # guest RAM
    rest: tuple[Mapping, ...]

    def figures(self) -> dict[str, float]:
        """`pss_mib` is of guest memory, `vmm_fixed_mib` the PSS of all else; resident and private with them."""
        return {
            "pss_mib": sum(m.values["Pss"] for m in self.guest) / 1024,
            "private_mib": sum(m.private for m in self.guest) / 1024,
            "resident_mib": sum(m.values["Rss"] for m in self.guest) / 1024,
            "vmm_fixed_mib": sum(m.values["Pss"] for m in self.rest) / 1024,
            "vmm_private_mib": sum(m.private for m in self.rest) / 1024,
            "mappings": float(len(self.guest) + len(self.rest)),
        }

    def parts_mib(self) -> dict[str, float]:
        """The PSS of what is not guest memory, by what it is, the largest first."""
        parts: Counter[str] = Counter()
        for mapping in self.rest:
            name = mapping.name.rpartition("/")[2].strip("[]") or f"anonymous {mapping.access}"
            parts[name] += mapping.values["Pss"]
        return {name: round(kib / 1024, 2) for name, kib in parts.most_common(PARTS)}


def cost_of(regions: Sequence[MemoryRegion]) -> Cost:
    """Of the process that has guest RAM at these places. Blocking."""
    mappings = list(parse(Path(f"/proc/{regions[0].pid}/smaps").read_text()))
    guest = [m for m in mappings if any(r.address <= m.start < r.address + r.length for r in regions)]
    return Cost(tuple(guest), tuple(m for m in mappings if m not in guest))


def parse(smaps: str) -> Iterator[Mapping]:
    """The entries of /proc/PID/smaps (proc_pid_smaps(5))."""
    mapping: Mapping | None = None
    for line in smaps.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.replace("_", "").isalnum() and value.endswith(" kB"):
            assert mapping is not None
            mapping.values[name] = int(value[:-3])
        elif (head := _HEAD.fullmatch(line)) is not None:
            if mapping is not None:
                yield mapping
            mapping = Mapping(int(head[1], 16), int(head[2], 16), head[3], head[4])
    if mapping is not None:
        yield mapping


def available_kib() -> int:
    """What the kernel thinks could be used without swapping."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])
