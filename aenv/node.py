"""One node: everything `aenv serve` is made of, built once and handed down."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aenv.api.app import Api
from aenv.api.auth import ApiKey, load_or_create_key
from aenv.config import Config
from aenv.daemon import Daemon, lock_home
from aenv.errors import AenvError, UnavailableError
from aenv.http.message import Handler
from aenv.http.server import Server
from aenv.http.tls import server_context
from aenv.network.pool import SlotPool
from aenv.proxy.forward import Proxy
from aenv.proxy.sandboxes import SandboxResolver
from aenv.sandbox.machines import Machines
from aenv.sandbox.manager import Manager
from aenv.sandbox.store import Store
from aenv.sandbox.tokens import Tokens
from aenv.storage.blocks import Blocks
from aenv.storage.disks import Disks
from aenv.storage.home import Home, read_or_create_secret
from aenv.storage.memory import MemoryImages
from aenv.storage.repository import Repository
from aenv.vmm.base import Vmm
from aenv.vmm.probe import select_vmm

log = logging.getLogger("aenv.node")


@dataclass(frozen=True, slots=True)
class Tls:
    """The second listener: TLS with host names `api.DOMAIN` and `PORT-ID.DOMAIN`. `domain` may end in `:PORT`."""

    listen: str
    domain: str
    cert: Path
    key: Path


class Node:
    """`start` gives a serving node; `close` ends it and leaves no process."""

    def __init__(
        self,
        config: Config,
        manager: Manager,
        machines: Machines,
        repository: Repository,
        slots: SlotPool,
        vmm: Vmm,
        home: Home,
        server: Server,
        api_key: str,
    ) -> None:
        self.config = config
        self.manager = manager
        self.slots = slots
        self.home = home
        self.machines = machines
        self.repository = repository
        self.api_key = api_key
        self.vmm = vmm
        self._server = server
        self._stack: AsyncExitStack

    @property
    def url(self) -> str:
        """Where the API listens."""
        host = config_host(self.config["listen"])
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._server.port}"

    @classmethod
    async def start(cls, config: Config, tls: Tls | None = None) -> Node:
        """Build and start everything. Raises AenvError with a hint; nothing is left running then."""
        if os.geteuid() != 0:
            raise UnavailableError("aenv serve needs root", hint="taps and network namespaces do: use sudo")
        async with AsyncExitStack() as stack:
            home = Home(config.home, config.cache)
            home.create()
            stack.callback(home.forget_run)
            stack.callback(os.close, lock_home(home.root))
            api_key = load_or_create_key(home.api_key)
            tokens = Tokens(read_or_create_secret(home.node_secret))
            vmm = await select_vmm(config["vmm.kind"], home.cache)
            repository = Repository(home.templates)
            store = Store(home.database)
            stack.callback(store.close)
            slots = SlotPool(
                uplink=config["network.uplink"], size=config["network.pool"], tag=home.tag, limit=config["network.max"]
            )
            await slots.start(keep=[r.machine.slot for r in store.load() if r.machine is not None])
            stack.push_async_callback(slots.close)
            blocks = await Blocks.start(home.blocks)
            stack.push_async_callback(_stop_blocks, blocks)
            memory = MemoryImages(blocks, home.images)
            await memory.start()
            stack.push_async_callback(memory.close)
            machines = Machines(
                home,
                vmm,
                slots,
                repository,
                Disks(blocks),
                memory,
                pool=config["vmm.pool"],
                pool_max=config["vmm.pool_max"],
                hot=config["vmm.hot"],
            )
            stack.push_async_callback(machines.close)
            manager = Manager(
                config,
                home,
                machines,
                repository,
                store,
                tokens,
                domain=tls.domain if tls is not None else None,
            )
            blocks.on_restarted(manager.blocks_restarted)
            await manager.open()
            stack.push_async_callback(manager.close)
            api = Api(manager, ApiKey(api_key), max_timeout=config["sandbox.max_timeout"])
            proxy = Proxy(SandboxResolver(manager), domain=None if tls is None else tls.domain)
            stack.callback(proxy.close)
            handler = proxy.handler(api)
            server = await _listen(handler, config["listen"])
            stack.push_async_callback(server.close)
            if tls is not None:
                context = server_context(tls.cert, tls.key)
                secure = await _listen(handler, tls.listen, context)
                stack.push_async_callback(secure.close)
            node = cls(config, manager, machines, repository, slots, vmm, home, server, api_key)
            Daemon(node.url, os.getpid()).write(config.home)
            stack.callback(Daemon.remove, config.home)
            await manager.warm_up()
            node._stack = stack.pop_all()
            return node

    async def close(self) -> None:
        """Stop listening, pause every sandbox, end the pools."""
        await self._stack.aclose()


async def _stop_blocks(blocks: Blocks) -> None:
    """End the block server, unless a machine that could not be ended still uses it: the next daemon takes it over."""
    try:
        await blocks.close(stop_server=True)
        shutil.rmtree(blocks.folder, ignore_errors=True)
    except AenvError as error:
        log.warning("the block server is left running: %s", error)
        await blocks.close()


def config_host(listen: str) -> str:
    return listen.rpartition(":")[0].strip("[]")


async def _listen(handler: Handler, address: str, context: ssl.SSLContext | None = None) -> Server:
    host, _, port = address.rpartition(":")
    try:
        return await Server.start(handler, host=host.strip("[]"), port=int(port), ssl=context)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {address}: {error.strerror or error}", hint="choose another with --listen HOST:PORT"
        ) from error
