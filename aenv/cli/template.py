"""`aenv template`: build and list templates."""

from __future__ import annotations

import os
from typing import Any

import click
import uvloop

from aenv.cli.output import json_option, print_json, print_table, say, wants_json
from aenv.config import Config, load
from aenv.errors import InvalidInputError, NotFoundError, UnavailableError
from aenv.storage.home import Home
from aenv.storage.repository import Repository, Template
from aenv.template.build import Builder, Sizes
from aenv.vmm.probe import select_vmm

BASE = "base"


@click.group("template")
def template_command() -> None:
    """Templates: what sandboxes start from."""


@template_command.command("build")
@click.argument("name")
@click.option("--cpu", "vcpus", type=click.IntRange(1, 32), default=1, show_default=True, help="vCPUs.")
@click.option("--memory", type=click.IntRange(128, 65536), default=512, show_default=True, help="Memory in MiB.")
@click.option("--disk", type=click.IntRange(1024, 1 << 20), default=2048, show_default=True, help="Disk in MiB.")
@click.option("--force", is_flag=True, help="Build anew although it is there; running sandboxes keep the old one.")
@json_option
@click.pass_context
def build(ctx: click.Context, name: str, vcpus: int, memory: int, disk: int, force: bool, as_json: bool) -> None:
    """Build template NAME. The only one so far is `base`: Debian with Python, git and sudo.

    Makes the root file system, boots it once, and takes a snapshot of memory and disk. From then on every sandbox
    starts by restore. A second run does nothing.
    """
    if name != BASE:
        raise InvalidInputError("NAME", f"only {BASE!r} can be built so far, got {name!r}")
    config = load({"home": ctx.find_root().obj["home"]})
    if os.geteuid() != 0:
        raise UnavailableError("building a template needs root", hint="sudo aenv template build base")
    home = Home(config.home, config.cache)
    home.create()
    repository = Repository(home.templates)
    try:
        found: Template | None = repository.find(name)
    except NotFoundError:
        found = None
    except InvalidInputError as error:
        if not force:
            reason = f"template {name} is of no use here: {error}"
            raise UnavailableError(reason, hint="build it anew with --force") from error
        found = None
    if found is None or force:
        found = _build(config, home, repository, name, Sizes(vcpus, memory, disk))
        say(f"template {name} is {found.id}")
    else:
        say(f"template {name} is there already: {found.id}")
    if wants_json(as_json):
        print_json(_as_dict(found))


def _build(config: Config, home: Home, repository: Repository, name: str, sizes: Sizes) -> Template:
    vmm = uvloop.run(select_vmm(config["vmm.kind"], home.cache))
    builder = Builder(home, vmm, repository, say, boot_timeout=config["agent.timeout"])
    return builder.base(name, sizes)


@template_command.command("ls")
@json_option
@click.pass_context
def ls(ctx: click.Context, as_json: bool) -> None:
    """List the templates of this home."""
    config = load({"home": ctx.find_root().obj["home"]})
    directory = config.home / "templates"
    templates = Repository(directory).templates() if directory.is_dir() else []
    if wants_json(as_json):
        print_json([_as_dict(t) for t in templates])
        return
    rows = [
        (t.id, " ".join(t.names), t.manifest.vcpus, t.manifest.memory_mib, t.disk_size >> 20, t.manifest.vmm_kind.value)
        for t in templates
    ]
    print_table(("ID", "NAMES", "VCPUS", "MEMORY MiB", "DISK MiB", "VMM"), rows, "no templates")


def _as_dict(template: Template) -> dict[str, Any]:
    manifest = template.manifest
    return {
        "templateID": template.id,
        "names": list(template.names),
        "vcpus": manifest.vcpus,
        "memoryMB": manifest.memory_mib,
        "diskSizeMB": template.disk_size >> 20,
        "vmm": manifest.vmm_kind.value,
        "createdAt": manifest.created,
    }
