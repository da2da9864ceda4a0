"""The table of methods and paths.

A template like `/sandboxes/{id}/pause` is matched against the segments of a path, which were split before they were
percent-decoded: an id with an encoded slash stays one segment. A fixed segment wins over a parameter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from aenv.http.message import HttpError, Request, Response

Handler = Callable[[Request, str], Awaitable[Response]]
"""A handler gets the request and the value of the path's parameter (empty when it has none)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row. A template has at most one `{parameter}`. `public` routes need no API key."""

    method: str
    template: str
    handler: Handler
    public: bool = False


@dataclass(slots=True)
class _Node:
    fixed: dict[str, _Node] = field(default_factory=dict)
    parameter: _Node | None = None
    routes: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds the route of a request. Raises ValueError when built from a table that contradicts itself."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        parameters = 0
        for segment in route.template.removeprefix("/").split("/"):
            if segment.startswith("{"):
                parameters += 1
                node.parameter = node.parameter or _Node()
                node = node.parameter
            else:
                node = node.fixed.setdefault(segment, _Node())
        if route.method in node.routes or parameters > 1:
            raise ValueError(f"{route.method} {route.template}: given twice or more than one parameter")
        node.routes[route.method] = route

    def find(self, method: str, segments: tuple[str, ...]) -> tuple[Route, str]:
        """The route and the parameter. Raises `HttpError` 404 for a path and 405 for a method that is not served."""
        found = self._walk(self._root, segments, "")
        if found is None:
            raise HttpError(404, "no such path")
        node, parameter = found
        route = node.routes.get(method)
        if route is None:
            allowed = ", ".join(sorted(node.routes))
            raise HttpError(405, f"method {method} is not allowed here", headers=[("Allow", allowed)])
        return route, parameter

    def _walk(self, node: _Node, segments: tuple[str, ...], parameter: str) -> tuple[_Node, str] | None:
        if not segments:
            return (node, parameter) if node.routes else None
        first, rest = segments[0], segments[1:]
        if first in node.fixed:
            found = self._walk(node.fixed[first], rest, parameter)
            if found is not None:
                return found
        if node.parameter is not None and first:
            return self._walk(node.parameter, rest, first)
        return None
