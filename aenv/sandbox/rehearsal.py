"""What every sandbox does first, done once by a guest that nobody will get to see."""

from __future__ import annotations

import secrets
import socket

from aenv.agent.client import ENVD_PORT, Agent, identity
from aenv.agent.process import Ended, Processes
from aenv.errors import GuestError
from aenv.http.client import Connection
from aenv.network.slot import Slot
from aenv.storage.repository import Template

CONNECT_TIMEOUT = 5.0  # seconds; a live guest answers or refuses within a millisecond
ROUNDS = 2


async def rehearse(slot: Slot, template: Template) -> None:
    """Initialise the agent and run a command, as for a sandbox that nobody will get to see."""

    async def connect(port: int) -> socket.socket:
        return await slot.connect(port, CONNECT_TIMEOUT)

    async def dial() -> Connection:
        return await Connection.open(await connect(ENVD_PORT))

    context = template.manifest.context
    for _ in range(ROUNDS):
        body = identity(
            "rehearsal",
            template.id,
            token=None,
            env=context.env,
            user=context.user,
            workdir=context.workdir or "",
            incarnation="rehearsal",
            machine_id=secrets.token_hex(16),
        )
        await Agent(connect, None).init(body)
        async for event in Processes(dial, {"Host": "guest"}).start("/bin/bash", ["-l", "-c", "true"]):
            if isinstance(event, Ended) and event.exit_code != 0:
                raise GuestError(f"a command of a fresh guest ended with {event.status}")
