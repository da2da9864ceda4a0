"""`GET /health`: the daemon answers. Needs no key, so that a load balancer can ask."""

from __future__ import annotations

from aenv.api.router import Route
from aenv.http.message import Request, Response


async def health(_request: Request, _parameter: str) -> Response:
    return Response(204)


def routes() -> list[Route]:
    return [Route("GET", "/health", health, public=True)]
