"""A daemon with one kind of guest: its programs are methods here, and everything that is asked is noted."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.daemon import Daemon
from aenv.http.message import Request, Response
from aenv.http.server import Server
from tests.agent.conftest import end, frame

KEY = "e2b_" + "0" * 40
ROOT = Path(__file__).parents[2]
AENV = (sys.executable, "-m", "aenv.cli.main")
BOX = {
    "sandboxID": "i1", "templateID": "t1", "alias": "base", "clientID": "local", "state": "running",
    "startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z", "envdAccessToken": "secret",
    "metadata": {"user": "7"},
}  # fmt: skip


class FakeDaemon:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.asked: list[tuple[str, Any]] = []  # of envd
        self.headers: list[dict[str, str]] = []
        self.boxes: list[dict[str, Any]] = [BOX]
        self.answers: dict[str, Response] = {}  # "METHOD /path" → what to answer instead
        self.input: asyncio.Queue[tuple[str, Any]]
        self.seen = threading.Condition()

    async def __call__(self, request: Request) -> Response:
        body = await request.read(1 << 24)
        if request.headers.get("E2b-Sandbox-Id"):
            self.headers.append({k.lower(): v for k, v in request.headers})
            return await self.envd(request.path.rpartition("/")[2], body)
        self.note(self.calls, (request.method, request.target, json.loads(body) if body else None))
        if request.headers.get("X-API-Key") != KEY:
            return Response.error(401, "the API key is not valid")
        if (answer := self.answers.get(f"{request.method} {request.path}")) is not None:
            return answer
        match request.method, request.segments:
            case "GET", ("v2", "sandboxes"):
                at = int(request.query_one("nextToken") or 0)
                more = [("X-Next-Token", str(at + 1))] if at + 1 < len(self.boxes) else []
                return Response.json(200, self.boxes[at : at + 1], more)
            case "POST", ("v2", "sandboxes"):
                return Response.json(201, BOX)
            case "POST", ("v2", "sandboxes", "i1", "connect"):
                return Response.json(200, BOX)
            case ("POST", ("sandboxes", "i1", "pause")) | ("DELETE", ("sandboxes", "i1")):
                return Response(204)
        return Response.error(404, f"sandbox {request.segments[-1]} does not exist")

    def note(self, where: list[Any], what: Any) -> None:
        with self.seen:
            where.append(what)
            self.seen.notify_all()

    def wait_asked(self, method: str, count: int = 1) -> list[Any]:
        """What envd was asked by `method`, after it was asked `count` times."""

        def found() -> list[Any]:
            return [body for name, body in self.asked if name == method]

        with self.seen:
            assert self.seen.wait_for(lambda: len(found()) >= count, 20), (method, self.asked)
            return found()

    async def envd(self, method: str, body: bytes) -> Response:
        if method == "Start":
            request = json.loads(body[5:])
            self.input = asyncio.Queue()
            self.note(self.asked, (method, request))
            return Response(200, self.run(request), [("Content-Type", "application/connect+json")])
        asked = json.loads(body)
        self.note(self.asked, (method, asked))
        await self.input.put((method, asked))
        return Response.json(200, {})

    async def run(self, request: dict[str, Any]) -> AsyncIterator[bytes]:
        command, arguments = request["process"]["cmd"], request["process"]["args"]
        channel = "pty" if "pty" in request else "stdout"
        yield frame({"event": {"keepalive": {}}})
        if command == "missing":
            yield end({"error": {"code": "not_found", "message": "missing: no such program"}})
            return
        yield frame({"event": {"start": {"pid": 7}}})
        status: dict[str, Any] = {"exitCode": 0, "exited": True, "status": "exit status 0"}
        if command == "say":
            for name, text in zip(("stdout", "stderr"), arguments, strict=False):
                yield data(name, os.fsencode(text))
        elif command == "exit":
            status = {"exitCode": int(arguments[0]), "status": f"exit status {arguments[0]}"}
        elif command == "die":
            status = {"exitCode": -1, "exited": False, "status": f"signal: {arguments[0]}"}
        elif command == "cut":
            return
        elif command == "flood":
            for _ in range(int(arguments[0])):
                yield data(channel, b"x" * 32768)
        elif command == "cat":
            while (asked := await self.input.get())[0] != "CloseStdin":
                yield data("stdout", base64.b64decode(asked[1]["input"]["stdin"]))
        elif command == "wait":
            while (await self.input.get())[0] != "SendSignal":
                pass
            status = {"exitCode": -1, "exited": False, "status": "signal: terminated"}
        elif command == "/bin/bash":
            yield data("pty", b"prompt> ")
            while True:
                name, asked = await self.input.get()
                if name == "SendSignal":
                    status = {"exitCode": -1, "exited": False, "status": "signal: killed"}
                    break
                if name == "SendInput":
                    keys = base64.b64decode(asked["input"]["pty"])
                    yield data("pty", b"<" + keys + b">")
                    if b"\x04" in keys:
                        status = {"exitCode": 7, "exited": True, "status": "exit status 7"}
                        break
        yield frame({"event": {"end": status}})
        yield end()


def data(channel: str, content: bytes) -> bytes:
    return frame({"event": {"data": {channel: base64.b64encode(content).decode()}}})


class Fixture:
    """The daemon, its home, and the command line against it."""

    def __init__(self, fake: FakeDaemon, home: Path, url: str) -> None:
        self.fake = fake
        self.home = home
        self.url = url
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_", "PYTHON"))}
        self.environ = clean | {"AENV_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"}

    def aenv(self, *words: str, stdin: bytes | None = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*AENV, *words], input=stdin, capture_output=True, env=self.environ | environ, timeout=60, check=False
        )

    def refused(self, *words: str, hint: bool | None = None, **environ: str) -> str:
        """Expect one line of error, perhaps a hint, exit status 1 and no traceback; gives the text."""
        done = self.aenv(*words, **environ)
        text = done.stderr.decode()
        lines = text.splitlines()
        assert done.returncode == 1, text
        assert lines[0].startswith("aenv: "), text
        assert len(lines) <= 2, text
        if len(lines) == 2:
            assert lines[1].startswith("hint: "), text
        if hint is not None:
            assert (len(lines) == 2) is hint, text
        assert done.stdout == b""
        return text


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Fixture]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fake = FakeDaemon()
    server = asyncio.run_coroutine_threadsafe(Server.start(fake), loop).result(30)
    url = f"http://127.0.0.1:{server.port}"
    home = tmp_path / "home"
    (home / "secrets").mkdir(parents=True)
    (home / "secrets/api-key").write_text(KEY + "\n")
    Daemon(url, os.getpid()).write(home)
    try:
        yield Fixture(fake, home, url)
    finally:
        asyncio.run_coroutine_threadsafe(server.close(1), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
