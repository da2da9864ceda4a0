"""`aenv tree`: who descends from whom, and what each costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import click
import uvloop

from aenv.cli.output import json_option, print_json, print_table, size_text, wants_json
from aenv.cli.sandbox import remote_of

Node = dict[str, Any]

COLUMNS = ("ID", "WHAT", "NAMES", "CREATED", "MEMORY", "DISK", "PSS", "OWN")
SIZES = ("memoryBytes", "diskBytes", "residentBytes", "privateBytes")


@click.command("tree")
@json_option
@click.pass_context
def tree_command(ctx: click.Context, as_json: bool) -> None:
    """Show the family of templates, snapshots and sandboxes, and what each costs.

    \b
    MEMORY, DISK  what it alone has on disk of memory and of file system
    PSS           memory of a running sandbox's machine; what several share is split among them
    OWN           pages of that which are the guest's alone: what it has written since it started

    What was forked hangs on the sandbox it was forked from, and a sandbox on its last snapshot, on what it was created
    from, or on what is left of these. With --json: a list, parents before children.
    """
    nodes: list[Node] = uvloop.run(remote_of(ctx).call("GET", "/tree"))
    if wants_json(as_json):
        print_json(nodes)
        return
    rows = [_row(guide + node["id"], node.get("state") or node["kind"], node) for guide, node in family(nodes)]
    if rows:
        rows.append(_row("total", "", {key: sum(node.get(key) or 0 for node in nodes) for key in SIZES}))
    print_table(COLUMNS, rows, "no templates: aenv template build base makes the first")


def family(nodes: Iterable[Node]) -> Iterator[tuple[str, Node]]:
    """Each node behind its ancestors, with the guide lines to draw before it. A node whose parent does not come before
    it in `nodes` stands at the top. Chains of snapshots are long, so this does not recurse."""
    children: dict[str, list[Node]] = {}
    roots: list[Node] = []
    for node in nodes:
        children.get(node.get("parentID") or "", roots).append(node)
        children.setdefault(node["id"], [])
    pending = [("", "", node) for node in reversed(roots)]
    while pending:
        guide, below, node = pending.pop()
        yield guide, node
        mine = children.pop(node["id"], [])
        for number, child in enumerate(reversed(mine)):
            corner, line = ("└─ ", "   ") if number == 0 else ("├─ ", "│  ")
            pending.append((below + corner, below + line, child))


def _row(title: str, what: str, node: Node) -> tuple[str, ...]:
    sizes = (node.get(key) for key in SIZES)
    return (
        title,
        what,
        " ".join(node.get("names", ())),
        node.get("createdAt", "")[:19],
        *("-" if size is None else size_text(size) for size in sizes),
    )
