"""`aenv bench`: measure this machine."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from aenv.cli.output import json_option, print_table, say, wants_json
from aenv.config import load
from aenv.errors import UnavailableError

BENCHES = ("resume", "exec", "files", "blocks")


@click.command("bench")
@click.argument("name", type=click.Choice(BENCHES))
@click.option("-n", "rounds", type=click.IntRange(1, 10000), default=50, show_default=True, help="Samples per row.")
@json_option
@click.pass_context
def bench_command(ctx: click.Context, name: str, rounds: int, as_json: bool) -> None:
    """Measure and print p50/p95/p99 with the facts of this host.

    \b
    resume   from "give me a sandbox" to: A the VM runs, B its agent is initialised, C a first command has ended
    exec     what a command costs over the same command started inside the guest
    files    upload and download of 256 MiB against a raw TCP copy; memory of daemon and agent
    blocks   the block server: engine against pread, FUSE files against a raw file, restack, index, memory

    All but `blocks` start a daemon of their own on the given home, which must have the template `base` and no
    other daemon.
    """
    # The measurements live beside the package, in the source tree: they are no part of what is installed.
    root = Path(__file__).parents[2]
    if not (root / "bench").is_dir():
        raise UnavailableError("the benchmarks are not installed", hint="run it from a source tree")
    sys.path.insert(0, str(root))
    module = importlib.import_module(f"bench.{name}")
    config = load({"home": ctx.find_root().obj["home"], "listen": "127.0.0.1:0"})
    result: dict[str, Any] = uvloop.run(module.run(config, rounds, say))
    if wants_json(as_json):
        click.echo(json.dumps(result))
        return
    click.echo("  ".join(f"{k}={v}" for k, v in result["host"].items()))
    names = list(dict.fromkeys(k for r in result["rows"] for k in r if k != "samples_ms"))
    print_table(
        [n.replace("_", " ").upper() for n in names], [[r.get(n, "") for n in names] for r in result["rows"]], ""
    )
