"""Eight clients at once do to a few sandboxes whatever can be done, and no answer and no content may be one that no
order of these calls explains.

In each guest runs a keeper: it has what it was told in its memory and on its disk, and shows both. The programs of the
clients follow from a seed, which a failure prints along with the history of the sandbox it is about.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest
from e2b import Sandbox
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

from aenv.proxy.target import ENVD_PORT
from aenv.sandbox.live import ENVD_VERSION
from tests.integration.conftest import PATIENCE, Daemon, NewDaemon, wait_until
from tests.integration.histories import (
    NEVER,
    Call,
    Diary,
    History,
    Note,
    Origin,
    Outcome,
    Rules,
    Seen,
    Taken,
    Verb,
    cut,
    out_of_order,
    unexplained,
)

ASKED_FOR = os.environ.get("AENV_TEST_SECONDS")
SECONDS = float(ASKED_FOR or 8)  # that the clients are at work
SEED = os.environ.get("AENV_TEST_SEED")
pytestmark = [pytest.mark.vm, pytest.mark.timeout(120 if ASKED_FOR is None else 0)]
CLIENTS = 8
ALIVE = 6  # sandboxes at a time
KEPT = 5  # snapshots at a time
PORT = 8000
# Some of the resumes find a machine that was parked, others do not any more.
PARKED = {"AENV_VMM_PARKED": "2", "AENV_VMM_PARKED_TIME": "1"}
LONG = 3600  # seconds; no test lasts so long
# Blocks of pages that say whose they are: a page of another block, or of another time, is noticed.
KEEPER = """
import http.server, json, os, threading
FOLDER = "/var/keeper"
os.makedirs(FOLDER, exist_ok=True)
def block(value):
    return b"".join((f"{value} {page} ".encode() * 512)[:4096] for page in range(4))
def written(name):
    try:
        with open(f"{FOLDER}/{name}", "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
def log():
    # A guest that was cut off before it had written all may find zeros at the end of a file that was growing.
    return written("log").replace(b"\\0", b"").decode().split()
memory, lock = {value: block(value) for value in log()}, threading.Lock()
def keep(value):
    with open(f"{FOLDER}/{value}", "wb") as file:
        file.write(block(value))
    memory[value] = block(value)
    with open(f"{FOLDER}/log", "a") as file:
        file.write(value + "\\n")
def show(cold):
    if cold:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    disk = log()
    damaged = [v for v in disk if written(v) != block(v)] + [v for v in memory if memory[v] != block(v)]
    return {"memory": list(memory), "disk": disk, "damaged": damaged}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        verb, _, value = self.path[1:].partition("/")
        with lock:
            answer = json.dumps(keep(value) if verb == "note" else show(verb == "cold")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


class ImpossibleError(AssertionError):
    """An answer that no order explains."""


@dataclass(eq=False)
class Box:
    """A sandbox as the clients know it."""

    id: str
    token: str
    rules: Rules
    diary: Diary
    calls: list[Call] = field(default_factory=list)
    looks: list[tuple[float, float, dict[str, list[str]]]] = field(default_factory=list)
    own: list[str] = field(default_factory=list)  # snapshots it may go back to
    keeper: bool = True  # it runs, and has since the sandbox was made
    gone: bool = False

    def __str__(self) -> str:
        lines = [str(call) for call in sorted(self.calls, key=lambda call: call.began)]
        return "\n".join([f"sandbox {self.id} ({self.rules}):", *lines])


@dataclass(eq=False)
class Snap:
    """A snapshot, with the calls that it has been asked about: `deleted` is when somebody began to delete it."""

    id: str
    taken: list[Taken]
    made: float
    deleting: float = NEVER
    deleted: float = NEVER

    @property
    def keeper(self) -> bool:
        return all(taken.keeper for taken in self.taken)


class World:
    """What all clients share."""

    def __init__(self, daemon: Daemon, seed: str) -> None:
        self.daemon = daemon
        self.seed = seed
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.boxes: dict[str, Box] = {}
        self.snaps: dict[str, Snap] = {}
        self.notes: dict[str, Note] = {}
        self.free = ALIVE
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.serving = threading.Event()  # False while the daemon is down
        self.serving.set()
        self.crashes: list[tuple[float, float]] = []
        self.unanswered: list[Taken] = []  # creates and forks of which nobody knows what became
        self.untold: list[tuple[str, Taken]] = []  # the same with snapshots, by sandbox
        self.calls = 0

    def now(self) -> float:
        return time.monotonic() - self.started

    def fail(self, what: str, *boxes: Box) -> NoReturn:
        raise ImpossibleError("\n".join([f"AENV_TEST_SEED={self.seed}: {what}", *map(str, boxes)]))

    # Calls

    def ask(self, method: str, path: str, body: Any = None) -> tuple[float, float, int, Any]:
        """When it began and ended, status, answer. The status is 0 when the daemon died meanwhile."""
        self.serving.wait(PATIENCE)
        began = self.now()
        self.calls += 1
        try:
            status, answer = self.daemon.request(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self.died(began, f"{method} {path}: {error!r}")
            return began, self.now(), 0, None
        return began, self.now(), status, answer

    def died(self, began: float, what: str) -> None:
        """A connection broke: that is as it must be if the daemon was killed meanwhile, which is up again then."""
        wait_until(lambda: self.serving.is_set() or self.stop.is_set(), "start of the daemon")
        if not any(began < up for _, up in self.crashes):
            self.fail(f"no answer although the daemon was there: {what}")

    def told(self, status: int, answer: Any, call: str, *boxes: Box, fine: dict[int, Outcome]) -> Outcome:
        if status == 0:
            return Outcome.UNKNOWN
        if status not in fine:
            self.fail(f"{call}: {status} {answer}", *boxes)
        return fine[status]

    def do(
        self, box: Box, verb: Verb, path: str, body: Any, fine: dict[int, Outcome], *, method: str = "POST", **more: Any
    ) -> tuple[Call, Any]:
        """One call to a sandbox, which goes into its history."""
        began, ended, status, answer = self.ask(method, path, body)
        outcome = self.told(status, answer, f"{verb.value} of {box.id} at {began:.3f}", box, fine=fine)
        call = Call(verb, began, ended, outcome, **more)
        with self.lock:
            box.calls.append(call)
            if outcome is Outcome.MISSING or (verb is Verb.KILL and outcome is Outcome.DONE):
                self.lost(box)
        return call, answer

    def lost(self, box: Box) -> None:
        """The caller holds the lock."""
        if not box.gone:
            box.gone = True
            self.free += 1

    def reserve(self, count: int) -> bool:
        with self.lock:
            if self.free < count:
                return False
            self.free -= count
            return True

    def release(self, count: int) -> None:
        with self.lock:
            self.free += count

    def born(self, answer: Any, rules: Rules, taken: list[Taken], call: Call, *own: str) -> Box:
        sandbox_id, token = answer["sandboxID"], answer.get("envdAccessToken", "")
        diary = Diary([Origin(taken, call.began, call.began)])
        box = Box(sandbox_id, token, rules, diary, [call], own=list(own), keeper=call.keeper)
        with self.lock:
            if sandbox_id in self.boxes:
                self.fail(f"sandbox {sandbox_id} was made twice", self.boxes[sandbox_id])
            self.boxes[sandbox_id] = box
        return box

    # The keeper

    def knock(self, box: Box, path: str) -> tuple[float, float, int, bytes]:
        self.serving.wait(PATIENCE)
        began = self.now()
        self.calls += 1
        connection = http.client.HTTPConnection(urlsplit(self.daemon.url).netloc, timeout=PATIENCE)
        with contextlib.closing(connection):
            try:
                headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(PORT)}
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                return began, self.now(), answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError):
                    self.fail(f"{path} at {began:.3f} of {box.id}: no answer within {PATIENCE} s", box)
                return began, self.now(), 0, repr(error).encode()

    def talk(self, box: Box, path: str) -> tuple[Call, bytes]:
        began, ended, status, body = self.knock(box, path)
        if status == 200:
            outcome = Outcome.DONE
        elif status == 409:
            outcome = Outcome.CONFLICT
        elif b"was not found" in body:
            outcome = Outcome.MISSING
        elif b"port is not open" in body:
            outcome = Outcome.CLOSED
        elif status in (0, 502):
            outcome = Outcome.CUT
        else:
            self.fail(f"{path} of {box.id} at {began:.3f}: {status} {body!r}", box)
        if status == 0:
            wait_until(lambda: self.serving.is_set() or self.stop.is_set(), "start of the daemon")
        call = Call(Verb.TALK, began, ended, outcome, note=path if status == 200 else f"{path} {body[:200]!r}")
        with self.lock:
            box.calls.append(call)
        if outcome is Outcome.CLOSED:
            self.start_keeper(box)
        return call, body

    def note(self, box: Box) -> None:
        value = secrets.token_hex(5)
        pending = Note(value, self.now(), NEVER)
        self.notes[value] = pending
        box.diary.notes.append(pending)
        call, _ = self.talk(box, f"/note/{value}")
        with self.lock:
            box.diary.notes.remove(pending)
            if call.outcome in (Outcome.DONE, Outcome.CUT, Outcome.MISSING):  # else it has not reached the keeper
                ended = call.ended if call.outcome is Outcome.DONE else NEVER
                self.notes[value] = Note(value, pending.began, ended)
                box.diary.notes.append(self.notes[value])

    def look(self, box: Box, *, cold: bool) -> Call:
        call, body = self.talk(box, "/cold" if cold else "/look")
        if call.outcome is Outcome.DONE:
            box.looks.append((call.began, call.ended, json.loads(body)))
        return call

    def sandbox(self, box: Box) -> Sandbox:
        """As the SDK has it. Not by `connect`, which would be a call to the sandbox that its history does not have."""
        headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(ENVD_PORT), "X-Access-Token": box.token}
        return Sandbox(
            sandbox_id=box.id, sandbox_domain=None, envd_version=Version(ENVD_VERSION), envd_access_token=box.token,
            traffic_access_token=None,
            connection_config=ConnectionConfig(extra_sandbox_headers=headers, **self.daemon.options),
        )  # fmt: skip

    def by_agent(self, box: Box, work: Callable[[Sandbox], str], what: str) -> tuple[Call, str]:
        self.serving.wait(PATIENCE)
        began, outcome, found = self.now(), Outcome.DONE, ""
        self.calls += 1
        try:
            found = work(self.sandbox(box))
        except Exception as error:
            what = f"{what} {error!r}"
            outcome = Outcome.MISSING if "was not found" in str(error) else Outcome.CUT
        call = Call(Verb.TALK, began, self.now(), outcome, note=what)
        with self.lock:
            box.calls.append(call)
        return call, found

    def read(self, box: Box, how: Callable[[Sandbox], str]) -> None:
        """What is in the keeper's log."""
        call, found = self.by_agent(box, how, "log")
        if call.outcome is Outcome.DONE:
            box.looks.append((call.began, call.ended, {"disk": found.replace("\0", "").split()}))

    def start_keeper(self, box: Box) -> None:
        """Start it once more after a boot. One that does not run then is noticed."""
        self.by_agent(box, lambda sandbox: sandbox.commands.run(START, user="root", timeout=30).stdout, "start")

    # Judgement

    def judge(self) -> None:
        for box in self.boxes.values():
            self.judge_contents(box)
            self.judge_answers(box)

    def judge_answers(self, box: Box) -> None:
        for began, up in self.crashes:
            box.calls.append(Call(Verb.CRASH, began, up))
        for call in box.calls:
            if call.outcome is Outcome.CUT and not cut(call, box.calls):
                self.fail(f"cut although nothing happened: {call}", box)
        history = History(box.rules, box.calls)
        if not history.possible():
            self.fail(f"no order explains {history.first_impossible()}", box)

    def judge_contents(self, box: Box) -> None:
        for began, ended, found in box.looks:
            when, bounds = f"the look of {began:.3f} to {ended:.3f}", box.diary.bounds(began, ended)
            if found.get("memory", found["disk"]) != found["disk"]:
                self.fail(f"memory and disk disagree in {when}: {found}", box)
            values = found["disk"]
            if strange := [value for value in values if value not in self.notes]:
                self.fail(f"nobody has written {strange} of {when}", box)
            if problem := unexplained(values, bounds):
                told = "\n".join(f"{n.began:9.3f} {n.ended:9.3f}  {n.value}" for n in box.diary.notes)
                self.fail(f"{problem} in {when}; notes:\n{told}\n{box.diary.origins}", box)
            if culprit := out_of_order(values, self.notes, bounds):
                self.fail(f"{culprit} is out of order in {when}: {values}", box)
            if damaged := [v for v in found.get("damaged", ()) if any(v in b.must for b in bounds)]:
                self.fail(f"damaged in {when}: {damaged}", box)


START = "setsid python3 /var/keeper.py >/dev/null 2>&1 & until exec 3<>/dev/tcp/127.0.0.1/8000; do sleep 0.1; done"


CHANGED = {204: Outcome.DONE, 409: Outcome.CONFLICT, 404: Outcome.MISSING}
FOUND = {200: Outcome.DONE, 404: Outcome.MISSING}


class Client:
    """One of those who do at random what can be done. Its program follows from `chance`; on what it falls is decided by
    what there is."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.chance = random.Random(name)
        weights: dict[Callable[[], None], float] = {
            self.note: 24, self.look: 10, self.run_command: 2, self.read_file: 2, self.pause: 8, self.connect: 14,
            self.resume: 3, self.snapshot: 6, self.create: 8, self.fork: 6, self.roll_back: 6, self.kill: 5,
            self.time_out: 5, self.list: 6, self.get: 4, self.list_snapshots: 3, self.delete_snapshot: 4, self.tree: 1,
            self.boot: 0.4,
        }  # fmt: skip
        self.operations, self.weights = list(weights), list(weights.values())

    def run(self) -> None:
        try:
            while not self.world.stop.is_set():
                self.chance.choices(self.operations, self.weights)[0]()
        except BaseException as error:
            self.world.failures.append(error)
            self.world.stop.set()

    @contextlib.contextmanager
    def box(self) -> Iterator[Box]:
        """One of the sandboxes; sometimes one that is gone."""
        with self.world.lock:
            boxes = list(self.world.boxes.values())
        alive = [box for box in boxes if not box.gone]
        yield self.chance.choice(alive if alive and self.chance.random() < 0.97 else boxes)

    def some_snapshot(self) -> Snap:
        with self.world.lock:
            snaps = list(self.world.snaps.values())
        alive = [snap for snap in snaps if snap.deleting == NEVER]
        return self.chance.choice(alive if alive and self.chance.random() < 0.95 else snaps)

    # Contents

    def note(self) -> None:
        with self.box() as box:
            self.world.note(box)

    def look(self) -> None:
        with self.box() as box:
            self.world.look(box, cold=self.chance.random() < 0.2)

    def run_command(self) -> None:
        with self.box() as box:
            self.world.read(box, lambda sandbox: sandbox.commands.run("cat /var/keeper/log", user="root").stdout)

    def read_file(self) -> None:
        with self.box() as box:
            self.world.read(box, lambda sandbox: sandbox.files.read("/var/keeper/log", user="root"))

    # Sandboxes

    def pause(self) -> None:
        with self.box() as box:
            self.world.do(box, Verb.PAUSE, f"/sandboxes/{box.id}/pause", {}, CHANGED)

    def boot(self) -> None:
        """Lose what is in memory, in one of the ways there are."""
        with self.box() as box:
            body, box.keeper = {"memory": False}, False
            call, _ = self.world.do(box, Verb.PAUSE, f"/sandboxes/{box.id}/pause", body, CHANGED, memory=False)
            if call.outcome is Outcome.DONE:
                self.connect_to(box)

    def connect(self) -> None:
        with self.box() as box:
            self.connect_to(box)

    def connect_to(self, box: Box) -> None:
        fine = {200: Outcome.RAN, 201: Outcome.DONE, 404: Outcome.MISSING}
        body = {"timeout": LONG}
        self.world.do(box, Verb.CONNECT, f"/v2/sandboxes/{box.id}/connect", body, fine, seconds=LONG)

    def resume(self) -> None:
        with self.box() as box:
            fine = {201: Outcome.DONE, 409: Outcome.CONFLICT, 404: Outcome.MISSING}
            body = {"timeout": LONG}
            self.world.do(box, Verb.RESUME, f"/sandboxes/{box.id}/resume", body, fine, seconds=LONG)

    def time_out(self) -> None:
        with self.box() as box:
            seconds = self.chance.choice((0, 1, 1, LONG))
            body = {"timeout": seconds}
            self.world.do(box, Verb.TIMEOUT, f"/sandboxes/{box.id}/timeout", body, CHANGED, seconds=seconds)

    def kill(self) -> None:
        with self.box() as box:
            self.world.do(box, Verb.KILL, f"/sandboxes/{box.id}", None, CHANGED, method="DELETE")

    def create(self) -> None:
        world, snap = self.world, self.some_snapshot()
        if not world.reserve(1):
            return
        rules = Rules(pauses=self.chance.random() < 0.6, wakes=False)
        if rules.pauses and self.chance.random() < 0.4:
            rules = Rules(pauses=True, wakes=True)
        body = {
            "templateID": snap.id,
            "timeout": LONG,
            "autoPause": rules.pauses,
            "autoResume": {"enabled": rules.wakes},
        }
        began, ended, status, answer = world.ask("POST", "/v2/sandboxes", body)
        outcome = world.told(status, answer, f"create from {snap.id}", fine={201: Outcome.DONE, 404: Outcome.MISSING})
        if outcome is Outcome.DONE:
            if snap.deleted < began:
                world.fail(f"created from {snap.id}, which was deleted")
            call = Call(Verb.CREATE, began, ended, seconds=LONG, keeper=snap.keeper)
            world.born(answer, rules, snap.taken, call, snap.id)
            return
        world.release(1)
        if outcome is Outcome.MISSING and snap.deleting > ended:
            world.fail(f"no create from {snap.id} between {began:.3f} and {ended:.3f}: {answer}")
        if outcome is Outcome.UNKNOWN:
            world.unanswered.extend(snap.taken)

    # Snapshots

    def snapshot(self) -> None:
        world = self.world
        with world.lock:
            if sum(snap.deleting == NEVER for snap in world.snaps.values()) > KEPT:
                return
        with self.box() as box:
            fine = {201: Outcome.DONE, 404: Outcome.MISSING}
            memory = self.chance.random() > 0.03
            call, answer = world.do(box, Verb.SNAPSHOT, f"/sandboxes/{box.id}/snapshots", {"memory": memory}, fine)
            # A guest that is paused cannot be asked to write what it has in its memory only.
            taken = Taken(box.diary, call.began, call.ended, memory, memory and box.keeper, written=memory)
            if call.outcome is Outcome.DONE:
                identity = answer["templateID"]
                taken = replace(taken, memory=answer["memory"])
                with world.lock:
                    world.snaps[identity] = Snap(identity, [taken], call.ended)
                    box.own.append(identity)
            elif call.outcome is Outcome.UNKNOWN:
                world.untold.append((box.id, taken))

    def fork(self) -> None:
        world, count = self.world, self.chance.randint(1, 3)
        if not world.reserve(count):
            return
        made = 0
        with self.box() as box:
            fine = {201: Outcome.DONE, 409: Outcome.CONFLICT, 404: Outcome.MISSING}
            body = {"count": count, "timeout": LONG}
            call, answer = world.do(box, Verb.FORK, f"/sandboxes/{box.id}/fork", body, fine)
            taken = Taken(box.diary, call.began, call.ended, keeper=box.keeper)
            for child in answer if call.outcome is Outcome.DONE else ():
                if child.get("sandbox") is None:
                    world.fail(f"a child of {box.id} failed: {child}", box)
                made += 1
                birth = Call(Verb.CREATE, call.began, call.ended, seconds=LONG, keeper=box.keeper)
                world.born(child["sandbox"], box.rules, [taken], birth)
            if call.outcome is Outcome.UNKNOWN:
                world.unanswered.append(taken)
        world.release(count - made)

    def roll_back(self) -> None:
        world = self.world
        with self.box() as box:
            if not box.own:
                return
            snap = world.snaps[self.chance.choice(box.own)]
            box.keeper = box.keeper and snap.keeper
            origin = Origin(snap.taken, world.now(), NEVER, sure=False)
            with world.lock:
                box.diary.origins.append(origin)
            began, ended, status, answer = world.ask(
                "POST", f"/sandboxes/{box.id}/rollback", {"snapshotID": snap.id}
            )  # fmt: skip
            outcome = world.told(status, answer, f"roll back of {box.id} at {began:.3f}", box, fine=FOUND)
            with world.lock:
                if outcome is Outcome.MISSING:
                    box.diary.origins.remove(origin)
                    if snap.id in answer["message"]:
                        if snap.deleting > ended:
                            world.fail(f"no roll back of {box.id} to {snap.id}: {answer}", box)
                        return
                else:
                    sure = outcome is Outcome.DONE
                    position = box.diary.origins.index(origin)
                    box.diary.origins[position] = Origin(snap.taken, began, ended, sure)
                    if sure and snap.deleted < began:
                        world.fail(f"{box.id} went back to {snap.id}, which was deleted", box)
                memory = all(taken.memory for taken in snap.taken)
                note = f"to {snap.id}"
                call = Call(Verb.ROLLBACK, began, ended, outcome, LONG, memory=memory, keeper=snap.keeper, note=note)
                box.calls.append(call)
                if outcome is Outcome.MISSING:
                    world.lost(box)

    def delete_snapshot(self) -> None:
        world, snap = self.world, self.some_snapshot()
        with world.lock:
            if sum(s.deleting == NEVER for s in world.snaps.values()) <= 2 and snap.deleting == NEVER:
                return
            first = snap.deleting == NEVER
            snap.deleting = min(snap.deleting, world.now())
        began, ended, status, answer = world.ask("DELETE", f"/templates/{snap.id}")
        outcome = world.told(status, answer, f"deletion of {snap.id}", fine=CHANGED)
        if outcome is Outcome.CONFLICT or (first and outcome is Outcome.MISSING and world.now() < snap.deleting):
            world.fail(f"deletion of {snap.id} at {began:.3f}: {answer}")
        if outcome is not Outcome.UNKNOWN:
            snap.deleted = min(snap.deleted, ended)

    # Views

    def list(self) -> None:
        world = self.world
        with world.lock:
            before = [box for box in world.boxes.values() if not box.gone or self.chance.random() < 0.1]
        began, ended, status, answer = world.ask("GET", "/v2/sandboxes?limit=100")
        if world.told(status, answer, "list of sandboxes", fine=FOUND) is not Outcome.DONE:
            return
        states = {entry["sandboxID"]: Seen(entry["state"]) for entry in answer}
        with world.lock:
            for box in before:
                seen = states.get(box.id, Seen.NOWHERE)
                box.calls.append(Call(Verb.SEE, began, ended, seen=seen))
                if seen is Seen.NOWHERE:
                    world.lost(box)

    def get(self) -> None:
        with self.box() as box:
            began, ended, status, answer = self.world.ask("GET", f"/sandboxes/{box.id}")
            outcome = self.world.told(status, answer, f"get of {box.id}", box, fine=FOUND)
            if outcome is not Outcome.UNKNOWN:
                seen = Seen(answer["state"]) if outcome is Outcome.DONE else Seen.NOWHERE
                box.calls.append(Call(Verb.SEE, began, ended, seen=seen))

    def list_snapshots(self) -> None:
        world = self.world
        began, ended, status, answer = world.ask("GET", "/snapshots?limit=100")
        if world.told(status, answer, "list of snapshots", fine=FOUND) is not Outcome.DONE:
            return
        listed = {entry["templateID"] for entry in answer}
        with world.lock:
            for snap in world.snaps.values():
                if snap.made < began and snap.deleting > ended and snap.id not in listed:
                    world.fail(f"snapshot {snap.id} is not listed at {began:.3f}")
                if snap.deleted < began and snap.id in listed:
                    world.fail(f"snapshot {snap.id} is listed at {began:.3f} though deleted at {snap.deleted:.3f}")

    def tree(self) -> None:
        _, _, status, answer = self.world.ask("GET", "/tree")
        self.world.told(status, answer, "tree", fine={200: Outcome.DONE})


def first(world: World) -> None:
    """The sandbox that all others descend from, and a snapshot of it."""
    sandbox = world.daemon.create(timeout=LONG)
    sandbox.files.write("/var/keeper.py", KEEPER, user="root")
    sandbox.commands.run(f"sync; {START}", user="root")
    call = Call(Verb.CREATE, 0, world.now(), seconds=LONG)
    answer = {"sandboxID": sandbox.sandbox_id, "envdAccessToken": sandbox._envd_access_token}
    box = world.born(answer, Rules(pauses=False, wakes=False), [Taken(None, 0, 0)], call)
    world.free -= 1
    world.note(box)
    client = Client(world, "first")
    client.snapshot()
    assert world.look(box, cold=False).outcome is Outcome.DONE


def at_work(world: World, seconds: float, *disturbances: Callable[[World], None]) -> None:
    """Clients for so long; a disturbance after each part of the time."""
    threads = [threading.Thread(target=Client(world, f"{world.seed} {n}").run) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        for disturbance in disturbances:
            if world.stop.wait(seconds / (len(disturbances) + 1)):
                break
            disturbance(world)
        world.stop.wait(seconds / (len(disturbances) + 1))
    except BaseException as error:
        world.failures.append(error)
    finally:
        world.stop.set()
        for thread in threads:
            thread.join()


def strangers(world: World) -> None:
    """What came of calls that were never answered: it must be as whole as everything else."""
    _, _, _, answer = world.ask("GET", "/v2/sandboxes?limit=100")
    for entry in answer:
        if entry["sandboxID"] not in world.boxes:
            if not world.unanswered:
                world.fail(f"nobody has made sandbox {entry['sandboxID']}")
            call = Call(Verb.CREATE, 0, world.now(), seconds=LONG, keeper=False)
            world.born(entry, Rules(pauses=True, wakes=False), world.unanswered, call).gone = True
    _, _, _, answer = world.ask("GET", "/snapshots?limit=100")
    for entry in answer:
        if entry["templateID"] not in world.snaps:
            taken = [taken for source, taken in world.untold if source == entry["sandboxID"]]
            if not taken:
                world.fail(f"nobody has made snapshot {entry['templateID']}")
            world.snaps[entry["templateID"]] = Snap(entry["templateID"], taken, world.now())


def last(world: World) -> None:
    """Everything that is there is looked at and ended."""
    strangers(world)
    client = Client(world, f"{world.seed} last")
    client.list()
    with ThreadPoolExecutor(CLIENTS // 2) as pool:
        ends = [pool.submit(end_of_box, client, box) for box in list(world.boxes.values())]
        ends += [pool.submit(end_of_snapshot, world, snap) for snap in world.snaps.values()]
    for end in ends:
        end.result()


def end_of_box(client: Client, box: Box) -> None:
    if box.calls[-1].seen is not Seen.NOWHERE:
        client.connect_to(box)
        last_look(client.world, box)
    else:
        client.world.do(box, Verb.KILL, f"/sandboxes/{box.id}", None, CHANGED, method="DELETE")


def end_of_snapshot(world: World, snap: Snap) -> None:
    if snap.deleting == NEVER:
        body = {"templateID": snap.id, "timeout": LONG}
        began, ended, status, answer = world.ask("POST", "/v2/sandboxes", body)
        if status != 201:
            world.fail(f"no create from {snap.id}: {status} {answer}")
        call = Call(Verb.CREATE, began, ended, seconds=LONG, keeper=snap.keeper)
        last_look(world, world.born(answer, Rules(pauses=False, wakes=False), snap.taken, call))
    world.ask("DELETE", f"/templates/{snap.id}")


def last_look(world: World, box: Box) -> None:
    """Nobody else does anything to it any more."""
    if world.look(box, cold=True).outcome is Outcome.CLOSED and world.look(box, cold=True).outcome is not Outcome.DONE:
        world.fail("its keeper does not run", box)
    world.do(box, Verb.KILL, f"/sandboxes/{box.id}", None, CHANGED, method="DELETE")


def nothing_left(daemon: Daemon, *, errors: bool) -> None:
    assert daemon.list() == {}
    assert daemon.request("GET", "/snapshots") == (200, [])
    daemon.wait_for_folders(set())
    assert daemon.stop() == 0
    assert daemon.left() == []
    assert len([f for f in daemon.home.templates.iterdir() if f.is_dir()]) == 1
    log = daemon.log_file.read_text()
    assert "Traceback" not in log, log
    assert errors or " ERROR " not in log, log


@contextlib.contextmanager
def world_of(daemon: Daemon) -> Iterator[World]:
    """The clients have stopped when this goes on; what they found is judged then, and nothing may be left."""
    seed = SEED or secrets.token_hex(4)
    world = World(daemon, seed)
    first(world)
    yield world
    done = world.calls
    if not world.failures:
        world.stop.clear()
        last(world)
    if not world.failures:
        world.judge()
    print(
        f"seed {seed}: {done} calls, {len(world.boxes)} sandboxes, {len(world.snaps)} snapshots",
        *map(str, world.crashes),
    )
    for failure in world.failures:
        raise failure


def block_server_dies(world: World) -> None:
    pid = world.daemon.block_server()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: world.daemon.block_server(besides=pid), "another block server")


def daemon_dies(world: World) -> None:
    began = world.now()
    world.serving.clear()
    world.daemon.crash()
    world.daemon.start()
    world.crashes.append((began, world.now()))
    world.serving.set()


def no_errors(world: World) -> None:
    """As long as nothing is killed."""
    assert " ERROR " not in world.daemon.log_file.read_text(), world.daemon.log()


KILLED = [no_errors, *[block_server_dies, daemon_dies] * max(1, round(SECONDS / 30))]


@pytest.mark.parametrize("disturbances", [KILLED] if ASKED_FOR is None else [[], KILLED], ids=len)
def test_eight_clients(new_daemon: NewDaemon, disturbances: list[Callable[[World], None]]) -> None:
    daemon = new_daemon(**PARKED).start()
    with world_of(daemon) as world:
        at_work(world, SECONDS, *disturbances)
    nothing_left(daemon, errors=bool(disturbances))
