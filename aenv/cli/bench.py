"""`aenv bench`: measure this machine."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import uvloop

from aenv.cli.output import json_option, print_table, say, wants_json
from aenv.config import load
from aenv.errors import UnavailableError

BENCHES = ("resume", "snapshot", "fork", "exec", "files", "blocks", "ublk")
SAMPLES = ("samples", "samples_ms")


@click.command("bench")
@click.argument("name", type=click.Choice(BENCHES))
@click.option("-n", "rounds", type=click.IntRange(1, 10000), default=50, show_default=True, help="Samples per row.")
@json_option
@click.pass_context
def bench_command(ctx: click.Context, name: str, rounds: int, as_json: bool) -> None:
    """Measure and print p50/p95/p99 with the facts of this host.

    \b
    resume   from "give me a sandbox" to: A the VM runs, B its agent is initialised, C a first command has ended
    snapshot how long a snapshot or pause stops the guest and takes, with 0 to 1024 MiB of written memory
    fork     1, 4 and 16 children of one sandbox: until all answer, until all have run a command; an idle child's memory
    exec     what a command costs over the same command started inside the guest
    files    upload and download of 256 MiB against a raw TCP copy; memory of daemon and agent
    blocks   the block server: engine against pread, FUSE files against a raw file, restack, index, memory
    ublk     its block devices against loop and qemu-nbd, inside an emulated machine whose kernel has ublk

    Rivals are measured in the same run, in turn with ours: QEMU's own migrate, -incoming, savevm and loadvm. Rows that
    take long have fewer samples than -n asks for; each says how many. JSON has all samples.

    All but `blocks` and `ublk` start a daemon of their own on the given home, which must have no other. `resume`,
    `exec` and `files` need the template `base`; `snapshot` and `fork` build one of 2048 and of 256 MiB, and remove it
    again.
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
    for bench in dict.fromkeys(row["bench"] for row in result["rows"]):
        _print_rows([row for row in result["rows"] if row["bench"] == bench])


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Rows of one kind; a figure with several percentiles is `p50/p95/p99`."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in SAMPLES))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    click.echo()
    print_table([name.replace("_", " ").upper() for name in names], cells, "")


def _cell(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "p50" in value:
        return "/".join(f"{value[p]:g}" for p in ("p50", "p95", "p99"))
    return ", ".join(f"{name} {part:g}" for name, part in value.items())
