"""`aenv image`: look at layers, check them, turn them into raw disk files and back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aenv.cli.output import json_option, print_json, print_table, size_text, wants_json
from aenv.storage import image

existing = click.Path(exists=True, dir_okay=False, path_type=Path)
output = click.Path(dir_okay=False, path_type=Path)


@contextlib.contextmanager
def progress_bar(text: str, total: int) -> Iterator[image.Progress]:
    """A bar on stderr, if a person sits there."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.update(task, completed=done)


@click.group("image")
def image_command() -> None:
    """Look into disk and memory layers (overlaybd files: LSMT, ZFile, tar-wrapped)."""


@image_command.command("inspect")
@click.argument("layers", type=existing, nargs=-1, required=True, metavar="LAYER…")
@click.option("--content", is_flag=True, help="Compare the content of the layers, too (reads them whole).")
@json_option
def inspect_command(layers: tuple[Path, ...], content: bool, as_json: bool) -> None:
    """Say what is in layers. Several are taken as a stack, lowest first."""
    reports = image.inspect(layers)
    shared: list[image.Sharing] = []
    if content:
        with progress_bar("comparing", sum(report.data for report in reports)) as progress:
            shared = image.sharing(layers, progress)
    if wants_json(as_json):
        rows = [dataclasses.asdict(report) | {"info": report.info._asdict()} for report in reports]
        print_json({"layers": rows, "sharing": [dataclasses.asdict(pair) for pair in shared]} if content else rows)
        return
    print_table(
        ["LAYER", "KIND", "IMAGE", "FILE", "DATA", "ZEROED", "VISIBLE", "SEGMENTS", "UUID", "PARENT", "TAG"],
        [
            [
                report.path, report.info.kind, size_text(report.info.virtual_size), size_text(report.file_size),
                size_text(report.data), size_text(report.zeroed), size_text(report.visible), report.segments,
                report.info.uuid or "-", {None: "-", True: "below", False: "another"}[report.follows],
                report.info.user_tag or "-",
            ]
            for report in reports
        ],
        "",
    )  # fmt: skip
    if content:
        print_table(
            ["LAYER", "AND", "EQUAL CONTENT"],
            [[pair.first, pair.second, size_text(pair.blocks * image.BLOCK)] for pair in shared],
            "The layers have no block in common.",
        )


@image_command.command("verify")
@click.argument("layers", type=existing, nargs=-1, required=True, metavar="LAYER…")
@json_option
def verify_command(layers: tuple[Path, ...], as_json: bool) -> None:
    """Check every field and every checksum. Stops at the first layer that is broken, and names the field."""
    results: list[dict[str, Any]] = []
    for path in layers:
        with progress_bar(f"verifying {path.name}", path.stat().st_size) as progress:
            results.append(dataclasses.asdict(image.verify(path, progress)))
    if wants_json(as_json):
        print_json(results)
        return
    print_table(
        ["LAYER", "IMAGE", "FILE", "SHA256"],
        [[r["path"], size_text(r["virtual_size"]), size_text(r["file_size"]), r["sha256"]] for r in results],
        "",
    )


def _tell(written: image.Written, as_json: bool) -> None:
    if wants_json(as_json):
        print_json(dataclasses.asdict(written))
    else:
        content = f"{size_text(written.data)} of content in {size_text(written.file_size)}"
        click.echo(f"{written.path}: image of {size_text(written.virtual_size)}, {content}")


@image_command.command("export")
@click.argument("layers", type=existing, nargs=-1, required=True, metavar="LAYER…")
@click.option("-o", "--output", "target", type=output, required=True, metavar="RAW", help="File to write.")
@json_option
def export_command(layers: tuple[Path, ...], target: Path, as_json: bool) -> None:
    """Write a stack of layers, lowest first, as a sparse raw disk file."""
    with progress_bar("exporting", image.content_of(layers)) as progress:
        written = image.export(layers, target, progress)
    _tell(written, as_json)


@image_command.command("import")
@click.argument("raw", type=existing)
@click.option("-o", "--output", "target", type=output, required=True, metavar="LAYER", help="File to write.")
@click.option("--zfile", "form", type=click.Choice(["lz4", "zstd"]), default=None, help="Compress the layer.")
@click.option("--block-size", type=click.Choice(["4096", "8192", "16384", "32768", "65536"]), default="4096",
              show_default=True, help="Bytes compressed at a time.")  # fmt: skip
@click.option("--tar", is_flag=True, help="Wrap the layer as OCI registries expect it.")
@click.option("--parent", "parents", type=existing, multiple=True, metavar="LAYER",
              help="Store only what differs from this layer (give several lowest first).")  # fmt: skip
@click.option("--tag", "user_tag", default="", help="Text to put into the layer (up to 256 bytes).")
@json_option
def import_command(
    raw: Path,
    target: Path,
    form: str | None,
    block_size: str,
    tar: bool,
    parents: tuple[Path, ...],
    user_tag: str,
    as_json: bool,
) -> None:
    """Make a sealed layer of a raw disk file. Zeros take no room."""
    with progress_bar("importing", os.path.getsize(raw)) as progress:
        written = image.import_raw(
            raw, target, form=form or "plain", block_size=int(block_size), tar=tar, parents=parents, user_tag=user_tag,
            progress=progress,
        )  # fmt: skip
    _tell(written, as_json)
