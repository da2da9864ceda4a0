"""Reinforcement learning in small: prepare once, branch often, go on from the best. Only the official `e2b` package.

A game (a robot that gathers coins on a map) runs as a process in a sandbox. The sandbox is prepared once: a repository
with the map is cloned, and the game is installed from a wheel. In every generation it is forked in the middle of the
game, each child plays moves of its own and is paid for the coins it finds, and the best child is the one that is forked
next. At the end the winner's moves are played again from the snapshot that was taken before the first one.

Set E2B_API_URL and E2B_SANDBOX_URL to the address of `aenv serve` and E2B_API_KEY to its key, then run this file.
A table goes to stderr; the last line of stdout is one JSON object. Exit status 1 when something failed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import random
import shlex
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from e2b import Sandbox

T = TypeVar("T")

TIMEOUT = 900  # seconds that each sandbox lives if nobody ends it
MOVES = 16  # of one child in one generation
MAP_SIZE = 24
MOST_CHILDREN = 20  # of one fork: the SDK sends no more
WHEEL = "gather-1.0-py3-none-any.whl"

GAME = '''
"""A robot gathers coins on a map. The game lives in this process; POST moves (U, D, L, R) to port 8000 to play."""

import json
import socketserver
import sys
from http.server import BaseHTTPRequestHandler

STEPS = {"U": (0, -1), "D": (0, 1), "L": (-1, 0), "R": (1, 0)}


class Game:
    def __init__(self, rows):
        cells = {(x, y): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
        self.floor = {at for at, cell in cells.items() if cell != "#"}
        self.coins = {at for at, cell in cells.items() if cell == "*"}
        self.robot = next(at for at, cell in cells.items() if cell == "@")
        self.moves = ""
        self.score = 0

    def play(self, moves):
        reward = 0
        for move in moves:
            x, y = STEPS[move]
            ahead = (self.robot[0] + x, self.robot[1] + y)
            if ahead in self.floor:
                self.robot = ahead
            if self.robot in self.coins:
                self.coins.remove(self.robot)
                reward += 1
        self.moves += moves
        self.score += reward
        return {"reward": reward, "score": self.score, "moves": self.moves}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        moves = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer = json.dumps(self.server.game.play(moves)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        return


def main():
    with open(sys.argv[1]) as file, socketserver.TCPServer(("127.0.0.1", 8000), Handler) as server:
        server.game = Game(file.read().split())
        server.serve_forever()


if __name__ == "__main__":
    main()
'''


def wheel(name: str, version: str, source: str) -> bytes:
    """A wheel with one module: a zip archive with three files about it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source.encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: example\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for path, content in files.items():
            file.writestr(path, content)
    return archive.getvalue()


def draw_map(seed: int) -> str:
    """Walls around, some inside, a coin in every fourth cell, the robot in the middle."""
    dice = random.Random(f"map {seed}")
    rows = [["#"] * MAP_SIZE for _ in range(MAP_SIZE)]
    for row in rows[1:-1]:
        row[1:-1] = dice.choices("#*.", (1, 4, 11), k=MAP_SIZE - 2)
    rows[MAP_SIZE // 2][MAP_SIZE // 2] = "@"
    return "".join("".join(row) + "\n" for row in rows)


def choose_moves(seed: int, generation: int, child: int) -> str:
    """What a policy would say; here chance does. Straight stretches of one to four steps get around more."""
    dice = random.Random(f"moves {seed} {generation} {child}")
    moves = ""
    while len(moves) < MOVES:
        moves += dice.choice("UDLR") * dice.randint(1, 4)
    return moves[:MOVES]


@dataclass
class Run:
    """What must go away at the end, and how long things took."""

    sandboxes: list[Sandbox] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)

    def step(self, name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.times[name] = round((time.perf_counter() - began) * 1000, 1)
        print(f"  {name:<34}{self.times[name]:>9.1f} ms", file=sys.stderr, flush=True)
        return result

    def create(self, template: str) -> Sandbox:
        self.sandboxes.append(Sandbox.create(template, timeout=TIMEOUT))
        return self.sandboxes[-1]

    def fork(self, source: Sandbox, count: int) -> list[Sandbox]:
        """The children that started; it is an error when none did."""
        children = source.fork(count=count, timeout=TIMEOUT)
        started = [child for child in children if isinstance(child, Sandbox)]
        self.sandboxes += started
        failed = [child for child in children if not isinstance(child, Sandbox)]
        if failed:
            print(f"  {len(failed)} children did not start: {failed[0]}", file=sys.stderr)
        if not started:
            raise failed[0]
        return started

    def end(self, doomed: list[Sandbox]) -> None:
        for sandbox in doomed:
            sandbox.kill()
            self.sandboxes.remove(sandbox)


def play(sandbox: Sandbox, moves: str) -> dict[str, Any]:
    """Ask the game in a sandbox; no moves only ask for the score."""
    curl = "curl --silent --fail --retry 30 --retry-connrefused --retry-delay 1"
    answer = sandbox.commands.run(f"{curl} --data {shlex.quote(moves)} localhost:8000", timeout=120)
    state: dict[str, Any] = json.loads(answer.stdout)
    return state


def prepare(run: Run, seed: int) -> Sandbox:
    """A sandbox in which the game runs and nobody has moved."""
    sandbox = run.step("create from base", lambda: run.create("base"))
    sandbox.files.write("origin/map.txt", draw_map(seed))
    commit = "git -c user.name=example -c user.email=example@localhost commit --quiet --message 'A map'"
    sandbox.commands.run(f"cd origin && git init --quiet && git add map.txt && {commit}")
    run.step("git clone", lambda: sandbox.commands.run("git clone --quiet origin work"))
    sandbox.files.write(f"/tmp/{WHEEL}", wheel("gather", "1.0", GAME))
    install = f"pip install --quiet --no-index --no-deps --disable-pip-version-check /tmp/{WHEEL}"
    run.step("pip install", lambda: sandbox.commands.run(install, timeout=300))
    sandbox.commands.run("exec python -m gather work/map.txt", background=True, timeout=0)
    run.step("the game runs", lambda: play(sandbox, ""))
    return sandbox


def generation(run: Run, source: Sandbox, number: int, children: int, seed: int) -> tuple[Sandbox, list[int]]:
    """Fork, let every child play, keep the best. Gives it and the rewards of all."""
    before = play(source, "")
    forks = run.step(f"generation {number}: fork {children}", lambda: run.fork(source, children))
    plans = [choose_moves(seed, number, child) for child in range(len(forks))]
    with ThreadPoolExecutor(len(forks)) as pool:
        results = run.step(f"generation {number}: play", lambda: list(pool.map(play, forks, plans)))
    expect("moves of a child", [r["moves"] for r in results], [before["moves"] + plan for plan in plans])
    expect("the game that was forked", play(source, ""), before)
    rewards = [result["reward"] for result in results]
    best = rewards.index(max(rewards))
    run.end([source, *(fork for fork in forks if fork is not forks[best])])
    shown = " ".join(f"{reward}*" if child == best else str(reward) for child, reward in enumerate(rewards))
    print(f"    rewards {shown}; score {results[best]['score']} after {plans[best]}", file=sys.stderr)
    return forks[best], rewards


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {got!r}")


def rollouts(run: Run, children: int, generations: int, seed: int) -> dict[str, Any]:
    current = prepare(run, seed)
    snapshot = run.step("snapshot", current.create_snapshot)
    try:
        rewards = []
        for number in range(1, generations + 1):
            current, paid = generation(run, current, number, children, seed)
            rewards.append(paid)
        won = play(current, "")
        expect("score", won["score"], sum(map(max, rewards)))
        fresh = run.step("create from the snapshot", lambda: run.create(snapshot.snapshot_id))
        again = play(fresh, won["moves"])
        expect("score of the same moves from the snapshot", again["score"], won["score"])
    finally:
        run.end(list(run.sandboxes))
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    return {"score": won["score"], "moves": won["moves"], "rewards": rewards}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--children", type=int, default=16, choices=range(1, MOST_CHILDREN + 1), metavar="N")
    parser.add_argument("--generations", type=int, default=3, choices=range(1, 101), metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the map and of all moves")
    arguments = parser.parse_args()
    run = Run()
    result: dict[str, Any] = {"ok": False}
    try:
        result |= rollouts(run, arguments.children, arguments.generations, arguments.seed) | {"ok": True}
    except Exception:
        traceback.print_exc()
    finally:
        run.end(list(run.sandboxes))
    print(json.dumps(result | {"ms": run.times}), flush=True)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
