"""Commands on sandboxes: start, exec, ls, pause, resume, rm."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import click
import uvloop

from aenv.agent.process import Ended, Output, Processes, Started
from aenv.cli.main import home_of
from aenv.cli.output import json_option, print_json, print_table, say, wants_json
from aenv.cli.remote import ApiError, Remote, segment
from aenv.cli.source import Source
from aenv.cli.terminal import attach, require_terminal
from aenv.errors import AenvError, InvalidInputError


def remote_of(ctx: click.Context) -> Remote:
    return Remote.find(home_of(ctx), ctx.find_root().obj["url"])


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if "" in pairs or any("=" not in value for value in values):
        raise click.BadParameter("expected NAME=VALUE")
    return pairs


@click.command("start")
@click.argument("template")
@click.option("-d", "--detach", is_flag=True, help="Print the id and return; do not open a shell.")
@click.option("-e", "--env", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="Environment variable.")
@click.option("-m", "--metadata", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="Metadata, to find it by.")
@click.option("--timeout", default=3600, show_default=True, help="Seconds until it is ended or paused.")
@click.option("--auto-pause", is_flag=True, help="Pause at the time-out instead of ending it.")
@click.option("--keep", is_flag=True, help="Keep the sandbox when the shell ends.")
@json_option
@click.pass_context
def start_command(
    ctx: click.Context,
    template: str,
    detach: bool,
    env: dict[str, str],
    metadata: dict[str, str],
    timeout: int,
    auto_pause: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Start a sandbox from TEMPLATE and open a shell in it.

    The sandbox ends with the shell unless --keep is given. With -d it goes on until its time-out.
    """
    if not detach:
        require_terminal()
    remote = remote_of(ctx)
    body = {
        "templateID": template,
        "timeout": timeout,
        "envVars": env,
        "metadata": metadata,
        "autoPause": auto_pause,
    }

    async def run() -> int:
        began = asyncio.get_running_loop().time()
        box = await remote.call("POST", "/v2/sandboxes", body)
        took = (asyncio.get_running_loop().time() - began) * 1000
        sandbox_id = box["sandboxID"]
        if detach:
            if wants_json(as_json):
                print_json(box)
            else:
                click.echo(sandbox_id)
            return 0
        say(f"{sandbox_id} started in {took:.0f} ms")
        try:
            return await attach(await remote.processes(sandbox_id))
        finally:
            if not keep:
                with contextlib.suppress(ApiError):  # its time was over first
                    await remote.call("DELETE", f"/sandboxes/{sandbox_id}")

    sys.exit(uvloop.run(run()))


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-e", "--env", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="Environment variable.")
@click.option("-u", "--user", help="User in the sandbox (default: the template's).")
@click.option("-w", "--cwd", help="Working directory.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.argument("sandbox_id", metavar="ID")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_command(
    ctx: click.Context,
    env: dict[str, str],
    user: str | None,
    cwd: str | None,
    tty: bool,
    sandbox_id: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in sandbox ID; its input, output and exit status are this command's.

    \b
    aenv exec ID -- ls -l /
    echo hello | aenv exec ID -- sh -c 'cat > greeting'
    """
    words = command[1:] if command[0] == "--" else command
    if not words:
        raise InvalidInputError("COMMAND", "is missing")
    remote = remote_of(ctx)

    async def run() -> int:
        processes = await remote.processes(sandbox_id, user)
        if tty:
            return await attach(processes, words[0], words[1:], env=env, cwd=cwd)
        has_input = sys.stdin is not None and not sys.stdin.isatty()
        sender: asyncio.Task[None] | None = None
        pid: int | None = None
        status = 1
        try:
            async for event in processes.start(words[0], words[1:], env=env, cwd=cwd, stdin=has_input):
                match event:
                    case Started(pid):
                        if has_input:
                            sender = asyncio.create_task(_send_stdin(processes, pid))
                    case Output("stderr", data):
                        sys.stderr.buffer.write(data)
                        sys.stderr.buffer.flush()
                    case Output(_, data):
                        sys.stdout.buffer.write(data)
                        sys.stdout.buffer.flush()
                    case Ended():
                        status = event.shell_status
        except (asyncio.CancelledError, OSError):  # Ctrl-C, or nobody reads our output: the command ends too
            if pid is not None:
                with contextlib.suppress(AenvError):
                    await processes.signal(pid, "SIGNAL_SIGTERM")
            raise
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return status

    sys.exit(uvloop.run(run()))


async def _send_stdin(processes: Processes, pid: int) -> None:
    source = Source(sys.stdin.fileno())
    while data := await source.read():
        await processes.send_input(pid, data, pty=False)
    await processes.close_stdin(pid)


@click.command("ls")
@json_option
@click.pass_context
def ls_command(ctx: click.Context, as_json: bool) -> None:
    """List sandboxes, running and paused."""
    remote = remote_of(ctx)

    async def collect() -> list[dict[str, Any]]:
        return await remote.pages("/v2/sandboxes")

    boxes = uvloop.run(collect())
    if wants_json(as_json):
        print_json(boxes)
        return
    rows = [
        (b["sandboxID"], b["state"], b.get("alias") or b["templateID"], b["startedAt"][:19], b["endAt"][:19],
         " ".join(f"{k}={v}" for k, v in (b.get("metadata") or {}).items()))
        for b in boxes
    ]  # fmt: skip
    print_table(("ID", "STATE", "TEMPLATE", "STARTED", "ENDS", "METADATA"), rows, "no sandboxes")


def _each(ctx: click.Context, ids: tuple[str, ...], method: str, path: str, body: Any, done: str) -> None:
    remote = remote_of(ctx)

    async def run() -> None:
        for sandbox_id in ids:
            await remote.call(method, path.format(segment(sandbox_id)), body)
            say(f"{sandbox_id} {done}")

    uvloop.run(run())


@click.command("pause")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.pass_context
def pause_command(ctx: click.Context, ids: tuple[str, ...]) -> None:
    """Pause sandboxes: memory and disk are kept, nothing runs."""
    _each(ctx, ids, "POST", "/sandboxes/{}/pause", {}, "paused")


@click.command("resume")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--timeout", default=3600, show_default=True, help="Seconds until it is ended or paused again.")
@click.pass_context
def resume_command(ctx: click.Context, ids: tuple[str, ...], timeout: int) -> None:
    """Resume paused sandboxes where they stopped."""
    _each(ctx, ids, "POST", "/v2/sandboxes/{}/connect", {"timeout": timeout}, "runs")


@click.command("rm")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.pass_context
def rm_command(ctx: click.Context, ids: tuple[str, ...]) -> None:
    """End sandboxes, running or paused, and delete all that they wrote."""
    _each(ctx, ids, "DELETE", "/sandboxes/{}", None, "ended")
