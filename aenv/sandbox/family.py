"""The family tree: templates, snapshots and sandboxes, who descends from whom and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from aenv._native import memory
from aenv.sandbox.live import Sandbox
from aenv.sandbox.service import NodeKind, TreeNode
from aenv.snapshot.manifest import SnapshotKind
from aenv.storage.repository import Template
from aenv.vmm.base import MemoryRegion


def family(
    templates: Sequence[Template],
    sandboxes: Sequence[Sandbox],
    directory: Callable[[str], Path],
    regions: Mapping[str, Sequence[MemoryRegion]],
) -> list[TreeNode]:
    """Parents before children, siblings by age. A node whose parent is gone hangs on the nearest ancestor that is
    known to exist. A layer that several have is counted for the first of them. `regions` tells where the RAM of running
    sandboxes lies. Blocking: reads the sizes of files and the page maps of processes."""
    known = {t.id for t in templates} | {s.id for s in sandboxes}

    def nearest(lineage: Iterable[str]) -> str | None:
        return next((identity for identity in lineage if identity in known), None)

    nodes = [_template(t, nearest([] if t.manifest.parent is None else [t.manifest.parent])) for t in templates]
    nodes += [_sandbox(s, nearest(s.record.lineage), regions.get(s.id, ())) for s in sandboxes]
    layers = {t.id: (t.directory, t.manifest.memory, t.manifest.disk.layers) for t in templates}
    for sandbox in sandboxes:
        record = sandbox.record
        disk = record.disk if record.upper is None else [*record.disk, record.upper]
        layers[sandbox.id] = directory(sandbox.id), record.memory, disk
    counted: set[tuple[int, int]] = set()
    return [
        replace(node, memory_bytes=new_bytes(folder, memory, counted), disk_bytes=new_bytes(folder, disk, counted))
        for node in _ordered(nodes)
        for folder, memory, disk in [layers[node.id]]
    ]


def new_bytes(folder: Path, names: Iterable[str], counted: set[tuple[int, int]]) -> int:
    """Bytes on disk of the files that are not in `counted` yet, to which they are added by device and inode."""
    total = 0
    for name in names:
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            continue  # it was deleted while we looked
        if (status.st_dev, status.st_ino) not in counted:
            counted.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    return total


def _template(template: Template, parent: str | None) -> TreeNode:
    return TreeNode(
        kind=NodeKind.TEMPLATE if template.kind is SnapshotKind.TEMPLATE else NodeKind.SNAPSHOT,
        id=template.id,
        parent_id=parent,
        names=template.names,
        created_at=datetime.fromtimestamp(template.manifest.created, UTC),
        state=None,
        memory_bytes=0,
        disk_bytes=0,
    )


def _sandbox(sandbox: Sandbox, parent: str | None, regions: Sequence[MemoryRegion]) -> TreeNode:
    resident, private = _resident(regions)
    return TreeNode(
        kind=NodeKind.SANDBOX,
        id=sandbox.id,
        parent_id=parent,
        names=(),
        created_at=datetime.fromtimestamp(sandbox.record.started_at, UTC),
        state=sandbox.state,
        memory_bytes=0,
        disk_bytes=0,
        resident_bytes=resident,
        private_bytes=private,
    )


def _resident(regions: Sequence[MemoryRegion]) -> tuple[int | None, int | None]:
    """PSS of a VMM, and what its guest has written of its RAM and shares with nobody, in bytes."""
    if not regions:
        return None, None
    pid, size = regions[0].pid, sum(region.length for region in regions)
    spans = [(region.address, region.guest_offset, region.length) for region in regions]
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = memory.written_bytes(pid, spans, size)
    except OSError:
        return None, None  # it has just ended
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(fields["Pss"].split()[0]) * 1024, private


def _ordered(nodes: list[TreeNode]) -> list[TreeNode]:
    children: dict[str | None, list[TreeNode]] = {}
    for node in sorted(nodes, key=lambda n: n.created_at):
        children.setdefault(node.parent_id, []).append(node)
    ordered: list[TreeNode] = []
    waiting = children.get(None, [])[::-1]
    while waiting:
        node = waiting.pop()
        ordered.append(node)
        waiting += children.get(node.id, [])[::-1]
    return ordered
