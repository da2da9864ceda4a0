"""Host facts, percentiles and the form of every result."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aenv


def host_facts(**more: Any) -> dict[str, Any]:
    """What a figure means nothing without."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    meminfo = re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_mib": int(meminfo[1]) >> 10 if meminfo else None,
        "kernel": platform.release(),
        "virtualised": bool(flags and " hypervisor" in flags[1]),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "aenv": aenv.__version__,
        **more,
    }


def percentile(values: Sequence[float], per_cent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(per_cent * len(ordered)) // 100) - 1)]


def row(bench: str, milliseconds: Sequence[float], **names: Any) -> dict[str, Any]:
    """One line of a result; the samples stay with it."""
    return {
        "bench": bench,
        **names,
        "n": len(milliseconds),
        "p50_ms": round(percentile(milliseconds, 50), 2),
        "p95_ms": round(percentile(milliseconds, 95), 2),
        "p99_ms": round(percentile(milliseconds, 99), 2),
        "min_ms": round(min(milliseconds), 2),
        "max_ms": round(max(milliseconds), 2),
        "samples_ms": [round(v, 2) for v in milliseconds],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """One figure of a row that has several."""
    return {
        "p50": round(percentile(values, 50), 2),
        "p95": round(percentile(values, 95), 2),
        "p99": round(percentile(values, 99), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def figures(bench: str, samples: Sequence[Mapping[str, float]], **names: Any) -> dict[str, Any]:
    """One line with the spread of each figure that every sample has; the samples stay with it."""
    spreads = {name: spread([sample[name] for sample in samples]) for name in samples[0]}
    rounded = [{name: round(value, 2) for name, value in sample.items()} for sample in samples]
    return {"bench": bench, **names, "n": len(samples), **spreads, "samples": rounded}


def ratio(what: str, ours: float, rival: str, theirs: float) -> dict[str, Any]:
    """How many times faster we were: medians, in milliseconds."""
    return {
        "bench": "ratio",
        "what": what,
        "rival": rival,
        "ours_ms": round(ours, 2),
        "rival_ms": round(theirs, 2),
        "ratio": round(theirs / ours, 2),
    }
