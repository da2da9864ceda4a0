"""What a measurement asks of a home, and that it leaves nothing there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aenv.config import Config
from aenv.errors import NotFoundError
from aenv.node import Node
from aenv.storage.home import Home
from aenv.storage.repository import Repository
from aenv.template.build import Builder, Sizes
from aenv.vmm.probe import select_vmm

BASE = "base"
DISK_MIB = 4096  # sparse; has room for what the benches write


@asynccontextmanager
async def of_size(config: Config, memory_mib: int, say: Callable[[str], None]) -> AsyncIterator[str]:
    """The name of a template whose guests have one vCPU and `memory_mib`: `base` if it is that large, or
    `bench-MEMORY` if that is there. Else it is built, which takes a minute, and removed at the end."""
    home = Home(config.home, config.cache)
    home.create()
    repository = Repository(home.templates)
    for name in (BASE, f"bench-{memory_mib}"):
        try:
            manifest = repository.find(name).manifest
        except NotFoundError:
            continue
        if (manifest.memory_mib, manifest.vcpus) == (memory_mib, 1):
            yield name
            return
    vmm = await select_vmm(config["vmm.kind"], home.cache)
    builder = Builder(home, vmm, repository, say, boot_timeout=max(config["agent.timeout"], 120))
    template = await asyncio.to_thread(builder.base, f"bench-{memory_mib}", Sizes(1, memory_mib, DISK_MIB))
    try:
        yield template.names[0]
    finally:
        await asyncio.to_thread(repository.delete, template.id)


def with_settings(config: Config, **settings: Any) -> Config:
    """The same configuration with other values; `__` stands for the dot in a setting's name."""
    return Config(config._values | {name.replace("__", "."): value for name, value in settings.items()})


@asynccontextmanager
async def started(config: Config) -> AsyncIterator[Node]:
    """A node in this process; the sandboxes and snapshots that were made meanwhile are gone at the end."""
    node = await Node.start(config)
    try:
        before = await _made(node)
        try:
            yield node
        finally:
            sandboxes, snapshots = (now - old for now, old in zip(await _made(node), before, strict=True))
            await asyncio.gather(*(node.manager.kill(sandbox) for sandbox in sandboxes))
            for snapshot in snapshots:
                await node.manager.delete_template(snapshot)
    finally:
        await node.close()


async def _made(node: Node) -> tuple[set[str], set[str]]:
    sandboxes, snapshots = await node.manager.sandboxes(), await node.manager.snapshots()
    return {sandbox.id for sandbox in sandboxes}, {snapshot.id for snapshot in snapshots}
