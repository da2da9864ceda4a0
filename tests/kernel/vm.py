"""The test machine: QEMU without KVM, and two serial ports. The first shows the console; on the second a request is one
line of JSON, and so is its answer."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from aenv.boot.cmdline import host_tsc_khz
from aenv.boot.kernel import Kernel

MEMORY_MIB = 1024
BOOT_SECONDS = 120


def command_line() -> str:
    return (
        "console=ttyS0 quiet loglevel=4 panic=-1 nowatchdog cryptomgr.notests random.trust_cpu=on mitigations=off "
        f"norandmaps tsc_early_khz={host_tsc_khz()} tsc=reliable rdinit=/init"
    )


class Machine:
    """`parallel`: a thread of the host for each vCPU. One may then run code that the other has just patched, and the
    kernel panics (`Oops: int3`), as a rule while it boots: that is for measurements only."""

    def __init__(
        self, kernel: Kernel, initramfs: Path, root: Path, data: Path, folder: Path, *, parallel: bool = False
    ) -> None:
        self._console = folder / "console"
        path = folder / "serial"
        listening = socket.socket(socket.AF_UNIX)
        with listening:
            listening.bind(str(path))
            listening.listen(1)
            self._process = subprocess.Popen(
                [
                    "qemu-system-x86_64", "-accel", f"tcg,thread={'multi' if parallel else 'single'}", "-M", "q35",
                    "-smp", "2",
                    # With ERMS the kernel copies to user space by `rep movsb`, which is emulated byte by byte.
                    "-cpu", "max,erms=off", "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-no-reboot",
                    "-display", "none",
                    "-kernel", str(kernel.boot_image), "-initrd", str(initramfs), "-append", command_line(),
                    "-serial", f"file:{self._console}", "-serial", f"unix:{path}",
                    *self._disk("root", root, "cache.no-flush=on"), *self._disk("data", data, "cache.no-flush=on"),
                ], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            listening.settimeout(BOOT_SECONDS)
            self._socket, _ = listening.accept()
        self._buffer = b""
        try:
            ready = self.read(BOOT_SECONDS)
            assert ready.get("ready"), ready
        except BaseException:
            self.end()
            raise

    @staticmethod
    def _disk(name: str, path: Path, options: str) -> list[str]:
        return [
            "-blockdev", f"driver=raw,node-name={name},{options},file.driver=file,file.filename={path}",
            "-device", f"virtio-blk-pci,drive={name}",
        ]  # fmt: skip

    def console(self) -> str:
        return self._console.read_text(errors="replace")[-4000:]

    def read(self, patience: float) -> dict[str, Any]:
        """The next line. Fails with the end of the console if the machine ends, or says nothing for so many seconds."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready = select.select([self._socket], [], [], left)[0] if left > 0 else []
            chunk = self._socket.recv(65536) if ready else b""
            if not chunk:
                what = "ended" if ready else f"has not answered for {patience} s"
                raise AssertionError(f"the test machine {what}; its console:\n{self.console()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def request(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self.read(patience)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
