"""The smallest FUSE file system: one empty directory. It stands for a network mount, or for a slow disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import subprocess
import threading
from pathlib import Path
from types import TracebackType

LOOKUP, GETATTR, SETATTR, STATFS, INIT, FORGET, INTERRUPT = 1, 3, 4, 17, 26, 2, 36  # opcodes of linux/fuse.h
ROOT_ATTRIBUTES = struct.pack("<QII", 0, 0, 0) + struct.pack(
    "<6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0
)
ANSWERS = {
    INIT: struct.pack("<IIIIHHIIHHI28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 16, 0, 0),
    GETATTR: ROOT_ATTRIBUTES,
    SETATTR: ROOT_ATTRIBUTES,
    STATFS: struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0),
}


class EmptyFuse:
    """Mounted for the time of a with-block. Who looks a name up in it waits until `gate` is set."""

    def __init__(self, where: Path, gate: threading.Event | None = None) -> None:
        self.where = where
        self.gate = gate
        self.device = os.open("/dev/fuse", os.O_RDWR)
        self.server = threading.Thread(target=self._serve)

    def __enter__(self) -> EmptyFuse:
        os.set_inheritable(self.device, True)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0"
        subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "empty", self.where], check=True, close_fds=False)
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.gate:
            self.gate.set()
        subprocess.run(["umount", "-l", self.where], check=True)
        self.server.join()
        os.close(self.device)

    def _serve(self) -> None:
        """Until the kernel says ENODEV: unmounted."""
        with contextlib.suppress(OSError):
            while request := os.read(self.device, 1 << 20):
                opcode, unique = struct.unpack_from("<4xIQ", request)
                if opcode in (FORGET, INTERRUPT):
                    continue
                if opcode == LOOKUP and self.gate:
                    self.gate.wait()
                answer = ANSWERS.get(opcode)
                body = answer or b""
                error = 0 if answer else -errno.ENOSYS
                os.write(self.device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
