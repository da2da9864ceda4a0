"""`aenv`: the command line. Each group of commands is a module of its own, imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

from aenv import __version__
from aenv.config import load
from aenv.errors import AenvError

# Command → module that defines a click command of that name (dashes become underscores).
COMMANDS = {
    "serve": "aenv.cli.serve",
    "start": "aenv.cli.sandbox",
    "exec": "aenv.cli.sandbox",
    "ls": "aenv.cli.sandbox",
    "pause": "aenv.cli.sandbox",
    "resume": "aenv.cli.sandbox",
    "rm": "aenv.cli.sandbox",
    "snapshot": "aenv.cli.snapshot",
    "fork": "aenv.cli.snapshot",
    "rollback": "aenv.cli.snapshot",
    "tree": "aenv.cli.tree",
    "template": "aenv.cli.template",
    "image": "aenv.cli.image",
    "kernel": "aenv.cli.kernel",
    "dev-cert": "aenv.cli.dev_cert",
    "doctor": "aenv.cli.doctor",
    "bench": "aenv.cli.bench",
}


class Commands(click.Group):
    """Loads a command's module when the command is named, so that `aenv ls` does not pay for the daemon's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command: click.Command = getattr(module, cmd_name.replace("-", "_") + "_command")
        return command


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aenv")
@click.option("--home", metavar="DIR", help="Directory of the daemon's state (AENV_HOME; default /var/lib/aenv).")
@click.option("--url", metavar="URL", help="Address of the daemon (AENV_URL; default: the one started with this home).")
@click.pass_context
def aenv(ctx: click.Context, home: str | None, url: str | None) -> None:
    """Agent environments: Linux micro-VMs that start from snapshots in milliseconds.

    \b
    First steps:
      aenv doctor               what this machine can do
      aenv template build base  make the base template (once, some minutes)
      aenv serve                start the daemon
      aenv start base           a shell in a fresh micro-VM
    """
    ctx.obj = {"home": home, "url": url}


def home_of(ctx: click.Context) -> Path:
    """The home directory that `--home`, AENV_HOME or the default names."""
    given = ctx.find_root().obj["home"]
    return load({"home": given}).home


def _fill_standard_descriptors() -> None:
    """A closed stdin, stdout or stderr would become the number of our next socket."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main() -> None:
    """Entry point. Errors that a user can act on are one line on stderr; exit status 1."""
    _fill_standard_descriptors()
    try:
        aenv(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except AenvError as error:
        click.echo(f"aenv: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(1)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        click.echo(f"aenv: {name}{error.strerror or error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
