"""Answers requests on the serial line: `{"test": "module.function"}` runs one test, `{"run": …}` a shell command."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import termios
import time
import traceback
import tty
from pathlib import Path
from typing import Any


def run_test(name: str) -> dict[str, Any]:
    module, _, function = name.rpartition(".")
    folder = Path(tempfile.mkdtemp(dir="/data"))
    began = time.monotonic()
    try:
        getattr(importlib.import_module(f"inside.{module}"), function)(folder)
        failure = None
    except BaseException:
        failure = traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"test": name, "failure": failure, "seconds": round(time.monotonic() - began, 2)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "test" in request:
        return run_test(request["test"])
    if "call" in request:
        module, _, function = request["call"].rpartition(".")
        try:
            return {"result": getattr(importlib.import_module(f"inside.{module}"), function)(*request["arguments"])}
        except BaseException:
            return {"failure": traceback.format_exc()}
    done = subprocess.run(request["run"], shell=True, check=False, capture_output=True, text=True)
    return {"status": done.returncode, "output": done.stdout + done.stderr}


def main() -> None:
    for fd in (0, 1):
        tty.setraw(fd, termios.TCSANOW)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("/dev/console", os.O_WRONLY), 1)  # what tests print goes to the console
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


main()
