"""Commands that branch: snapshot, fork, rollback."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import uvloop

from aenv.cli.output import json_option, print_json, print_table, say, size_text, wants_json
from aenv.cli.remote import Remote, segment
from aenv.cli.sandbox import remote_of
from aenv.errors import AenvError, NotFoundError


@click.group("snapshot")
def snapshot_command() -> None:
    """Snapshots: states of sandboxes, from which others start.

    \b
    aenv snapshot create ID --name ready  take one; sandbox ID goes on
    aenv start ready                      a new sandbox that continues there
    aenv rollback ID ready                take ID itself back to it
    """


@snapshot_command.command("create")
@click.argument("sandbox_id", metavar="ID")
@click.option("--name", help="Name, with or without :TAG. It moves here when another snapshot has it.")
@click.option("--disk-only", is_flag=True, help="Leave the memory out: smaller, and a sandbox from it boots.")
@json_option
@click.pass_context
def create(ctx: click.Context, sandbox_id: str, name: str | None, disk_only: bool, as_json: bool) -> None:
    """Take a snapshot of sandbox ID, which stops for some milliseconds and goes on.

    Prints what to call it. Only what has changed since the sandbox's last snapshot is stored.

    \b
    aenv snapshot create ID
    aenv snapshot create ID --name dataset:v2
    """
    remote = remote_of(ctx)
    body = {"memory": not disk_only} | ({} if name is None else {"name": name})
    snapshot = uvloop.run(remote.call("POST", f"/sandboxes/{segment(sandbox_id)}/snapshots", body))
    if wants_json(as_json):
        print_json(snapshot)
    else:
        click.echo(snapshot["snapshotID"])


@snapshot_command.command("ls")
@click.option("--sandbox", "sandbox_id", metavar="ID", help="Only those made of this sandbox, which may be gone.")
@click.option("--name", help="Only those with this name, of any tag unless NAME:TAG is given; or one by its id.")
@json_option
@click.pass_context
def ls(ctx: click.Context, sandbox_id: str | None, name: str | None, as_json: bool) -> None:
    """List snapshots, newest first. MEMORY and DISK are what each alone has stored."""
    remote = remote_of(ctx)
    snapshots = uvloop.run(remote.pages("/snapshots", sandboxID=sandbox_id or "", name=name or ""))
    if wants_json(as_json):
        print_json(snapshots)
        return
    rows = [
        (s["templateID"], " ".join(s["names"]), s["sandboxID"], s["parentID"], s["createdAt"][:19],
         size_text(s["memoryBytes"]) if s["memory"] else "-", size_text(s["diskBytes"]))
        for s in snapshots
    ]  # fmt: skip
    print_table(("ID", "NAMES", "OF", "BASED ON", "CREATED", "MEMORY", "DISK"), rows, "no snapshots")


@snapshot_command.command("rm")
@click.argument("snapshots", metavar="SNAPSHOT...", nargs=-1, required=True)
@click.pass_context
def rm(ctx: click.Context, snapshots: tuple[str, ...]) -> None:
    """Delete snapshots, by id or name.

    What other snapshots and sandboxes need of them stays until those are gone too. Templates are not deleted.
    """
    remote = remote_of(ctx)

    async def run() -> None:
        for text in snapshots:
            await remote.call("DELETE", f"/templates/{segment(await _identity(remote, text))}")
            say(f"{text} deleted")

    uvloop.run(run())


async def _identity(remote: Remote, text: str) -> str:
    """The id of the snapshot that `text` names; a template's name must not pass, since the path deletes both."""
    found: list[dict[str, Any]] = await remote.pages("/snapshots", name=text)
    tagged = text if ":" in text else f"{text}:default"
    for names_of in (lambda s: s["names"], lambda s: [f"{s['templateID']}:default"]):
        for snapshot in found:
            if tagged in names_of(snapshot):
                return str(snapshot["templateID"])
    raise NotFoundError(f"snapshot {text!r} does not exist", hint="aenv snapshot ls shows what there is")


@click.command("fork")
@click.argument("sandbox_id", metavar="ID")
@click.option("-n", "count", type=click.IntRange(1, 100), default=1, show_default=True, help="How many children.")
@click.option("--timeout", default=3600, show_default=True, help="Seconds until each child is ended or paused.")
@json_option
@click.pass_context
def fork_command(ctx: click.Context, sandbox_id: str, count: int, timeout: int, as_json: bool) -> None:
    """Start children that continue where sandbox ID is now.

    ID stops once, for some milliseconds, and goes on. Each child has its processes, memory and files, an id and an
    address of its own, and shares with the others what none has changed. Prints the ids; the exit status is 1 when
    not all of them started.

    \b
    aenv fork ID -n 16
    for child in $(aenv fork ID -n 16 --json | jq -r '.[].sandbox.sandboxID'); do aenv exec $child -- ./try; done
    """
    remote = remote_of(ctx)

    async def run() -> tuple[list[dict[str, Any]], float]:
        began = asyncio.get_running_loop().time()
        path = f"/sandboxes/{segment(sandbox_id)}/fork"
        children = await remote.call("POST", path, {"count": count, "timeout": timeout})
        return children, (asyncio.get_running_loop().time() - began) * 1000

    children, took = uvloop.run(run())
    started = [child["sandbox"]["sandboxID"] for child in children if "sandbox" in child]
    if wants_json(as_json):
        print_json(children)
    else:
        say(f"{len(started)} of {len(children)} children started in {took:.0f} ms")
        for child in started:
            click.echo(child)
    reasons = dict.fromkeys(child["error"]["message"] for child in children if "error" in child)
    if reasons:
        raise AenvError(f"{len(children) - len(started)} of {len(children)} did not start: {'; '.join(reasons)}")


@click.command("rollback")
@click.argument("sandbox_id", metavar="ID")
@click.argument("snapshot")
@click.pass_context
def rollback_command(ctx: click.Context, sandbox_id: str, snapshot: str) -> None:
    """Take sandbox ID, running or paused, back to SNAPSHOT (an id or a name).

    It keeps its id, token and address; everything that happened in it since then is lost. SNAPSHOT was made of this
    sandbox, or the sandbox was made from it.

    \b
    aenv snapshot create ID --name before
    aenv exec ID -- rm -rf /home/user
    aenv rollback ID before
    """
    remote = remote_of(ctx)
    path = f"/sandboxes/{segment(sandbox_id)}/rollback"
    uvloop.run(remote.call("POST", path, {"snapshotID": snapshot}))
    say(f"{sandbox_id} is back at {snapshot}")
