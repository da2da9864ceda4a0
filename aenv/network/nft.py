"""libnftables through cffi: run a script of nft commands as one atomic transaction.

The library opens its netlink socket when a context is made (`nft_ctx_new`, libnftables(3)), so `Nft.run` makes a
context for each call in whatever namespace the thread is in, and must be called from a worker thread.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import cffi

from aenv.errors import UnavailableError

LIBRARY = "libnftables.so.1"
_DECLARATIONS = """
struct nft_ctx;
struct nft_ctx *nft_ctx_new(uint32_t flags);
void nft_ctx_free(struct nft_ctx *ctx);
int nft_ctx_buffer_output(struct nft_ctx *ctx);
int nft_ctx_buffer_error(struct nft_ctx *ctx);
const char *nft_ctx_get_output_buffer(struct nft_ctx *ctx);
const char *nft_ctx_get_error_buffer(struct nft_ctx *ctx);
int nft_run_cmd_from_buffer(struct nft_ctx *nft, const char *buf);
"""


class Nft:
    """The loaded library. Raises UnavailableError when it is not installed."""

    def __init__(self) -> None:
        # libnftables(3) promises nothing about threads, and its parser and caches have had global state.
        self._lock = threading.Lock()
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        try:
            self._library: Any = self._ffi.dlopen(LIBRARY)
        except OSError as error:
            raise UnavailableError(f"{LIBRARY} cannot be loaded", hint="apt-get install libnftables1") from error

    def run(self, script: str) -> str:
        """Run nft commands in the calling thread's namespace: all of them take effect, or none. Returns the output.

        Raises UnavailableError with nft's own message. Blocks for milliseconds; calls wait for each other.
        """
        with self._lock:
            return self._run(script)

    def _run(self, script: str) -> str:
        library, text = self._library, self._text
        context = library.nft_ctx_new(0)
        if context == self._ffi.NULL:
            raise UnavailableError("nft: cannot make a context")
        try:
            if library.nft_ctx_buffer_output(context) or library.nft_ctx_buffer_error(context):
                raise UnavailableError("nft: out of memory")
            if library.nft_run_cmd_from_buffer(context, script.encode()) != 0:
                raise self._refused(text(library.nft_ctx_get_error_buffer(context)))
            return text(library.nft_ctx_get_output_buffer(context))
        finally:
            library.nft_ctx_free(context)

    def _text(self, pointer: Any) -> str:
        return "" if pointer == self._ffi.NULL else bytes(self._ffi.string(pointer)).decode(errors="replace")

    def _refused(self, errors: str) -> UnavailableError:
        """nft prints a message, the line it is about, and a row of carets; a line can be a thousand addresses long."""
        message = next((line for line in errors.splitlines() if "Error:" in line), errors.strip() or "no message")
        message = message[message.find("Error:") :].removeprefix("Error: ")[:300]
        hint = None
        if os.strerror(1) in message:
            hint = "changing the firewall needs CAP_NET_ADMIN"
        elif "not supported" in message or "No such file" in message:
            hint = "the kernel lacks a netfilter part; `aenv doctor` tells which"
        return UnavailableError(f"nft: {message}", hint=hint)
