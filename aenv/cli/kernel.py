"""`aenv kernel`: the guest kernel."""

from __future__ import annotations

import click

from aenv.boot.kernel import ensure_kernel
from aenv.cli.output import json_option, print_json, say, wants_json
from aenv.config import load


@click.command("kernel")
@json_option
@click.pass_context
def kernel_command(ctx: click.Context, as_json: bool) -> None:
    """Fetch and prepare the guest kernel from the distribution's package (unpacked, not installed).

    A second run finds it and does nothing.
    """
    config = load({"home": ctx.find_root().obj["home"]})
    kernel = ensure_kernel(config.cache, say)
    if wants_json(as_json):
        print_json({"release": kernel.release, "package": kernel.package, "image": str(kernel.boot_image)})
    else:
        click.echo(f"{kernel.release} from {kernel.package}: {kernel.boot_image}")
