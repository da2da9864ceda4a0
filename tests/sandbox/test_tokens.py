from __future__ import annotations

import re

from aenv.sandbox.tokens import Tokens


def test_tokens_differ_by_sandbox_purpose_and_node_and_are_stable() -> None:
    tokens, other = Tokens(b"a" * 32), Tokens(b"b" * 32)
    made = [t(s) for t in (tokens.envd, tokens.traffic, other.envd, other.traffic) for s in ("i1", "i2")]
    assert len(set(made)) == 8
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in made)
    assert Tokens(b"a" * 32).envd("i1") == tokens.envd("i1")
