"""The control plane as a function from request to answer, without a server around it."""

from __future__ import annotations

import asyncio
import json

import pytest

from aenv.api.app import Api
from aenv.api.auth import ApiKey
from aenv.http.message import ClientDisconnectedError, Headers, Request, Response
from tests.api.conftest import KEY
from tests.api.fake import FakeService


def ask(service: FakeService, method: str, target: str) -> Response:
    api = Api(service, ApiKey(KEY), max_timeout=60)
    return asyncio.run(api(Request(method, target, Headers([("x-api-key", KEY)]))))


def test_a_bug_becomes_an_answer() -> None:
    service = FakeService()
    service.failure = LookupError("secret")
    response = ask(service, "GET", "/sandboxes")
    assert response.status == 500
    assert isinstance(response.body, bytes)
    assert json.loads(response.body)["code"] == 500
    assert b"secret" not in response.body


def test_a_client_that_left_gets_no_answer() -> None:
    service = FakeService()
    service.failure = ClientDisconnectedError()
    with pytest.raises(ClientDisconnectedError):
        ask(service, "GET", "/sandboxes")


def test_body_that_is_absent() -> None:
    response = ask(FakeService(), "POST", "/v2/sandboxes")
    assert response.status == 400
