"""The control plane as one handler: find the route, check the key, answer, and turn every error into JSON."""

from __future__ import annotations

import logging

from aenv.api import health
from aenv.api.auth import ApiKey
from aenv.api.errors import error_body, error_response
from aenv.api.router import Router
from aenv.api.sandboxes import SandboxHandlers
from aenv.api.snapshots import SnapshotHandlers
from aenv.api.telemetry import TelemetryHandlers
from aenv.api.templates import TemplateHandlers
from aenv.errors import AenvError
from aenv.http.message import ClientDisconnectedError, HttpError, Request, Response
from aenv.sandbox.service import SandboxService

log = logging.getLogger(__name__)


class Api:
    """Answers every request it is given; raises only `ClientDisconnectedError`, when nobody is left to answer to."""

    def __init__(self, service: SandboxService, key: ApiKey, *, max_timeout: int) -> None:
        """`max_timeout` is the longest time a sandbox may be given, in seconds."""
        self._key = key
        self._router = Router(
            [
                *health.routes(),
                *SandboxHandlers(service, max_timeout=max_timeout).routes(),
                *SnapshotHandlers(service, max_timeout=max_timeout).routes(),
                *TelemetryHandlers(service).routes(),
                *TemplateHandlers(service).routes(),
            ]
        )

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ClientDisconnectedError:
            raise
        except AenvError as error:
            return error_response(error)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return error_body(500, "internal error; the daemon's log has the details")

    async def _answer(self, request: Request) -> Response:
        """Without the right key a client does not learn which paths exist."""
        try:
            route, parameter = self._router.find(request.method, request.segments)
        except HttpError:
            self._key.check(request)
            raise
        if not route.public:
            self._key.check(request)
        return await route.handler(request, parameter)
