from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from aenv.api.auth import ApiKey, load_or_create_key
from aenv.errors import InvalidInputError
from tests.api.conftest import KEY, Node


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/templates", "/no/such/path", "/"])
def test_no_key(node: Node, path: str) -> None:
    assert "missing" in node.refused(401, "GET", path, key=False)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-API-Key": ""},
        {"X-API-Key": KEY[:-1]},
        {"X-API-Key": KEY + "0"},
        {"X-API-Key": KEY.upper()},
        {"X-API-Key": "é"},
        {"Authorization": f"Bearer {KEY}"},
        {"X-Access-Token": KEY},
        {"E2B-Traffic-Access-Token": KEY},
        {"X-Team-Key": KEY},
        {"Cookie": f"X-API-Key={KEY}"},
    ],
)
def test_wrong_key(node: Node, headers: dict[str, str]) -> None:
    node.refused(401, "GET", "/sandboxes", headers=headers, key=False)
    node.refused(401, "GET", f"/sandboxes?X-API-Key={KEY}", headers=headers, key=False)


@pytest.mark.parametrize("second", [KEY, "wrong"])
def test_two_keys_are_refused_even_when_right(node: Node, second: str) -> None:
    import http.client
    import json

    for pair in ((KEY, second), (second, KEY)):
        connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
        connection.putrequest("GET", "/sandboxes")
        for value in pair:
            connection.putheader("X-API-Key", value)
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 401
        assert json.loads(response.read())["code"] == 401
        connection.close()


def test_tokens_of_a_sandbox_do_not_open_the_control_plane(node: Node) -> None:
    info = node.service.add(envd_token="envd-secret", traffic_token="traffic-secret")
    for token in (info.envd_token, info.traffic_token):
        node.refused(401, "GET", "/sandboxes", headers={"X-API-Key": str(token)}, key=False)


def test_right_key(node: Node) -> None:
    assert node.call("GET", "/sandboxes").status == 200
    assert node.call("GET", "/sandboxes", headers={"x-api-KEY": KEY}, key=False).status == 200


def test_health_needs_no_key(node: Node) -> None:
    for key in (True, False):
        answer = node.call("GET", "/health", key=key)
        assert (answer.status, answer.body) == (204, b"")


def test_new_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "api-key"
    old = os.umask(0)
    try:
        key = load_or_create_key(path)
    finally:
        os.umask(old)
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_key(path) == key
    assert [entry.name for entry in path.parent.iterdir()] == ["api-key"]
    ApiKey(key)


def test_many_at_once_agree_on_one_key(tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    keys: list[str] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        keys.append(load_or_create_key(path))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["api-key"]


def test_a_key_made_in_the_meantime_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "api-key"
    path.write_text(KEY)
    path.chmod(0o600)
    monkeypatch.setattr(Path, "exists", lambda _self: False)  # as it was when the other process looked
    assert load_or_create_key(path) == KEY
    assert [entry.name for entry in tmp_path.iterdir()] == ["api-key"]


@pytest.mark.parametrize("content", [b"", b"\n", b"secret", b"e2b_XYZ", b"e2b_", b"e2b_abc\n", b"\xff\xfe"])
def test_file_that_holds_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "api-key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidInputError, match="does not hold an API key"):
        load_or_create_key(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_file_that_others_may_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "api-key"
    path.write_text(KEY)
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        load_or_create_key(path)


def test_weak_key_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="API key"):
        ApiKey("e2b_00")
