"""Remote layers: what a cold read over loopback HTTP costs with the delays of real networks, with and without a
recorded trace, and what a hit costs against a local layer.

`python -m bench.blocks_remote FILE MILLISECONDS` is the server: a process of its own, so that it has a GIL of its own.
"""

from __future__ import annotations

import hashlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aenv._native.lsmt import Image, Layer, Stack, Writer, time_reads
from ublk.ranges import HttpSpec, RemoteSpec
from ublk.remote import CHUNK_SIZE, RemoteLayers, RemoteOptions, TraceRecording, prefetch
from ublk.trace import Trace

SIZE = 128 << 20
DELAYS = (0, 5, 20)  # milliseconds before each answer
PLACES = 60  # where a starting guest reads
READS = 20000

Rows = list[dict[str, Any]]


def remote(folder: Path, rounds: int) -> Rows:
    layer = folder / "remote-layer"
    data = random.Random(1).randbytes(SIZE)
    with layer.open("wb") as file:
        writer = Writer(file.fileno(), SIZE)
        writer.add(0, data)
        writer.finish()
    digest = f"sha256:{hashlib.sha256(layer.read_bytes()).hexdigest()}"
    rows: Rows = []
    for delay in DELAYS:
        with serving(layer, delay) as url:
            spec = RemoteSpec(HttpSpec(url), layer.stat().st_size, digest)
            rows += cold(folder, spec, delay, min(rounds, 3))
    with serving(layer, 0) as url:
        rows += hits(folder, RemoteSpec(HttpSpec(url), layer.stat().st_size, digest), layer, rounds)
    return rows


def visits(seed: int) -> list[int]:
    """Offsets of 4 KiB reads as of a guest that starts: runs of up to 32 pages at some places."""
    generator = random.Random(seed)
    found = []
    for _ in range(PLACES):
        place = generator.randrange(SIZE // 4096 - 32) * 4096
        found += [place + 4096 * page for page in range(generator.randrange(1, 33))]
    return found


def cold(folder: Path, spec: RemoteSpec, delay: int, rounds: int, chunk_size: int = CHUNK_SIZE) -> Rows:
    times: dict[str, list[float]] = defaultdict(list)
    totals: dict[str, list[float]] = defaultdict(list)
    fetched: dict[str, int] = {}
    for number in range(rounds):
        trace: Trace | None = None
        for way in ("visits", "visits after prefetch", "sequential"):
            cache = folder / f"cache-{delay}-{number}-{way.replace(' ', '-')}-{chunk_size}"
            made = RemoteLayers(RemoteOptions(cache, 4 * SIZE, chunk_size=chunk_size))
            held = made.attach(spec)
            recording = TraceRecording([held], 1 << 16) if way == "visits" else None
            image = Image(Stack(made.open([held])))
            if way == "visits after prefetch" and trace is not None:
                prefetch(trace, [held])
                settle(made)
            offsets = visits(number) if way != "sequential" else list(range(0, SIZE, 1 << 20))
            length = 4096 if way != "sequential" else 1 << 20
            began = time.perf_counter()
            for offset in offsets:
                start = time.perf_counter()
                image.read(offset, length)
                times[way].append((time.perf_counter() - start) * 1e6)
            totals[way].append((time.perf_counter() - began) * 1000)
            if recording is not None:
                trace = recording.trace()
            fetched[way] = made.stats["fetched_bytes"]
            image.close()
            made.close()
    rows = []
    for way, values in times.items():
        values.sort()
        total = statistics.median(totals[way])
        row = {
            "bench": "remote", "of": way, "delay_ms": delay, "chunk": chunk_size, "total_ms": round(total, 1),
            "p50_us": round(values[len(values) // 2], 1), "p99_us": round(values[len(values) * 99 // 100], 1),
            "fetched_mib": round(fetched[way] / (1 << 20), 1),
        }  # fmt: skip
        if way == "sequential":
            row["mib_s"] = round((SIZE >> 20) / total * 1000)
        rows.append(row)
    return rows


def settle(made: RemoteLayers) -> None:
    """Wait until all that was queued is stored."""
    while made.stats["queued"] + made.stats["in_flight"]:
        time.sleep(0.005)


def hits(folder: Path, spec: RemoteSpec, layer: Path, rounds: int) -> Rows:
    """Random 4 KiB reads from the page cache, of the local layer and through the chunk cache, in alternation."""
    made = RemoteLayers(RemoteOptions(folder / "cache-hits", 4 * SIZE))
    held = made.attach(spec)
    images = {"local layer": Image(Stack([Layer(layer)])), "remote layer, hit": Image(Stack(made.open([held])))}
    for offset in range(0, SIZE, 1 << 20):
        for image in images.values():
            image.read(offset, 1 << 20)
    settle(made)
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, image in images.items():
            found = [t / 1000 for t in time_reads(image, -1, SIZE, 4096, READS, number)]
            if number:  # the first round warms the caches
                times[name] += found
    # Medians: on a machine with other work the mean is that of the interruptions.
    base = statistics.median(times["local layer"])
    rows = []
    for name, values in times.items():
        values.sort()
        rows.append({
            "bench": "remote", "of": name, "pattern": "rand4k", "p50_us": round(values[len(values) // 2], 2),
            "p99_us": round(values[len(values) * 99 // 100], 2), "rival": "local layer",
            "ratio": round(base / statistics.median(values), 3),
        })  # fmt: skip
    for image in images.values():
        image.close()
    made.close()
    return rows


# --- the server ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(path: Path, delay: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.blocks_remote", str(path), str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/blob"
        finally:
            process.communicate("")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    blob = b""
    delay = 0.0

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        time.sleep(self.delay)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert match is not None
        first, last = int(match[1]), int(match[2])
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.blob)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(memoryview(self.blob)[first : last + 1])


def main(path: str, delay: str) -> None:
    Handler.blob, Handler.delay = Path(path).read_bytes(), int(delay) / 1000
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
