"""TLS for the server: HTTP/1.1 only, said by ALPN."""

from __future__ import annotations

import ssl
from pathlib import Path

from aenv.errors import InvalidInputError


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A context from a PEM certificate chain and its key; TLS 1.2 or newer. Raises InvalidInputError."""
    for name, path in (("cert", cert), ("key", key)):
        if not path.is_file():
            raise InvalidInputError(name, f"no such file: {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client that finds no common protocol is refused in the handshake; without ALPN, HTTP/1.1 is understood.
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidInputError("cert", f"cannot use {cert} with {key}: {error}") from error
    return context
