"""Disks for the tests inside: an image on a ublk device, and a flat model of it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from aenv._native.lsmt import Image, create_writable
from ublk.device import Control, Device

OWNER = 0x1234
BLKDISCARD, BLKZEROOUT, BLKFLSBUF = 0x1277, 0x127F, 0x1261


def sh(command: str) -> str:
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def control(queues: int = 1, depth: int = 64, *, owner: int = OWNER) -> Control:
    return Control(owner, queues=queues, depth=depth)


def new_image(folder: Path, size: int, name: str = "disk") -> Image:
    data, index = folder / f"{name}.data", folder / f"{name}.index"
    create_writable(data, index, size, uuid=str(uuid.uuid4()))
    return Image(None, data, index)


@contextlib.contextmanager
def disk(folder: Path, size: int, front: Control | None = None) -> Iterator[tuple[Device, Image]]:
    image = new_image(folder, size)
    device = (front or control()).prepare()
    try:
        device.start(image)
        yield device, image
    finally:
        device.remove()
        image.close()


class Direct:
    """O_DIRECT access to a block device with aligned buffers."""

    def __init__(self, path: str, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT | flags)
        self._buffer = mmap.mmap(-1, 4 << 20)

    def read(self, offset: int, length: int) -> bytes:
        view = memoryview(self._buffer)[:length]
        assert os.preadv(self.fd, [view], offset) == length
        return bytes(view)

    def write(self, offset: int, data: bytes) -> None:
        self._buffer[: len(data)] = data
        assert os.pwritev(self.fd, [memoryview(self._buffer)[: len(data)]], offset) == len(data)

    def ioctl(self, number: int, offset: int, length: int) -> None:
        fcntl.ioctl(self.fd, number, struct.pack("QQ", offset, length))

    def close(self) -> None:
        os.close(self.fd)


def exercise(path: str, model: bytearray, steps: int, seed: int, base: int = 0) -> None:
    """Random writes, discards, zeroings and flushes of the device from `base` on, the same to the model, and a
    comparison of all."""
    generator = random.Random(seed)
    device = Direct(path)
    size = len(model)
    try:
        for _ in range(steps):
            length = generator.choice([512, 4096, 8192, 65536, 131072, 1 << 20, 3 << 20])
            offset = generator.randrange(0, size - length) // 4096 * 4096
            action = generator.random()
            if action < 0.7:
                data = generator.randbytes(length) if action < 0.6 else bytes(length)
                device.write(base + offset, data)
                model[offset : offset + length] = data
            elif action < 0.9:
                length = (length + 4095) // 4096 * 4096
                device.ioctl(BLKDISCARD if action < 0.8 else BLKZEROOUT, base + offset, length)
                model[offset : offset + length] = bytes(length)
            else:
                os.fsync(device.fd)
        for offset in range(0, size, 1 << 20):
            assert device.read(base + offset, 1 << 20) == model[offset : offset + (1 << 20)], (
                f"differs in MiB {offset >> 20}"
            )
    finally:
        device.close()


def raises(action: Callable[[], object]) -> tuple[type[BaseException] | None, int | None]:
    """The class of the error, and its errno."""
    try:
        action()
    except Exception as error:
        return type(error), getattr(error, "errno", None)
    return None, None


def until(done: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)  # the kernel's or another process's doing


def kernel_devices() -> list[str]:
    """Every ublk device that the kernel has, whoever made it."""
    found = Path("/sys/class/ublk-char")
    return sorted(p.name for p in found.iterdir()) if found.is_dir() else []
