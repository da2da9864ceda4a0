"""`aenv serve`: the daemon in the foreground."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path

import click
import uvloop

from aenv.config import Config, load
from aenv.errors import InvalidInputError
from aenv.node import Node, Tls

LEVELS = ("debug", "info", "warning", "error")


@click.command("serve")
@click.option("--home", "home", metavar="DIR", help="Directory of all state (default /var/lib/aenv).")
@click.option("--listen", metavar="HOST:PORT", help="Address of API and proxy (default 127.0.0.1:3000; port 0: any).")
@click.option("--uplink", metavar="WAY", help="Way out of sandboxes: host, none, or netns:NAME.")
@click.option("--tls-listen", metavar="HOST:PORT", help="Second address, with TLS and host names.")
@click.option("--domain", metavar="NAME[:PORT]", help="Domain of the TLS listener: api.NAME, PORT-ID.NAME.")
@click.option("--cert", type=click.Path(path_type=Path), help="Certificate chain for NAME and *.NAME (PEM).")
@click.option("--key", type=click.Path(path_type=Path), help="Its private key (PEM).")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print address and key as one line of JSON when ready.")
@click.pass_context
def serve_command(
    ctx: click.Context,
    home: str | None,
    listen: str | None,
    uplink: str | None,
    tls_listen: str | None,
    domain: str | None,
    cert: Path | None,
    key: Path | None,
    log_level: str,
    as_json: bool,
) -> None:
    """Serve the E2B API and the sandbox proxy until Ctrl-C or SIGTERM.

    At the end every running sandbox is paused: nothing runs without a daemon, and nothing is lost.

    \b
    Point any E2B SDK at it:
      export E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3000
      export E2B_API_KEY=$(cat /var/lib/aenv/secrets/api-key)
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    home = home or ctx.find_root().obj["home"]
    config = load({"home": home, "listen": listen, "network.uplink": uplink})
    given = {"--tls-listen": tls_listen, "--domain": domain, "--cert": cert, "--key": key}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise InvalidInputError(" and ".join(missing), "is needed for TLS too")
    tls = None
    if tls_listen is not None and domain is not None and cert is not None and key is not None:
        tls = Tls(tls_listen, domain, cert, key)
    uvloop.run(_serve(config, tls, as_json))


async def _serve(config: Config, tls: Tls | None, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    node = await Node.start(config, tls)
    try:
        key_file = config.home / "secrets/api-key"
        if as_json:
            click.echo(
                json.dumps(
                    {"url": node.url, "api_key": node.api_key, "vmm": node.vmm.kind.value, "home": str(config.home)}
                )
            )
        else:
            click.echo(f"listening on {node.url} ({node.vmm.kind.value}); the API key is in {key_file}")
            if tls is not None:
                click.echo(f"listening on https://api.{tls.domain} at {tls.listen}")
        await stop.wait()
        logging.getLogger("aenv").info("stopping: running sandboxes are paused")
    finally:
        await node.close()
