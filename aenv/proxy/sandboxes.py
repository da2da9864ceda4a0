"""Finds the sandboxes of this node for the proxy, and wakes those that asked for it."""

from __future__ import annotations

from aenv.errors import NotFoundError
from aenv.proxy.target import SandboxNotFoundError, Target
from aenv.sandbox.manager import Manager

STARTS_PROGRAM = "/process.Process/Start"  # the answer is the program's output


class SandboxResolver:
    """The `Resolver` over a node's manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def traffic_token(self, sandbox_id: str) -> str | None:
        """See `Resolver`."""
        return self._manager.traffic_token_of(sandbox_id)

    async def resolve(self, sandbox_id: str, port: int, request_path: str, envd: bool) -> Target:
        """The machine that traffic goes to. Raises SandboxNotFoundError; whatever a resume that was tried raises."""
        try:
            sandbox, running = await self._manager.reach(sandbox_id)
        except NotFoundError as error:
            raise SandboxNotFoundError from error
        starts = envd and request_path.endswith(STARTS_PROGRAM)
        return Target(
            sandbox_id,
            running.incarnation,
            running.connect,
            running.closed,
            envd_token=self._manager.envd_token(sandbox),
            mask_host=sandbox.record.options.network.mask_request_host,
            ended=sandbox.begin_start() if starts else lambda: None,
        )
