"""The main job in one file, with nothing but the official `e2b` package.

Set E2B_API_URL and E2B_SANDBOX_URL to the address of `aenv serve` and E2B_API_KEY to its key, then run this file.
A table of steps goes to stderr; the last line of stdout is one JSON object. Exit status 1 when a step failed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from e2b import CommandHandle, PtySize, Sandbox

steps: list[tuple[str, float, str]] = []


def step(name: str, work: Callable[[], Any], show: Callable[[Any], str] = lambda _: "") -> Any:
    """Run one step, note its milliseconds, and say what came out."""
    began = time.perf_counter()
    result = work()
    steps.append((name, (time.perf_counter() - began) * 1000, show(result)))
    print(f"  {name:<34}{steps[-1][1]:>9.1f} ms   {steps[-1][2]}", file=sys.stderr, flush=True)
    return result


def milliseconds(name: str) -> float:
    return round(next(ms for step_name, ms, _ in steps if step_name == name), 1)


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: expected {wanted!r}, got {got!r}")


def talk_to_shell(sandbox: Sandbox) -> str:
    """Open a terminal, type a line, and read until the shell has left."""
    shell: CommandHandle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=30)
    sandbox.pty.send_stdin(shell.pid, b"echo sum is $((40 + 2)); exit\n")
    seen = b""
    for _, _, data in shell:
        seen += data or b""
    if b"sum is 42" not in seen:
        raise AssertionError(f"the terminal printed {seen!r}")
    return "sum is 42"


def run() -> None:
    sandbox = step("create from base", lambda: Sandbox.create("base", timeout=120), lambda s: s.sandbox_id)
    try:
        step("first command", lambda: sandbox.commands.run("true"))
        out = step(
            "command", lambda: sandbox.commands.run("whoami; pwd; uname -r"), lambda r: " ".join(r.stdout.split())
        )
        expect("user and directory", out.stdout.split()[:2], ["user", "/home/user"])
        server = step(
            "background command",
            lambda: sandbox.commands.run("exec python -m http.server 8000", background=True, timeout=0),
            lambda handle: f"pid {handle.pid}",
        )
        step("write a file", lambda: sandbox.files.write("notes/hello.txt", "hello from outside\n"))
        text = step("read it back", lambda: sandbox.files.read("notes/hello.txt"), str.strip)
        expect("file content", text, "hello from outside\n")
        names = step("list the directory", lambda: [e.name for e in sandbox.files.list("notes")], " ".join)
        expect("directory", names, ["hello.txt"])
        step("terminal", lambda: talk_to_shell(sandbox), str)

        step("pause", sandbox.pause)
        expect("running while paused", sandbox.is_running(), False)
        resumed = step("resume", lambda: Sandbox.connect(sandbox.sandbox_id, timeout=120), lambda s: s.sandbox_id)
        expect("sandbox after resume", resumed.sandbox_id, sandbox.sandbox_id)
        pids = step("processes after resume", lambda: [p.pid for p in resumed.commands.list()], str)
        expect("background command still runs", server.pid in pids, True)
        text = step("file after resume", lambda: resumed.files.read("notes/hello.txt"), str.strip)
        expect("file content", text, "hello from outside\n")
    finally:
        step("kill", sandbox.kill)
    expect("running after kill", sandbox.is_running(), False)


def main() -> int:
    ok = True
    try:
        run()
    except Exception:
        traceback.print_exc()
        ok = False
    result: dict[str, Any] = {"ok": ok}
    if ok:
        result |= {
            "create_ms": milliseconds("create from base"),
            "first_command_ms": milliseconds("first command"),
            "pause_ms": milliseconds("pause"),
            "resume_ms": milliseconds("resume"),
        }
    print(json.dumps(result), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
