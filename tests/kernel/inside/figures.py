"""Figures: fio on our device and on rivals, in turn, on the same data."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

from aenv._native.lsmt import Image, Layer, Stack, Writer
from ublk.device import Device

from .support import control, new_image, sh

SIZE = 128 << 20
SECONDS = 1
PATTERNS = {
    "seq1m": ["--bs=1M", "--iodepth=8"],
    "seq128k": ["--bs=128k", "--iodepth=32"],
    "rand4k-qd1": ["--bs=4k", "--iodepth=1"],
    "rand4k-qd64": ["--bs=4k", "--iodepth=64"],
}


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
        self._ours: list[tuple[Device, Image]] = []
        self._loops: list[str] = []

    def add_ublk(self, name: str, queues: int = 1) -> None:
        new_image(self.folder, SIZE, name).close()
        stack = Stack([Layer(self.folder / "layer")])
        image = Image(stack, self.folder / f"{name}.data", self.folder / f"{name}.index")
        device = control(queues, 128).prepare()
        device.start(image)
        self._ours.append((device, image))
        self.paths[name] = device.path

    def add_loop(self, name: str, *, direct: bool) -> None:
        path = self.folder / name
        sh(f"cp {self.raw} {path}")
        device = sh(f"/bin/losetup --find --show --direct-io={'on' if direct else 'off'} {path}").strip()
        self._loops.append(device)
        self.paths[name] = device

    def warm(self) -> None:
        """Both sides have all their data in the page cache, and nothing to write back."""
        os.sync()
        for path in self.paths.values():
            sh(f"dd if={path} of=/dev/null bs=1M iflag=direct")

    def close(self) -> None:
        for device, image in self._ours:
            device.remove()
            image.close()
        for path in self._loops:
            sh(f"/bin/losetup --detach {path}")
        sh(f"rm -rf {self.folder}")


running: list[Contest] = []  # between the calls that come over the serial line


def prepare(which: list[str]) -> None:
    contest = Contest("/data/figures")
    running.append(contest)
    for name in which:
        if name.startswith("ublk"):
            contest.add_ublk(name, queues=2 if "2q" in name else 1)
        else:
            contest.add_loop(name, direct="direct" in name)
    contest.warm()


def cell(name: str, pattern: str, direction: str) -> dict[str, Any]:
    return fio(running[0].paths[name], pattern, direction)


def end() -> None:
    running.pop().close()
