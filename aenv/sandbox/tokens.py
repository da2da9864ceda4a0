"""Tokens of one sandbox, derived from a node secret, so that none is stored and none opens another sandbox."""

from __future__ import annotations

import hashlib
import hmac


class Tokens:
    """HMAC-SHA256 of the sandbox id under the node secret, one label a purpose; 64 hex digits."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def envd(self, sandbox_id: str) -> str:
        """Opens the guest agent of a secure sandbox."""
        return self._derive("envd", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """Opens the other ports of a sandbox that is not public."""
        return self._derive("traffic", sandbox_id)

    def _derive(self, purpose: str, sandbox_id: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{sandbox_id}".encode(), hashlib.sha256).hexdigest()
