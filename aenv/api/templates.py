"""Templates: list, look up, delete."""

from __future__ import annotations

from aenv.api import validate
from aenv.api.models import TemplateAlias, TemplateBody, TemplateWithBuilds
from aenv.api.paging import page
from aenv.api.router import Route
from aenv.http.message import Request, Response
from aenv.sandbox.service import SandboxService

MAX_PAGE = 100


class TemplateHandlers:
    def __init__(self, service: SandboxService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/templates", self.list_all),
            Route("GET", "/v2/templates", self.list_page),
            Route("GET", "/templates/{name}", self.get),
            Route("DELETE", "/templates/{name}", self.delete),
            Route("GET", "/templates/aliases/{name}", self.alias),
        ]

    async def list_all(self, _request: Request, _parameter: str) -> Response:
        templates = sorted(await self._service.templates(), key=lambda info: info.created_at, reverse=True)
        return Response.json(200, [TemplateBody.of(info) for info in templates])

    async def list_page(self, request: Request, _parameter: str) -> Response:
        limit = validate.whole(request.query_one("limit"), "limit", low=1, high=MAX_PAGE, default=MAX_PAGE)
        found, token = page(
            await self._service.templates(),
            lambda info: (info.created_at, info.id),
            limit=limit,
            token=request.query_one("nextToken"),
        )
        headers = [("X-Next-Token", token)] if token else []
        return Response.json(200, [TemplateBody.of(info) for info in found], headers)

    async def get(self, _request: Request, name: str) -> Response:
        info = await self._service.template(validate.template_name(name))
        return Response.json(200, TemplateWithBuilds.of(info))

    async def delete(self, _request: Request, name: str) -> Response:
        await self._service.delete_template(validate.template_name(name))
        return Response(204)

    async def alias(self, _request: Request, name: str) -> Response:
        info = await self._service.template(validate.template_name(name, "alias"))
        return Response.json(200, TemplateAlias(template_id=info.id, public=info.public))
