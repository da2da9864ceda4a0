"""Paths, queries, headers, JSON."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from aenv.http.body import Body
from aenv.http.message import Headers, HttpError, Request, Response, decode_json


def request(target: str) -> Request:
    return Request("GET", target, Headers())


@pytest.mark.parametrize(
    ("target", "segments"),
    [
        ("/", ("",)),
        ("/a/b", ("a", "b")),
        ("/a%2Fb/c", ("a/b", "c")),
        ("/ns%2Fname%3Atag?x=/y", ("ns/name:tag",)),
        ("//a/", ("", "a", "")),
        ("/%2e%2e/%00", ("..", "\0")),
        ("/%zz/%C3%A9", ("%zz", "é")),
    ],
)
def test_segments_are_split_before_they_are_decoded(target: str, segments: tuple[str, ...]) -> None:
    assert request(target).segments == segments


def test_query() -> None:
    seen = request("/p?a=1&b=x+y%26&a=2&&c&=d&e=f=g")
    assert seen.query == [("a", "1"), ("b", "x y&"), ("a", "2"), ("c", ""), ("", "d"), ("e", "f=g")]
    assert (seen.query_one("b"), seen.query_one("zz"), seen.query_one("c")) == ("x y&", None, "")
    with pytest.raises(HttpError, match="a: given more than once"):
        seen.query_one("a")
    assert (seen.path, seen.target) == ("/p", "/p?a=1&b=x+y%26&a=2&&c&=d&e=f=g")


@pytest.mark.parametrize("target", ["/%ff", "/a?x=%ff", "/a?%ff=x"])
def test_text_that_is_not_utf8_is_refused(target: str) -> None:
    seen = request(target)
    with pytest.raises(HttpError, match="UTF-8") as caught:
        _ = (seen.segments, seen.query)
    assert caught.value.status == 400


@pytest.mark.parametrize("target", ["/", "/?", "/a?", "/a??", "/a?b", "*"])
def test_target_is_kept_as_it_was_sent(target: str) -> None:
    assert request(target).target == target


def test_headers_keep_order_case_and_duplicates() -> None:
    headers = Headers([("X-A", "1"), ("x-a", "2"), ("B", "3, Four ,,5")])
    assert list(headers) == [("X-A", "1"), ("x-a", "2"), ("B", "3, Four ,,5")]
    assert (headers.get("x-A"), headers.get_all("X-a"), headers.get("c"), "b" in headers) == (
        "1",
        ["1", "2"],
        None,
        True,
    )
    assert headers.tokens("b") == ["3", "four", "5"]
    headers.set("X-a", "9")
    headers.add("C", "d")
    assert (headers.get_all("x-a"), headers.get("c"), len(headers)) == (["9"], "d", 3)
    headers.remove("b")
    assert "B" not in headers


class Model(msgspec.Struct):
    name: str
    timeout: int = 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "body: not valid JSON"),
        (b"{", "body: not valid JSON"),
        (b"\xff", "body: not valid JSON"),
        (b"[" * 100_000, "body: not valid JSON|Expected"),
        (b"[]", "Expected `object`"),
        (b'{"name": "x", "timeout": "y"}', "^timeout: Expected `int`"),
        (b'{"timeout": 1}', "missing required field `name`"),
    ],
)
def test_bad_json_names_the_field(data: bytes, message: str) -> None:
    with pytest.raises(HttpError, match=message) as caught:
        decode_json(data, Model)
    assert caught.value.status == 400


def test_good_json() -> None:
    assert decode_json(b'{"name": "x", "more": 1}', Model) == Model("x", 3)
    response = Response.error(404, "sandbox not found")
    assert response.body == b'{"code":404,"message":"sandbox not found"}'
    assert response.headers.get("content-type") == "application/json"


def test_disconnect_callbacks_run_once_even_when_late() -> None:
    calls: list[int] = []
    seen = request("/")
    seen.on_disconnect(lambda: calls.append(1))
    seen.notify_disconnect()
    seen.notify_disconnect()
    seen.on_disconnect(lambda: calls.append(2))
    assert calls == [1, 2]


def test_body_has_one_reader_and_ends_with_its_error() -> None:
    async def main() -> None:
        flows: list[bool] = []
        body = Body(10_000_000, flows.append)
        body.feed([b"x" * 600_000])
        assert flows == [True]
        assert len(await anext(body)) == 600_000
        assert flows == [True, False]
        first = asyncio.ensure_future(body.read(10_000_000))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(body)
        body.fail(HttpError(400, "broken"))
        with pytest.raises(HttpError, match="broken"):
            await first

    asyncio.run(main())
