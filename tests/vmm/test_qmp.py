"""The QMP client against a server that behaves and one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aenv.errors import VmmError
from aenv.vmm import qmp
from aenv.vmm.qmp import Qmp

GREETING = b'{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}}, "capabilities": []}}\r\n'


class Server:
    """Plays a VMM: `script(connection, message)` gives the bytes to answer with, None to close."""

    def __init__(self, folder: Path, script: Callable[[dict[str, Any], list[int]], bytes | None], greeting=GREETING):
        self.script = script
        self.greeting = greeting
        self.listener = qmp.bind(folder, "s")
        self.listener.setblocking(False)
        self.path = folder / "s"
        self.received_fds: list[int] = []

    async def __aenter__(self) -> Server:
        self.task = asyncio.create_task(self.serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        self.listener.close()
        for fd in self.received_fds:
            os.close(fd)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self.listener)
        with connection:
            await loop.sock_sendall(connection, self.greeting)
            text = ""
            while True:
                readable = loop.create_future()
                loop.add_reader(connection, lambda r=readable: r.done() or r.set_result(None))
                try:
                    await readable
                finally:
                    loop.remove_reader(connection)
                data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
                self.received_fds += fds
                if not data:
                    return
                text += data.decode()  # the client's messages are far smaller than a read
                while text.strip():
                    message, end = json.JSONDecoder().raw_decode(text)
                    text = text[end:]
                    answer = self.script(message, fds)
                    if answer is None:
                        return
                    await loop.sock_sendall(connection, answer)


def ok(message: dict[str, Any], value: Any = None) -> bytes:
    return json.dumps({"return": {} if value is None else value, "id": message["id"]}).encode() + b"\r\n"


def script(**answers: Any) -> Callable[[dict[str, Any], list[int]], bytes | None]:
    """Answers by command; a command not named gets an empty answer."""

    def answer(message: dict[str, Any], _: list[int]) -> bytes | None:
        value = answers.get(message["execute"].replace("-", "_"), ok)
        return value(message) if callable(value) else value

    return answer


class Watcher:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0

    def connect(self, path: Path, timeout: float = 5) -> Awaitable[Qmp]:
        return Qmp.connect(path, on_event=lambda *e: self.events.append(e), on_close=self.on_close, timeout=timeout)

    def on_close(self) -> None:
        self.closed += 1


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest):
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def call(main: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())  # type: ignore[arg-type]

    return call


def test_commands_events_and_descriptors(run, tmp_path: Path):
    async def main() -> None:
        event = b'{"event": "STOP", "data": {"a": 1}, "timestamp": {"seconds": 1, "microseconds": 2}}\r\n'
        answers = script(
            stop=lambda m: event + ok(m),
            value=lambda m: ok(m, m.get("arguments", {})),
            refuse=lambda m: b'{"error": {"class": "GenericError", "desc": "no way"}, "id": %d}\n' % m["id"],
        )
        watcher = Watcher()
        async with Server(tmp_path, answers) as server:
            client = await watcher.connect(server.path)
            await client.execute("stop")
            assert watcher.events == [("STOP", {"a": 1})]
            assert await client.execute("value", {"x": [1, "ü"]}) == {"x": [1, "ü"]}
            many = await asyncio.gather(*(client.execute("value", {"n": n}) for n in range(50)))
            assert many == [{"n": n} for n in range(50)]
            with pytest.raises(VmmError, match="refuse: no way"):
                await client.execute("refuse")
            with pytest.raises(VmmError, match=r"value: unexpected answer: Expected `str`"):
                await client.query("value", str)
            with open(tmp_path / "s2", "w") as file:
                await client.execute("getfd", fd=file.fileno())
                assert [os.fstat(fd).st_ino for fd in server.received_fds] == [os.fstat(file.fileno()).st_ino]
            client.close()
            client.close()
            assert client.closed
            with pytest.raises(VmmError, match="stop: the connection was closed"):
                await client.execute("stop")
            assert watcher.closed == 0, "on_close is for the other side's doing"

    run(main)


def test_answers_in_pieces(run, tmp_path: Path):
    async def main() -> None:
        big = "x" * 300_000
        async with Server(tmp_path, script(value=lambda m: ok(m, big))) as server:
            client = await Watcher().connect(server.path)
            assert await client.execute("value") == big
            client.close()

    run(main)


def test_silence_times_out_and_a_late_answer_is_dropped(run, tmp_path: Path):
    async def main() -> None:
        late: list[bytes] = []

        def silent(message: dict[str, Any]) -> bytes:
            late.append(ok(message, "late"))
            return b""

        async with Server(tmp_path, script(silent=silent, value=lambda m: late.pop() + ok(m, "good"))) as server:
            client = await Watcher().connect(server.path)
            with pytest.raises(VmmError, match=r"silent: no answer within 0\.05 s"):
                await client.execute("silent", timeout=0.05)
            assert await client.execute("value") == "good"
            client.close()

    run(main)


BROKEN = {
    "close": (None, "closed the connection"),
    "no-json": (b"hello\n", "broke the protocol"),
    "not-utf8": (b'{"event": "\xff"}\n', "broke the protocol"),
    "array": (b"[]\n", "broke the protocol"),
    "event-type": (b'{"event": 5}\n', "broke the protocol"),
    "event-data": (b'{"event": "X", "data": []}\n', "broke the protocol"),
    "error-type": (b'{"error": "x", "id": 2}\n', "broke the protocol"),
    "id-type": (b'{"return": 1, "id": "2"}\n', "broke the protocol"),
    "no-id": (b'{"return": 1}\n', "without id"),
    "nothing": (b'{"id": 2}\n', "neither result nor error"),
    "endless": (b"x" * (qmp.MESSAGE_LIMIT + 100_000), "line of more than"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_server_fails_the_command(run, tmp_path: Path, name: str):
    async def main() -> None:
        answer, text = BROKEN[name]
        watcher = Watcher()
        async with Server(tmp_path, script(bad=answer)) as server:
            client = await watcher.connect(server.path)
            with pytest.raises(VmmError, match=f"bad: .*{text}"):
                await client.execute("bad")
            assert client.closed == (name != "nothing")
            assert watcher.closed == int(client.closed)
            client.close()

    run(main)


def test_no_server_no_greeting_and_refused_negotiation(run, tmp_path: Path):
    async def main() -> None:
        with pytest.raises(VmmError, match="cannot connect"):
            await Watcher().connect(tmp_path / "none")
        with pytest.raises(VmmError, match="cannot connect"):
            await Watcher().connect(tmp_path / "no" / "folder")
        for number, (greeting, text) in enumerate(
            ((b"", r"did not greet within 0\.05 s"), (b"x\n", "broke the protocol"))
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with Server(folder, script(), greeting) as server:
                with pytest.raises(VmmError, match=text):
                    await Watcher().connect(server.path, timeout=0.05)
        refuse = script(qmp_capabilities=lambda m: b'{"error": {"desc": "no"}, "id": %d}\n' % m["id"])
        async with Server(tmp_path, refuse) as server:
            with pytest.raises(VmmError, match="qmp_capabilities: no"):
                await Watcher().connect(server.path)

    run(main)


def test_server_that_does_not_read(run, tmp_path: Path):
    async def main() -> None:
        listener = qmp.bind(tmp_path, "s")
        watcher = Watcher()
        task = asyncio.ensure_future(watcher.connect(tmp_path / "s", timeout=5))
        await asyncio.sleep(0)
        connection, _ = listener.accept()
        connection.sendall(GREETING)
        await asyncio.sleep(0.01)
        connection.sendall(b'{"return": {}, "id": 1}\n')
        client = await task
        with pytest.raises(VmmError, match="does not read"):
            await asyncio.gather(*(client.execute("x", {"a": "x" * 100_000}) for _ in range(20)))
        assert client.closed
        connection.close()
        listener.close()

    run(main)


def test_long_paths_can_be_bound_and_connected(run, tmp_path: Path):
    async def main() -> None:
        folder = tmp_path / ("d" * 120)
        folder.mkdir()
        async with Server(folder, script()) as server:
            client = await Watcher().connect(server.path)
            client.close()

    run(main)
