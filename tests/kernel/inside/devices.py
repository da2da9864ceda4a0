"""One device: is it a disk?"""

from __future__ import annotations

from pathlib import Path

from .support import disk, exercise

SIZE = 16 << 20


def test_device_is_a_disk(folder: Path) -> None:
    model = bytearray(SIZE)
    with disk(folder, SIZE) as (device, image):
        exercise(device.path, model, 150, 1)
        assert image.read(0, SIZE) == model
