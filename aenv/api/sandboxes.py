"""The life cycle of sandboxes, for both generations of the E2B SDKs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial

import msgspec

from aenv.api import validate
from aenv.api.idempotency import IdempotencyTable
from aenv.api.models import (
    PUBLIC_STATE,
    ConnectBody,
    ListedSandbox,
    NetworkUpdateBody,
    NewSandbox,
    PauseBody,
    RefreshBody,
    ResumeBody,
    SandboxBody,
    SandboxDetail,
    TimeoutBody,
)
from aenv.api.network import network_update
from aenv.api.paging import page
from aenv.api.router import Handler, Route
from aenv.errors import InvalidInputError, NotFoundError
from aenv.http.message import Request, Response
from aenv.sandbox.service import CreateOptions, OnTimeout, SandboxInfo, SandboxService

BODY_LIMIT = 1 << 20  # bytes; environment and metadata are the largest parts
MAX_PAGE = 100
# Seconds a new or resumed sandbox lives when the client names no time, by generation of the API.
DEFAULT_TIMEOUT = {1: 15, 2: 300}

_STATES = frozenset(PUBLIC_STATE.values())
_ORDERS = {"asc": True, "desc": False}


class SandboxHandlers:
    """`max_timeout` is the longest time a sandbox may be given, in seconds."""

    def __init__(self, service: SandboxService, *, max_timeout: int) -> None:
        self._service = service
        self._max_timeout = max_timeout
        self._creates: IdempotencyTable[SandboxInfo] = IdempotencyTable()

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/sandboxes", partial(self.create, generation=1)),
            Route("POST", "/v2/sandboxes", partial(self.create, generation=2)),
            Route("GET", "/sandboxes", self.list_running),
            Route("GET", "/v2/sandboxes", self.list_page),
            Route("GET", "/sandboxes/{id}", _by_id(self.get)),
            Route("DELETE", "/sandboxes/{id}", _by_id(self.kill)),
            Route("POST", "/sandboxes/{id}/connect", _by_id(partial(self.connect, generation=1))),
            Route("POST", "/v2/sandboxes/{id}/connect", _by_id(partial(self.connect, generation=2))),
            Route("POST", "/sandboxes/{id}/resume", _by_id(self.resume)),
            Route("POST", "/sandboxes/{id}/pause", _by_id(self.pause)),
            Route("POST", "/sandboxes/{id}/timeout", _by_id(self.set_timeout)),
            Route("POST", "/sandboxes/{id}/refreshes", _by_id(self.refresh)),
            Route("PUT", "/sandboxes/{id}/network", _by_id(self.set_network)),
        ]

    async def create(self, request: Request, _parameter: str, *, generation: int) -> Response:
        key = validate.header(request.headers.get_all("Idempotency-Key"), "Idempotency-Key", validate.idempotency_key)
        body = validate.parse_body(await request.read(BODY_LIMIT), NewSandbox)
        options = validate.create_options(
            body,
            generation=generation,
            default_timeout=DEFAULT_TIMEOUT[generation],
            max_timeout=self._max_timeout,
        )
        try:
            if key is None:
                info = await self._service.create(options)
            else:
                info = await self._creates.run(key, _fingerprint(options), partial(self._service.create, options))
        except NotFoundError as error:
            if generation > 1:
                raise
            raise InvalidInputError("templateID", error.message, hint=error.hint) from error
        return Response.json(201, SandboxBody.of(info))

    async def get(self, _request: Request, sandbox_id: str) -> Response:
        return Response.json(200, SandboxDetail.of(await self._visible(sandbox_id)))

    async def kill(self, _request: Request, sandbox_id: str) -> Response:
        await self._service.kill(sandbox_id)
        return Response(204)

    async def connect(self, request: Request, sandbox_id: str, *, generation: int) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), ConnectBody, optional=generation > 1)
        if body.timeout is None and generation == 1:
            raise InvalidInputError("timeout", "is required")
        timeout = self._timeout(DEFAULT_TIMEOUT[generation] if body.timeout is None else body.timeout)
        info, resumed = await self._service.connect(sandbox_id, timeout, memory=body.memory is not False)
        return Response.json(201 if resumed else 200, SandboxBody.of(info))

    async def resume(self, request: Request, sandbox_id: str) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), ResumeBody, optional=True)
        timeout = self._timeout(DEFAULT_TIMEOUT[1] if body.timeout is None else body.timeout)
        on_timeout = None
        if body.auto_pause is not None:
            on_timeout = OnTimeout.PAUSE if body.auto_pause else OnTimeout.KILL
        info = await self._service.resume(sandbox_id, timeout, on_timeout=on_timeout, memory=body.memory is not False)
        return Response.json(201, SandboxBody.of(info))

    async def pause(self, request: Request, sandbox_id: str) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), PauseBody, optional=True)
        await self._service.pause(
            sandbox_id, memory=body.memory is not False, require_healthy=bool(body.require_healthy_guest)
        )
        return Response(204)

    async def set_timeout(self, request: Request, sandbox_id: str) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), TimeoutBody)
        await self._service.set_timeout(sandbox_id, self._timeout(body.timeout))
        return Response(204)

    async def refresh(self, request: Request, sandbox_id: str) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), RefreshBody, optional=True)
        duration = validate.seconds(body.duration or 0, "duration", low=0, high=validate.MAX_REFRESH)
        await self._service.refresh(sandbox_id, max(duration, validate.MIN_REFRESH))
        return Response(204)

    async def set_network(self, request: Request, sandbox_id: str) -> Response:
        body = validate.parse_body(await request.read(BODY_LIMIT), NetworkUpdateBody)
        await self._service.set_network(sandbox_id, network_update(body))
        return Response(204)

    async def list_running(self, request: Request, _parameter: str) -> Response:
        wanted = validate.metadata_filter(request.query_one("metadata"))
        found = [info for info in await self._visible_all() if _is_running(info) and _holds(info, wanted)]
        found.sort(key=_age, reverse=True)
        return Response.json(200, [ListedSandbox.of(info) for info in found])

    async def list_page(self, request: Request, _parameter: str) -> Response:
        state_list = ",".join(value for name, value in request.query if name == "state")
        states = validate.choices(state_list, "state", _STATES)
        wanted = validate.metadata_filter(request.query_one("metadata"))
        since = validate.moment(request.query_one("startedAfter"), "startedAfter")
        limit = validate.whole(request.query_one("limit"), "limit", low=1, high=MAX_PAGE, default=MAX_PAGE)
        ascending = _order(request.query_one("order"))
        template = await self._template_filter(request.query_one("template"))
        everything = await self._visible_all()
        matching = [
            info
            for info in everything
            if PUBLIC_STATE[info.state] in states
            and _holds(info, wanted)
            and (since is None or info.started_at >= since)
            and template(info)
        ]
        found, token = page(matching, _age, limit=limit, ascending=ascending, token=request.query_one("nextToken"))
        headers = [("X-Total-Running", str(sum(map(_is_running, everything))))]
        if token:
            headers.append(("X-Next-Token", token))
        return Response.json(200, [ListedSandbox.of(info) for info in found], headers)

    def _timeout(self, value: int) -> int:
        """Of a sandbox that exists: 0 is allowed and means now."""
        return validate.seconds(value, "timeout", low=0, high=self._max_timeout)

    async def _visible(self, sandbox_id: str) -> SandboxInfo:
        info = await self._service.get(sandbox_id)
        if info.state not in PUBLIC_STATE:
            raise NotFoundError(f"sandbox {sandbox_id} was not found")
        return info

    async def _visible_all(self) -> list[SandboxInfo]:
        return [info for info in await self._service.sandboxes() if info.state in PUBLIC_STATE]

    async def _template_filter(self, name: str | None) -> Callable[[SandboxInfo], bool]:
        """By id or name. A name that means nothing (any more) still finds sandboxes that were made from it."""
        if not name:
            return lambda _info: True
        try:
            template_id = (await self._service.template(validate.template_name(name, "template"))).id
        except NotFoundError:
            template_id = name
        return lambda info: info.template_id == template_id or info.alias == name


def _by_id(handler: Handler) -> Handler:
    """Check the id before the handler sees it."""

    async def checked(request: Request, parameter: str) -> Response:
        return await handler(request, validate.sandbox_id(parameter))

    return checked


def _fingerprint(options: CreateOptions) -> bytes:
    """Equal for requests that ask for the same, however they spell it."""
    return hashlib.sha256(msgspec.json.encode(options, order="deterministic")).digest()


def _age(info: SandboxInfo) -> tuple[datetime, str]:
    return info.started_at, info.id


def _is_running(info: SandboxInfo) -> bool:
    return PUBLIC_STATE[info.state] == "running"


def _holds(info: SandboxInfo, wanted: Mapping[str, str]) -> bool:
    return all(info.metadata.get(key) == value for key, value in wanted.items())


def _order(text: str | None) -> bool | None:
    """True for ascending, None when not said."""
    if not text:
        return None
    if text not in _ORDERS:
        raise InvalidInputError("order", f"expected asc or desc, got {text[:40]!r}")
    return _ORDERS[text]
