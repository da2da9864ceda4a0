"""Figures: fio on our device and on rivals, in turn, on the same data."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aenv._native.lsmt import Image, Layer, Stack, Writer

from .patterns import PATTERNS
from .support import control, new_image, sh

SIZE = 128 << 20
SECONDS = 1


def fio(path: str, pattern: str, direction: str, seconds: float = SECONDS) -> dict[str, Any]:
    kind = ("rand" if pattern.startswith("rand") else "") + direction
    command = [
        "fio", "--name=x", f"--filename={path}", f"--rw={kind}", "--direct=1", "--ioengine=io_uring", "--time_based",
        f"--runtime={seconds}", f"--size={SIZE}", "--output-format=json", "--randseed=1", "--thread",
        *PATTERNS[pattern],
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)["jobs"][0]
    side = found[direction]
    return {
        "iops": side["iops"],
        "p50_us": side["clat_ns"]["percentile"]["50.000000"] / 1000,
        "p99_us": side["clat_ns"]["percentile"]["99.000000"] / 1000,
    }


class Contest:
    """Devices of the same content: ours with its layers, and those of the rivals."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir()
        self.raw = self.folder / "raw"
        content = random.Random(1).randbytes(SIZE)
        self.raw.write_bytes(content)
        with (self.folder / "layer").open("wb") as file:
            writer = Writer(file.fileno(), SIZE)
            writer.add(0, content)
            writer.finish()
        self.paths: dict[str, str] = {}
        self._end: list[Callable[[], object]] = []

    def add(self, name: str) -> None:
        """`ublk`, `ublk-N-queues`, `loop`, `loop-direct` or `qemu-nbd`."""
        if name.startswith("ublk"):
            self._add_ublk(name, int(name.split("-")[1]) if "-" in name else 1)
        elif name == "qemu-nbd":
            self._add_nbd()
        else:
            self._add_loop(name)

    def _add_ublk(self, name: str, queues: int) -> None:
        """A layer and a writable one, as the disk of a sandbox is."""
        new_image(self.folder, SIZE, name).close()
        stack = Stack([Layer(self.folder / "layer")])
        image = Image(stack, self.folder / f"{name}.data", self.folder / f"{name}.index")
        device = control(queues, 128).prepare()
        device.start(image)
        self.paths[name] = device.path
        self._end += [image.close, device.remove]

    def _add_loop(self, name: str) -> None:
        path = self.folder / name
        shutil.copy(self.raw, path)
        direct = "on" if name == "loop-direct" else "off"
        device = self.paths[name] = sh(f"/bin/losetup --find --show --direct-io={direct} {path}").strip()
        self._end.append(lambda: sh(f"/bin/losetup --detach {device}"))

    def _add_nbd(self) -> None:
        path = self.folder / "qcow2"
        sh(f"qemu-img convert -f raw -O qcow2 {self.raw} {path}")
        sh(f"qemu-nbd -k /run/nbd -c /dev/nbd0 -f qcow2 --aio=io_uring --discard=unmap {path}")
        self.paths["qemu-nbd"] = "/dev/nbd0"
        self._end.append(lambda: sh("qemu-nbd -d /dev/nbd0"))

    def warm(self) -> None:
        """All have their data in the page cache, and nothing to write back."""
        os.sync()
        for path in self.paths.values():
            sh(f"dd if={path} of=/dev/null bs=1M iflag=direct")

    def close(self) -> None:
        for end in reversed(self._end):
            end()
        shutil.rmtree(self.folder)


running: list[Contest] = []  # between the calls that come over the serial line


def begin(names: list[str]) -> None:
    contest = Contest("/data/figures")
    running.append(contest)
    for name in names:
        contest.add(name)
    contest.warm()


def warm() -> None:
    running[0].warm()


def cell(name: str, pattern: str, direction: str) -> dict[str, Any]:
    return fio(running[0].paths[name], pattern, direction)


def end() -> None:
    running.pop().close()


def attach(rounds: int) -> dict[str, list[float]]:
    """Milliseconds until there is a block device: of nothing, with a device made ahead, and of the loop driver."""
    folder = Path("/data/attach")
    folder.mkdir()
    (folder / "raw").write_bytes(bytes(1 << 20))
    image = new_image(folder, 16 << 20)
    front = control(1, 128)
    spare = front.prepare()
    found: dict[str, list[float]] = {"ublk": [], "ublk made ahead": [], "loop": [], "detach": []}
    for _ in range(rounds):
        began = time.perf_counter()
        device = front.prepare()
        device.start(image)
        found["ublk"].append(time.perf_counter() - began)
        began = time.perf_counter()
        device.remove()
        found["detach"].append(time.perf_counter() - began)
        began = time.perf_counter()
        spare.start(image)
        found["ublk made ahead"].append(time.perf_counter() - began)
        spare.remove()
        spare = front.prepare()
        began = time.perf_counter()
        loop = sh(f"/bin/losetup --find --show {folder}/raw").strip()
        found["loop"].append(time.perf_counter() - began)
        sh(f"/bin/losetup --detach {loop}")
    spare.remove()
    image.close()
    shutil.rmtree(folder)
    return {name: [1000 * seconds for seconds in times] for name, times in found.items()}
