"""How commands speak: tables for people, JSON for scripts, progress and errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (the default when output is piped).")


def wants_json(as_json: bool) -> bool:
    return as_json or not sys.stdout.isatty()


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=None, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """A table, or the sentence `empty` when there are no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == "ID")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table if table.row_count else empty)


def size_text(size: float) -> str:
    """Bytes as `512 B`, `1.5 MiB` or `117 GiB`."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 or size >= 100 else f"{size:.1f} {UNITS[unit]}"


def say(text: str) -> None:
    """A line of progress."""
    click.echo(f"{click.style('==>', bold=True)} {text}", err=True)
