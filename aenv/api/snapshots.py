"""Snapshots, forks, and the way back: snapshot, list, fork, roll back, and the family tree of it all.

Snapshots are deleted as templates are (`DELETE /templates/{id}`), and a sandbox is created from one as from a template.
Roll-back and tree are ours, E2B has neither.
"""

from __future__ import annotations

from aenv.api import validate
from aenv.api.errors import error_part
from aenv.api.models import (
    PUBLIC_STATE,
    ForkBody,
    ForkResult,
    RollbackBody,
    SandboxBody,
    SnapshotBody,
    SnapshotRequest,
    TreeNodeBody,
)
from aenv.api.names import is_called
from aenv.api.paging import page
from aenv.api.router import Route
from aenv.api.sandboxes import BODY_LIMIT, DEFAULT_TIMEOUT, MAX_PAGE
from aenv.http.message import Request, Response
from aenv.sandbox.service import ForkFailure, SandboxInfo, SandboxService

MAX_CHILDREN = 100  # of one fork; the setting `sandbox.fork_limit` may be lower


class SnapshotHandlers:
    """`max_timeout` is the longest time a child may be given, in seconds."""

    def __init__(self, service: SandboxService, *, max_timeout: int) -> None:
        self._service = service
        self._max_timeout = max_timeout

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/sandboxes/{id}/snapshots", self.create),
            Route("POST", "/sandboxes/{id}/fork", self.fork),
            Route("POST", "/sandboxes/{id}/rollback", self.rollback),
            Route("GET", "/snapshots", self.list_page),
            Route("GET", "/tree", self.tree),
        ]

    async def create(self, request: Request, parameter: str) -> Response:
        sandbox_id = validate.sandbox_id(parameter)
        body = validate.parse_body(await request.read(BODY_LIMIT), SnapshotRequest, optional=True)
        info = await self._service.snapshot(
            sandbox_id, name=validate.snapshot_name(body.name), memory=body.memory is not False
        )
        return Response.json(201, SnapshotBody.of(info))

    async def list_page(self, request: Request, _parameter: str) -> Response:
        source = request.query_one("sandboxID")
        source = validate.sandbox_id(source) if source else None
        name = request.query_one("name")
        name = validate.template_name(name, "name") if name else None
        limit = validate.whole(request.query_one("limit"), "limit", low=1, high=MAX_PAGE, default=MAX_PAGE)
        matching = [
            info
            for info in await self._service.snapshots()
            if (source is None or info.sandbox_id == source) and (name is None or is_called(info, name))
        ]
        found, token = page(
            matching, lambda info: (info.created_at, info.id), limit=limit, token=request.query_one("nextToken")
        )
        headers = [("X-Next-Token", token)] if token else []
        return Response.json(200, [SnapshotBody.of(info) for info in found], headers)

    async def fork(self, request: Request, parameter: str) -> Response:
        sandbox_id = validate.sandbox_id(parameter)
        body = validate.parse_body(await request.read(BODY_LIMIT), ForkBody, optional=True)
        count = validate.count(1 if body.count is None else body.count, "count", low=1, high=MAX_CHILDREN)
        timeout = DEFAULT_TIMEOUT[1] if body.timeout is None else body.timeout
        timeout = validate.seconds(timeout, "timeout", low=1, high=self._max_timeout)
        children = await self._service.fork(sandbox_id, count, timeout)
        return Response.json(201, [_fork_result(child) for child in children])

    async def rollback(self, request: Request, parameter: str) -> Response:
        sandbox_id = validate.sandbox_id(parameter)
        body = validate.parse_body(await request.read(BODY_LIMIT), RollbackBody)
        info = await self._service.rollback(sandbox_id, validate.template_name(body.snapshot_id, "snapshotID"))
        return Response.json(200, SandboxBody.of(info))

    async def tree(self, _request: Request, _parameter: str) -> Response:
        """Parents before children. A sandbox that is not shown elsewhere is not shown here."""
        nodes = await self._service.tree()
        return Response.json(
            200, [TreeNodeBody.of(node) for node in nodes if node.state is None or node.state in PUBLIC_STATE]
        )


def _fork_result(child: SandboxInfo | ForkFailure) -> ForkResult:
    if isinstance(child, ForkFailure):
        return ForkResult(error=error_part(child.error))
    return ForkResult(sandbox=SandboxBody.of(child))
