from __future__ import annotations

from typing import Any

import pytest

from tests.http.support import run, run_asyncio


@pytest.fixture(params=[run, run_asyncio], ids=["uvloop", "asyncio"])
def both(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine; the test is run under each event loop."""
    return request.param
