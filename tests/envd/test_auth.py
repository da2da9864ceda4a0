"""Access token, signatures of file URLs, and what only the host may call."""

from __future__ import annotations

import base64
import getpass
import hashlib
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.envd.client import CONNECT_JSON, JSON, Agent, Answer, frame, shell

ME = getpass.getuser()
UNAUTHORIZED = {
    "code": 401,
    "message": "unauthorized access, please provide a valid access token or method signing if supported",
}
GUARDED = [("GET", "/metrics"), ("GET", "/envs"), ("POST", "/process.Process/List"), ("POST", "/process.Process/Start"),
           ("POST", "/filesystem.Filesystem/Stat"), ("GET", "/none"), ("POST", "/health")]  # fmt: skip


def sign(path: str, operation: str, user: str, token: str, expiration: int | None = None) -> str:
    text = f"{path}:{operation}:{user}:{token}" + ("" if expiration is None else f":{expiration}")
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def fetch(agent: Agent, method: str = "GET", **query: str) -> Answer:
    body, headers = (None, {}) if method == "GET" else (b"new", {"Content-Type": "application/octet-stream"})
    return agent.request(method, "/files?" + urlencode(query), body, headers)


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_token_is_needed(agent: Agent, method: str, path: str) -> None:
    agent.init(accessToken="secret")
    for token in (None, "", "secre", "secret ", "secret2", "SECRET", "s" * 10000):
        headers = {} if token is None else {"X-Access-Token": token}
        answer = agent.request(method, path, b"{}" if method == "POST" else None, JSON | headers)
        if token == "secret ":  # blanks around a header's value are not part of it
            assert answer.status != 401
        else:
            assert (answer.status, answer.json) == (401, UNAUTHORIZED)


def test_token_opens(agent: Agent) -> None:
    agent.init(accessToken="secret")
    agent.token = "secret"
    assert agent.request("GET", "/metrics").status == 200
    assert agent.call("List", {}) == {"processes": []}
    assert agent.run("true").ended is not None


def test_token_is_replaced_and_cleared(agent: Agent) -> None:
    agent.init(accessToken="one")
    agent.init(accessToken="two")
    assert agent.request("GET", "/envs", headers={"X-Access-Token": "one"}).status == 401
    assert agent.request("GET", "/envs", headers={"X-Access-Token": "two"}).status == 200
    for empty in ({"accessToken": ""}, {"accessToken": None}, {}):
        agent.init(accessToken="two")
        assert agent.request("GET", "/envs").status == 401
        agent.init(envVars={}, **empty)
        assert agent.request("GET", "/envs").status == 200


def test_health_and_preflight_need_no_token(agent: Agent) -> None:
    agent.init(accessToken="secret")
    assert agent.request("GET", "/health").status == 204
    assert agent.request("OPTIONS", "/process.Process/List").status == 204


def test_refused_stream_is_plain_http(agent: Agent) -> None:
    agent.init(accessToken="secret")
    answer = agent.request("POST", "/process.Process/Start", frame(shell("true")), CONNECT_JSON)
    assert (answer.status, answer.json) == (401, UNAUTHORIZED)


# ---- signatures ----


@pytest.fixture
def target(agent: Agent, tmp_path: Path) -> str:
    agent.init(accessToken="secret")
    file = tmp_path / "file"
    file.write_text("old")
    return str(file)


def test_signature_opens_its_path_only(agent: Agent, target: str) -> None:
    signature = sign(target, "read", ME, "secret")
    assert fetch(agent, path=target, username=ME, signature=signature).body == b"old"
    for other in (
        {"path": target + "2", "username": ME}, {"path": target, "username": "daemon"}, {"path": target},
        {"path": "/." + target, "username": ME},
    ):  # fmt: skip
        answer = fetch(agent, signature=signature, **other)
        assert (answer.status, answer.json) == (401, {"code": 401, "message": "invalid signature"})


def test_signature_opens_its_operation_only(agent: Agent, target: str) -> None:
    read, write = (sign(target, operation, ME, "secret") for operation in ("read", "write"))
    assert fetch(agent, "POST", path=target, username=ME, signature=read).status == 401
    assert fetch(agent, "GET", path=target, username=ME, signature=write).status == 401
    assert fetch(agent, "POST", path=target, username=ME, signature=write).status == 200
    assert Path(target).read_text() == "new"


def test_signature_without_user(agent: Agent, target: str) -> None:
    assert fetch(agent, path=target, signature=sign(target, "read", "", "secret")).body == b"old"


def test_expiration(agent: Agent, target: str) -> None:
    for seconds, status in ((1000, 200), (-1000, 401)):
        at = int(time.time()) + seconds
        signature = sign(target, "read", "", "secret", at)
        answer = fetch(agent, path=target, signature=signature, signature_expiration=str(at))
        assert answer.status == status
    assert answer.json == {"code": 401, "message": "signature is already expired"}
    signature = sign(target, "read", "", "secret", at)
    later = fetch(agent, path=target, signature=signature, signature_expiration=str(at + 5000))
    assert later.json == {"code": 401, "message": "invalid signature"}
    assert fetch(agent, path=target, signature=signature).json["message"] == "invalid signature"


@pytest.mark.parametrize("value", ["x", "", "12x", "9" * 40, "-1"])
def test_bad_expiration(agent: Agent, target: str, value: str) -> None:
    text = f"{target}:read::secret:{value}"
    signature = "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    answer = fetch(agent, path=target, signature=signature, signature_expiration=value)
    assert (answer.status, answer.json["message"]) == (401, "signature is already expired")


def test_form_of_a_signature(agent: Agent, target: str) -> None:
    good = sign(target, "read", "", "secret")
    for bad in ("", "v1_", good[3:], good + "=", "v2_" + good[3:], good[:-1], good + "A", "v1_" + "A" * 5000):
        answer = fetch(agent, path=target, signature=bad)
        assert (answer.status, answer.json["message"]) == (401, "invalid signature"), bad
    assert fetch(agent, path=target).json["message"] == "missing signature query parameter"


def test_wrong_token_is_not_rescued_by_a_signature(agent: Agent, target: str) -> None:
    query = urlencode({"path": target, "signature": sign(target, "read", "", "secret")})
    answer = agent.request("GET", f"/files?{query}", headers={"X-Access-Token": "wrong"})
    assert (answer.status, answer.json) == (401, UNAUTHORIZED)


def test_signature_opens_nothing_else(agent: Agent, target: str) -> None:
    query = urlencode({"signature": sign("", "read", "", "secret")})
    assert agent.request("GET", f"/metrics?{query}").status == 401


# ---- the host ----


def test_only_the_host_calls_what_is_the_hosts(envd_binary: Path, tmp_path: Path) -> None:
    agent = Agent(envd_binary, host=False, stderr=tmp_path / "log")
    for method, path in (("POST", "/init"), ("GET", "/dial?port=1"), ("POST", "/sync")):
        answer = agent.request(method, path, b'{"accessToken": "x"}' if method == "POST" else None)
        assert (answer.status, answer.json["code"]) == (403, 403)
    assert agent.request("GET", "/envs").status == 200
    agent.stop()


def test_host_addresses_over_ipv6_sockets(envd_binary: Path, tmp_path: Path) -> None:
    """A socket for both families sees IPv4 peers as mapped addresses."""
    for bind in ("::", "0.0.0.0"):
        agent = Agent(envd_binary, "--bind", bind, stderr=tmp_path / "log")
        assert agent.init(accessToken="x").status == 204
        agent.stop()
