"""Metrics and logs of sandboxes."""

from __future__ import annotations

from aenv.api import validate
from aenv.api.models import LogEntryBody, LogLine, LogsBody, LogsV2Body, MetricBody, MetricsBySandbox
from aenv.api.router import Route
from aenv.errors import InvalidInputError, NotFoundError
from aenv.http.message import Request, Response
from aenv.observe.logs import LogDirection, LogLevel, LogQuery
from aenv.sandbox.service import SandboxService

MAX_LOG_PAGE = 1000
MAX_SANDBOXES = 100  # of one request for many sandboxes' metrics


class TelemetryHandlers:
    def __init__(self, service: SandboxService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/sandboxes/metrics", self.latest_metrics),
            Route("GET", "/sandboxes/{id}/metrics", self.metrics),
            Route("GET", "/sandboxes/{id}/logs", self.logs),
            Route("GET", "/v2/sandboxes/{id}/logs", self.logs_v2),
        ]

    async def metrics(self, request: Request, sandbox_id: str) -> Response:
        high = validate.MAX_MILLISECONDS // 1000
        start = validate.whole(request.query_one("start"), "start", low=0, high=high, default=None)
        end = validate.whole(request.query_one("end"), "end", low=0, high=high, default=None)
        if start is not None and end is not None and start > end:
            raise InvalidInputError("start", "is after end")
        # The SDKs cut their times to whole seconds, so the last second counts to its end.
        until = None if end is None else validate.from_unix(end * 1000 + 999, 1000)
        points = await self._service.metrics(validate.sandbox_id(sandbox_id), validate.from_unix(start), until)
        return Response.json(200, [MetricBody.of(point) for point in points])

    async def latest_metrics(self, request: Request, _parameter: str) -> Response:
        """The last sample of each of the sandboxes; those without one, or that are gone, are left out."""
        joined = ",".join(value for name, value in request.query if name == "sandbox_ids")
        ids = [validate.sandbox_id(part) for part in dict.fromkeys(joined.split(",")) if part]
        if not 1 <= len(ids) <= MAX_SANDBOXES:
            raise InvalidInputError("sandbox_ids", f"expected 1 to {MAX_SANDBOXES} ids")
        latest = {}
        for sandbox_id in ids:
            try:
                point = await self._service.latest_metric(sandbox_id)
            except NotFoundError:
                continue
            if point is not None:
                latest[sandbox_id] = MetricBody.of(point)
        return Response.json(200, MetricsBySandbox(latest))

    async def logs(self, request: Request, sandbox_id: str) -> Response:
        query = LogQuery(
            cursor=validate.from_unix(_milliseconds(request, "start"), 1000),
            # The first generation knows no upper limit.
            limit=min(_limit(request, high=2**31 - 1), MAX_LOG_PAGE),
        )
        entries = await self._service.logs(validate.sandbox_id(sandbox_id), query)
        return Response.json(
            200,
            LogsBody(
                logs=[LogLine.of(entry) for entry in entries],
                log_entries=[LogEntryBody.of(entry) for entry in entries],
            ),
        )

    async def logs_v2(self, request: Request, sandbox_id: str) -> Response:
        query = LogQuery(
            cursor=validate.from_unix(_milliseconds(request, "cursor"), 1000),
            limit=_limit(request, high=MAX_LOG_PAGE),
            direction=validate.choice(request.query_one("direction"), "direction", LogDirection, LogDirection.FORWARD),
            level=validate.choice(request.query_one("level"), "level", LogLevel, LogLevel.DEBUG),
            search=validate.search(request.query_one("search")),
        )
        entries = await self._service.logs(validate.sandbox_id(sandbox_id), query)
        return Response.json(200, LogsV2Body([LogEntryBody.of(entry) for entry in entries]))


def _milliseconds(request: Request, name: str) -> int | None:
    return validate.whole(request.query_one(name), name, low=0, high=validate.MAX_MILLISECONDS, default=None)


def _limit(request: Request, *, high: int) -> int:
    return validate.whole(request.query_one("limit"), "limit", low=0, high=high, default=MAX_LOG_PAGE)
