"""Real daemons, real guests under software emulation, and the official E2B SDK.

The base template is built once a session (kernel and packages come from AENV_CACHE, else ~/.cache/aenv). Each module
has a daemon of its own on a fresh home, whose templates are hard links to that one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2b import Sandbox

from aenv.sandbox.machines import WARM_MARK
from aenv.storage.home import Home
from tests.leftovers import CLAIMS, nothing_left_behind

ROOT = Path(__file__).parents[2]
AENV = (sys.executable, "-m", "aenv.cli.main")
LISTENS = "until exec 3<>/dev/tcp/127.0.0.1/8000; do sleep 0.1; done 2>/dev/null"  # a command that waits for it
PATIENCE = 60.0  # seconds that a busy machine may take for anything


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_"))}
    cache = os.environ.get("AENV_CACHE") or str(Path.home() / ".cache/aenv")
    return kept | {"AENV_CACHE": cache, "AENV_NETWORK_UPLINK": "none", "PYTHONPATH": str(ROOT)} | more


def wait_until(done: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not done():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        time.sleep(0.02)  # another process's doing: there is no event for it here


class Daemon:
    """`aenv serve` as a process. It may be started and ended many times on its home."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = Home(home, home / "cache")
        self.environment = clean_environment(**environment)
        self.log_file = home / "daemon.log"
        self.process: subprocess.Popen[str] | None = None
        self.url = self.key = ""

    def start(self) -> Daemon:
        """Wait until it serves."""
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*AENV, "--home", str(self.home.root), "serve", "--listen", "127.0.0.1:0", "--json"],
                stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment,
            )  # fmt: skip
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"the daemon did not start:\n{self.log()}"
        told = json.loads(line)
        self.url, self.key = told["url"], told["api_key"]
        return self

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the daemon does not end:\n{self.log()}")
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait()

    def crash(self) -> None:
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:]

    # The SDK

    @property
    def options(self) -> dict[str, Any]:
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": self.key, "request_timeout": PATIENCE}

    def create(self, template: str = "base", *, timeout: int = 300, **more: Any) -> Sandbox:
        return Sandbox.create(template, timeout=timeout, **more, **self.options)

    def connect(self, sandbox_id: str, timeout: int = 300) -> Sandbox:
        return Sandbox.connect(sandbox_id, timeout=timeout, **self.options)

    def list(self) -> dict[str, str]:
        """State by id, of all sandboxes."""
        pages = Sandbox.list(**self.options)
        found: dict[str, str] = {}
        while pages.has_next:
            found |= {box.sandbox_id: box.state.value for box in pages.next_items()}
        return found

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One plain call of the API: status and decoded answer. A body of bytes goes out as it is."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        with contextlib.closing(connection):
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            given = {"X-API-Key": self.key, "Content-Type": "application/json"} | headers
            connection.request(method, path, content, given)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None

    def get(self, sandbox: Sandbox, port: int, path: str) -> tuple[int, bytes]:
        """GET from a server in a sandbox, through the proxy."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        with contextlib.closing(connection):
            headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    # What there is of it on the machine

    def vmms(self) -> dict[int, Path]:
        """Run directory by pid, of all VMM processes of this home."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    cwd = Path(os.readlink(entry / "cwd"))
                    if cwd.parent == self.home.run and "qemu" in os.readlink(entry / "exe"):
                        found[int(entry.name)] = cwd
        return found

    def vmm_of(self, sandbox: Sandbox) -> int:
        """The process of a sandbox, from the daemon's record."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home.database}?mode=ro", uri=True)) as db:
            (record,) = db.execute("SELECT record FROM sandboxes WHERE id = ?", (sandbox.sandbox_id,)).fetchone()
        return int(json.loads(record)["machine"]["pid"])

    def block_server(self, besides: int = 0) -> int:
        """The process that serves its disks, if it is not `besides`; 0 when there is none."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != besides:
                with contextlib.suppress(OSError):  # it has just ended
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"ublk" in words and any(os.fsencode(self.home.run) in word for word in words):
                        return int(entry.name)
        return 0

    def folders(self) -> set[str]:
        """The directories of sandboxes, without those of machines that wait to become one."""
        return {f.name for f in self.home.sandboxes.iterdir() if not (f / WARM_MARK).exists()}

    def wait_for_folders(self, allowed: set[str]) -> None:
        """No directory but these. A machine that is made for the pool, or leaves it, has no mark for a moment."""
        wait_until(lambda: self.folders() <= allowed, f"no directories but {sorted(allowed)}")

    def namespaces(self) -> list[str]:
        return [name for name in os.listdir("/run/netns") if name.startswith(f"aenv-{self.home.tag}-")]

    def left(self) -> list[str]:
        """What a daemon that has ended must not leave, whether it was stopped or crashed and was started again."""
        folders = (self.home.run, self.home.staging)
        scratch = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
        return [*map(str, self.vmms()), *self.namespaces(), *scratch]

    def aenv(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*AENV, "--home", str(self.home.root), *words],
            input=stdin, capture_output=True, env=self.environment, check=False, timeout=PATIENCE,
        )  # fmt: skip


@pytest.fixture(scope="session")
def base_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with the base template. When it is not needed any more, nothing of any test here may be left."""
    home = tmp_path_factory.mktemp("base")
    CLAIMS.home(home)
    with nothing_left_behind():
        subprocess.run(
            [*AENV, "--home", str(home), "template", "build", "base"], check=True, env=clean_environment(), timeout=900
        )
        yield home
    remove_home(Home(home, home))


def remove_home(home: Home) -> None:
    shutil.rmtree(home.root)
    if home.run.exists():
        home.run.rmdir()  # it is empty, or the test fails


NewDaemon = Callable[..., Daemon]


@contextlib.contextmanager
def fresh_daemons(base_home: Path, folder: Path) -> Iterator[NewDaemon]:
    """Daemons that are ended afterwards, with everything they have started."""
    made: list[Daemon] = []

    def new(**environment: str) -> Daemon:
        home = folder / f"home{len(made)}"
        home.mkdir()
        CLAIMS.home(home)
        subprocess.run(["cp", "-al", str(base_home / "templates"), str(home / "templates")], check=True)
        # Resumes make new machines from files here, unless a test asks for the other way.
        small = {"AENV_VMM_POOL": "1", "AENV_NETWORK_POOL": "2", "AENV_VMM_PARKED": "0"}
        daemon = Daemon(home, **(small | environment))
        made.append(daemon)
        return daemon

    try:
        yield new
    finally:
        for daemon in made:
            if daemon.alive:
                daemon.stop()
    for daemon in made:
        assert daemon.left() == []
        remove_home(daemon.home)


@pytest.fixture
def new_daemon(base_home: Path, tmp_path: Path) -> Iterator[NewDaemon]:
    """Makes daemons on homes of their own (not started yet); keywords are environment variables."""
    with fresh_daemons(base_home, tmp_path) as new:
        yield new


@pytest.fixture(scope="module")
def module_daemons(base_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewDaemon]:
    """Like `new_daemon`, for daemons that serve a whole module."""
    with fresh_daemons(base_home, tmp_path_factory.mktemp("daemon")) as new:
        yield new


@pytest.fixture(scope="module")
def daemon(module_daemons: NewDaemon) -> Daemon:
    """The module's daemon, serving."""
    return module_daemons().start()


@pytest.fixture(scope="module")
def box(daemon: Daemon) -> Iterator[Sandbox]:
    """A sandbox for the tests of a module that do not end it."""
    sandbox = daemon.create(timeout=3600)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The machines of a daemon come and go during a test, so it is looked at when it has ended. What a test itself
    must not leave is a sandbox."""
    daemon: Daemon | None = None
    for name in ("daemon", "box"):  # they are there before and stay
        if name in request.fixturenames:
            daemon = request.getfixturevalue("daemon")
            request.getfixturevalue(name)
    before = set(daemon.list()) if daemon else set()
    yield
    if daemon and daemon.alive:
        left = set(daemon.list()) - before
        for sandbox_id in left:
            daemon.request("DELETE", f"/sandboxes/{sandbox_id}")
        assert left == set(), "left behind"
        daemon.wait_for_folders(before)
