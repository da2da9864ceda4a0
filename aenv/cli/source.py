"""Standard input as chunks for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque

CHUNK = 32 * 1024  # bytes
AHEAD = 16  # chunks read before anyone asks for them


class Source:
    """Reads a descriptor in a thread of its own.

    Not by the loop: that would make the open file non-blocking, and our caller's terminal or pipe is the same open
    file. The thread may block for ever in its read, so nobody waits for it; it ends with the process.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = threading.Semaphore(AHEAD)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def read(self) -> bytes:
        """All that has arrived, at least one byte; nothing at the end of the input."""
        await self._arrived.wait()
        data = bytearray()
        while self._chunks and self._chunks[0]:
            data += self._chunks.popleft()
            self._room.release()
        if not self._chunks:
            self._arrived.clear()
        return bytes(data)

    def _read(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants it any more
            while True:
                self._room.acquire()
                try:
                    data = os.read(self._fd, CHUNK)
                except OSError:  # a terminal that went away says EIO
                    data = b""
                self._loop.call_soon_threadsafe(self._arrive, data)
                if not data:
                    return

    def _arrive(self, data: bytes) -> None:
        self._chunks.append(data)
        self._arrived.set()
