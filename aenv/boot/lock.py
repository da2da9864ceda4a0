"""A directory in which one process at a time builds something slowly."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def build_lock(folder: Path, scratch: str) -> Iterator[None]:
    """Hold the lock of `folder` (made when it is missing) for the length of the block; waits for another holder.

    The kernel releases it when its holder dies, however it dies. What such a holder left, directories that match the
    glob `scratch`, is removed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for stale in folder.glob(scratch):
            shutil.rmtree(stale)
        yield
