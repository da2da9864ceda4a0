"""`python -m ublk`, installed as `aenv-blockd`: the block server."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from pathlib import Path

import click

from aenv.errors import AenvError
from ublk.front import UblkOptions
from ublk.remote import CHUNK_SIZE, RemoteOptions
from ublk.server import Server

log = logging.getLogger("aenv.blockd")

MCL_CURRENT, MCL_ONFAULT = 1, 4


@click.command()
@click.option("--socket", "socket_path", type=click.Path(path_type=Path), required=True, help="Control socket to make.")
# Not click.Path, which looks at it: a mount that is taken over answers only when we do.
@click.option("--mount", "directory", type=Path, required=True, metavar="PATH", help="Where images appear.")
@click.option("--state", type=click.Path(path_type=Path), help="What is served, for the next server; SOCKET.state.")
@click.option("--kept", multiple=True, type=int, help="Inherited descriptor of the mount of a server that died.")
@click.option("--ready", type=int, help="Inherited descriptor that gets a byte when requests are accepted.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where chunks of remote layers are kept.")
@click.option("--cache-size", type=click.IntRange(min=0), default=16 << 30, show_default=True, help="Bytes of chunks.")
@click.option("--chunk-size", type=int, default=CHUNK_SIZE, show_default=True, help="Bytes of a chunk of a new layer.")
@click.option("--remote-wait", type=float, default=30, show_default=True, help="Seconds until a missing chunk is EIO.")
@click.option("--prefetch-rate", type=click.IntRange(min=0), default=0, help="Bytes/s from one place; 0: no bound.")
@click.option("--ublk-queues", type=click.IntRange(1, 64), default=1, show_default=True, help="Of a block device.")
@click.option("--ublk-depth", type=click.IntRange(1, 1024), default=128, show_default=True, help="Requests of a queue.")
@click.option("--ublk-spare", type=click.IntRange(0, 1024), default=2, show_default=True, help="Devices made ahead.")
def main(
    socket_path: Path, directory: Path, state: Path | None, kept: tuple[int, ...], ready: int | None,
    cache: Path | None, cache_size: int, chunk_size: int, remote_wait: float, prefetch_rate: int, ublk_queues: int,
    ublk_depth: int, ublk_spare: int,
) -> None:  # fmt: skip
    """Serve overlaybd images as files, controlled over a Unix socket."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _avoid_oom_killer()
    _stay_in_memory()
    state = state or socket_path.with_name(f"{socket_path.name}.state")
    remote = None
    if cache is not None:
        remote = RemoteOptions(
            cache.absolute(), cache_size, chunk_size=chunk_size, wait_seconds=remote_wait, prefetch_rate=prefetch_rate
        )
    server = Server(
        socket_path.absolute(),
        directory.absolute(),
        state.absolute(),
        kept=kept,
        ready=ready,
        remote=remote,
        ublk=UblkOptions(ublk_queues, ublk_depth, ublk_spare),
    )
    try:
        asyncio.run(server.run())
    except (AenvError, OSError) as error:
        if server.mounted:
            log.exception("this server cannot go on")
            # As if killed: an orderly end would unmount, and the next server could not take over.
            os._exit(1)
        raise click.ClickException(str(error)) from error


def _avoid_oom_killer() -> None:
    """All sandboxes wait for this process: it must be the last to go."""
    try:
        Path("/proc/self/oom_score_adj").write_text("-1000")
    except OSError as error:
        log.warning("the OOM killer may choose this process: %s", error)


def _stay_in_memory() -> None:
    """Lock what there is before the first image: programs, libraries and the interpreter's heap, some 30 MiB.

    Who waits for a write that frees memory must not wait for code that was dropped. Indexes of layers come later and
    are not locked: they may be large, and the kernel can always write them to swap, which never lies on an image.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Pages are locked as they are used: large parts of the libraries never are.
    if libc.mlockall(MCL_CURRENT | MCL_ONFAULT):
        log.warning("memory cannot be locked: %s", os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
