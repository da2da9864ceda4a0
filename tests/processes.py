"""What a living process has open."""

from __future__ import annotations

import contextlib
import os


def open_files(pid: int) -> dict[int, str]:
    """Descriptor to what it stands for. The process goes on meanwhile: what it closes as we look is not in it."""
    found: dict[int, str] = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found
