"""The family tree: templates, snapshots and sandboxes, who descends from whom and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from aenv.sandbox.live import Sandbox
from aenv.sandbox.service import NodeKind, TreeNode
from aenv.snapshot.checkpoint import own_bytes
from aenv.snapshot.manifest import SnapshotKind
from aenv.storage.repository import Template


def family(
    templates: Sequence[Template], sandboxes: Sequence[Sandbox], directory: Callable[[str], Path]
) -> list[TreeNode]:
    """Parents before children, siblings by age. A node whose parent is gone hangs on the nearest ancestor that is
    known to exist. Blocking: reads the sizes of files."""
    known = {t.id for t in templates} | {s.id for s in sandboxes}

    def nearest(lineage: Iterable[str]) -> str | None:
        return next((identity for identity in lineage if identity in known), None)

    sizes = [(template, _sizes(template.directory, template.manifest.memory, template.manifest.disk.layers))
             for template in templates]  # fmt: skip
    nodes = [
        TreeNode(
            kind=NodeKind.TEMPLATE if template.kind is SnapshotKind.TEMPLATE else NodeKind.SNAPSHOT,
            id=template.id,
            parent_id=nearest([] if template.manifest.parent is None else [template.manifest.parent]),
            names=template.names,
            created_at=datetime.fromtimestamp(template.manifest.created, UTC),
            state=None,
            memory_bytes=memory,
            disk_bytes=disk,
        )
        for template, (memory, disk) in sizes
    ]
    nodes += [_sandbox(sandbox, nearest(sandbox.record.lineage), directory(sandbox.id)) for sandbox in sandboxes]
    return _ordered(nodes)


def _sandbox(sandbox: Sandbox, parent: str | None, folder: Path) -> TreeNode:
    record = sandbox.record
    layers = record.disk if record.upper is None else [*record.disk, record.upper]
    memory, disk = _sizes(folder, record.memory, layers)
    resident, private = (None, None) if sandbox.running is None else _resident(sandbox.running.vm.pid)
    return TreeNode(
        kind=NodeKind.SANDBOX,
        id=sandbox.id,
        parent_id=parent,
        names=(),
        created_at=datetime.fromtimestamp(record.started_at, UTC),
        state=sandbox.state,
        memory_bytes=memory,
        disk_bytes=disk,
        resident_bytes=resident,
        private_bytes=private,
    )


def _sizes(folder: Path, memory: list[str], disk: list[str]) -> tuple[int, int]:
    try:
        return own_bytes(folder, memory), own_bytes(folder, disk)
    except FileNotFoundError:
        return 0, 0  # it was deleted while we looked


def _resident(pid: int) -> tuple[int | None, int | None]:
    """PSS of a process and what of it is its own anonymous memory, in bytes."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None, None  # it has just ended
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(fields["Pss"].split()[0]) * 1024, int(fields["Pss_Anon"].split()[0]) * 1024


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
