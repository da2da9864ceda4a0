"""`make demo`: a private daemon in a temporary home, and `examples/quickstart.py` against it with the real E2B SDK.

Everything it makes goes away at the end but the caches (kernel, root file system) in ~/.cache/aenv or AENV_CACHE. The
sandboxes have no way out (network.uplink none).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AENV = Path(sys.executable).with_name("aenv")
ROOT = Path(__file__).parent.parent
STOP_SECONDS = 60


def say(text: str) -> None:
    print(f"\033[1m==>\033[0m {text}", file=sys.stderr, flush=True)


def as_root() -> list[str]:
    """Taps and namespaces need root."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is None:
        sys.exit("demo: root is needed for taps and namespaces, and there is no sudo")
    return ["sudo", "--preserve-env=AENV_CACHE,AENV_NETWORK_UPLINK,AENV_VMM_KIND"]


def wait_for_daemon(daemon: subprocess.Popen[str]) -> dict[str, str]:
    """`aenv serve --json` prints one line when it listens."""
    assert daemon.stdout is not None
    line = daemon.stdout.readline()
    if not line:
        sys.exit(f"demo: the daemon ended with status {daemon.wait()}")
    return dict(json.loads(line))


def stop(daemon: subprocess.Popen[str]) -> None:
    subprocess.run([*as_root(), "kill", "-TERM", str(daemon.pid)], check=False)
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        subprocess.run([*as_root(), "kill", "-KILL", str(daemon.pid)], check=False)
        daemon.wait()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    home = tempfile.mkdtemp(prefix="aenv-demo-")
    environment = os.environ | {
        "AENV_NETWORK_UPLINK": "none",
        "AENV_CACHE": os.environ.get("AENV_CACHE") or str(Path.home() / ".cache/aenv"),
    }
    os.environ.update(environment)
    daemon: subprocess.Popen[str] | None = None
    try:
        say("base template: kernel, root file system, one boot, one snapshot (minutes the first time)")
        subprocess.run([*as_root(), AENV, "--home", home, "template", "build", "base"], check=True, stdout=sys.stderr)
        say("daemon")
        command = [
            *as_root(),
            AENV,
            "--home",
            home,
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--log-level",
            "warning",
        ]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        where = wait_for_daemon(daemon)
        say(f"examples/quickstart.py with the E2B SDK at {where['url']} ({where['vmm']})")
        sdk = {"E2B_API_URL": where["url"], "E2B_SANDBOX_URL": where["url"], "E2B_API_KEY": where["api_key"]}
        clean = {k: v for k, v in environment.items() if not k.startswith("E2B_")}
        quickstart = subprocess.run(
            [sys.executable, ROOT / "examples/quickstart.py"],
            env=clean | sdk,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        result = {"ok": False, **json.loads(quickstart.stdout.splitlines()[-1])} if quickstart.stdout else {"ok": False}
        stop(daemon)
        result["ok"] = result["ok"] and quickstart.returncode == 0 and daemon.returncode == 0
    except subprocess.CalledProcessError as error:
        print(f"demo: {error}", file=sys.stderr)
        print(json.dumps({"ok": False}))
        return 1
    finally:
        if daemon is not None and daemon.poll() is None:
            stop(daemon)
        subprocess.run([*as_root(), "rm", "-rf", home], check=False)
    say(f"done in {time.monotonic() - began:.0f} s")
    print(json.dumps({"ok": result.pop("ok"), "vmm": where["vmm"], **result}))
    return 0 if quickstart.returncode == 0 and daemon.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
