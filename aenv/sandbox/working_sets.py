"""The pages that machines of a base image touch first, read into the page cache at once when the image is cold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from aenv.errors import AenvError
from aenv.snapshot.working_set import load_working_set, prefetch, record_working_set, save_working_set
from aenv.vmm.base import Machine, MemoryMap, Vm

log = logging.getLogger("aenv.sandbox")


class WorkingSets:
    """Kept in `directory`, a part of the cache, under the names of the lowest memory layers. What goes wrong here costs
    time, not a sandbox: it is only logged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._done: set[str] = set()  # names of images that were read ahead since this daemon started

    async def record(self, vm: Vm, layers: Sequence[str], shape: Machine) -> None:
        """A machine has done what all do first: remember what it touched, unless that is known."""
        if len(layers) != 1 or (self._directory / layers[0]).exists():
            return
        try:
            ranges = await record_working_set(vm)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            await asyncio.to_thread(save_working_set, self._directory / layers[0], shape.memory_mib << 20, ranges)
        except (AenvError, OSError) as error:
            log.warning("the working set of a template was not recorded: %s", error)

    async def read_ahead(self, image: MemoryMap, name: str) -> None:
        """Begin to read what machines of this image will need, once in a daemon's life."""
        if name in self._done:
            return
        self._done.add(name)
        try:
            cold = await prefetch(image, await asyncio.to_thread(load_working_set, self._directory / name, image.size))
        except FileNotFoundError:
            return  # nobody has recorded it yet
        except (AenvError, OSError) as error:
            log.warning("the working set of a template is of no use: %s", error)
            return
        if cold:
            log.info("reading %d MiB of memory image %s ahead", cold >> 20, name)
