from __future__ import annotations

import pytest

from aenv.api.router import Route, Router
from aenv.http.message import HttpError, Request, Response


async def handler(_request: Request, _parameter: str) -> Response:
    return Response(204)


ROUTER = Router(
    [
        Route("GET", "/sandboxes", handler),
        Route("GET", "/sandboxes/{id}", handler),
        Route("DELETE", "/sandboxes/{id}", handler),
        Route("GET", "/sandboxes/metrics", handler),
        Route("GET", "/sandboxes/{id}/logs", handler),
        Route("GET", "/templates/aliases/{name}", handler),
        Route("GET", "/templates/{name}", handler),
    ]
)


@pytest.mark.parametrize(
    ("segments", "template", "parameter"),
    [
        (("sandboxes",), "/sandboxes", ""),
        (("sandboxes", "abc"), "/sandboxes/{id}", "abc"),
        (("sandboxes", "metrics"), "/sandboxes/metrics", ""),
        (("sandboxes", "metrics", "logs"), "/sandboxes/{id}/logs", "metrics"),
        (("templates", "aliases"), "/templates/{name}", "aliases"),
        (("templates", "aliases", "ns/name:tag"), "/templates/aliases/{name}", "ns/name:tag"),
    ],
)
def test_found(segments: tuple[str, ...], template: str, parameter: str) -> None:
    route, value = ROUTER.find("GET", segments)
    assert (route.template, value) == (template, parameter)


@pytest.mark.parametrize(
    "segments", [(), ("",), ("sandboxes", ""), ("sandboxes", "a", "b"), ("sandboxes", "", "logs"), ("Sandboxes",)]
)
def test_unknown_path(segments: tuple[str, ...]) -> None:
    with pytest.raises(HttpError) as caught:
        ROUTER.find("GET", segments)
    assert caught.value.status == 404


def test_wrong_method_tells_the_right_ones() -> None:
    with pytest.raises(HttpError) as caught:
        ROUTER.find("PATCH", ("sandboxes", "abc"))
    assert caught.value.status == 405
    assert caught.value.headers == (("Allow", "DELETE, GET"),)


def test_method_of_a_fixed_path_does_not_leak_to_the_parameter() -> None:
    """DELETE /sandboxes/metrics must not delete a sandbox named metrics."""
    with pytest.raises(HttpError) as caught:
        ROUTER.find("DELETE", ("sandboxes", "metrics"))
    assert caught.value.status == 405


@pytest.mark.parametrize("template", ["/sandboxes", "/a/{x}/{y}"])
def test_contradicting_table(template: str) -> None:
    with pytest.raises(ValueError, match="GET"):
        Router([Route("GET", "/sandboxes", handler), Route("GET", template, handler)])
