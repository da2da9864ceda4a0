"""`python -m ublk`, installed as `aenv-blockd`: the block server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from aenv.errors import AenvError
from ublk.server import Server

log = logging.getLogger("aenv.blockd")


@click.command()
@click.option("--socket", "socket_path", type=click.Path(path_type=Path), required=True, help="Control socket to make.")
# Not click.Path, which looks at it: a mount that is taken over answers only when we do.
@click.option("--mount", "directory", type=Path, required=True, metavar="PATH", help="Where images appear.")
@click.option("--state", type=click.Path(path_type=Path), help="What is served, for the next server; SOCKET.state.")
@click.option("--kept", multiple=True, type=int, help="Inherited descriptor of the mount of a server that died.")
@click.option("--ready", type=int, help="Inherited descriptor that gets a byte when requests are accepted.")
def main(socket_path: Path, directory: Path, state: Path | None, kept: tuple[int, ...], ready: int | None) -> None:
    """Serve overlaybd images as files, controlled over a Unix socket."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _avoid_oom_killer()
    state = state or socket_path.with_name(f"{socket_path.name}.state")
    server = Server(socket_path.absolute(), directory.absolute(), state.absolute(), kept=kept, ready=ready)
    try:
        asyncio.run(server.run())
    except AenvError as error:
        raise click.ClickException(str(error)) from error


def _avoid_oom_killer() -> None:
    """All sandboxes wait for this process: it must be the last to go."""
    try:
        Path("/proc/self/oom_score_adj").write_text("-1000")
    except OSError as error:
        log.warning("the OOM killer may choose this process: %s", error)


if __name__ == "__main__":
    main()
