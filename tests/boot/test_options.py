"""How guest/init reads the command line and words of files, with sanitizers, against a model in Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.boot.conftest import COMPILE, ROOT

KEYS = ["ip4", "gw4", "ip6", "gw6", "gwmac", "dns", "hostname", "rootflags", "init"]  # in the order printed


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("options") / "reader"
    parts = [ROOT / "guest/init" / f"{name}.c" for name in ("options", "files", "log")]
    sources = [Path(__file__).with_name("options_reader.c"), *parts]
    flags = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-o", str(out)]
    subprocess.run([*COMPILE, *flags, *map(str, sources)], check=True)
    return out


def ask(reader: Path, records: list[bytes]) -> list[bytes]:
    result = subprocess.run([str(reader)], input=b"".join(r + b"\0" for r in records), capture_output=True, check=True)
    return result.stdout.split(b"\0")[:-1]


def model(line: bytes) -> bytes:
    values = dict.fromkeys(KEYS, b"")
    for word in line.replace(b"\n", b" ").split(b" "):
        name, equals, value = word.partition(b"=")
        key = name.removeprefix(b"aenv.").decode("latin-1")
        if name.startswith(b"aenv.") and equals and key in values and len(value) < 256:
            values[key] = value
    return b"|".join(values.values())


names = st.sampled_from([f"aenv.{k}".encode() for k in KEYS] + [b"aenv.", b"aenv.ip", b"ip4", b"quiet", b"aenv.ip44"])
plain = st.binary(max_size=20).map(lambda b: b.replace(b"\0", b"").replace(b"|", b""))
word = st.one_of(
    plain,
    names,
    st.builds(lambda n, v: n + b"=" + v, names, plain),
    st.builds(lambda n, size: n + b"=" + b"x" * size, names, st.sampled_from([0, 1, 254, 255, 256, 257, 3000])),
)
line = st.lists(word, max_size=12).map(b" ".join)


@settings(max_examples=60)
@given(st.lists(line, min_size=1, max_size=20))
def test_command_line_as_the_model_reads_it(reader: Path, lines: list[bytes]) -> None:
    assert ask(reader, [b"o" + text for text in lines]) == [model(text) for text in lines]


@pytest.mark.parametrize(
    ("word", "text", "there"),
    [
        (b"localhost", b"127.0.0.1 localhost\n", True),
        (b"localhost", b"127.0.0.1\tlocalhost", True),
        (b"localhost", b"127.0.0.1 localhost.local\n", False),
        (b"localhost", b"#localhost\n # localhost\n", False),
        (b"localhost", b"1.2.3.4 x # localhost\nlocalhost", True),
        (b"localhost", b"1.2.3.4 localhost#x\n", True),
        (b"localhost", b"", False),
        (b"nameserver", b"\r\nnameserver\r\n", True),
        (b"nameserver", b"search nameservers", False),
    ],
)
def test_words_of_a_file(reader: Path, word: bytes, text: bytes, there: bool) -> None:
    assert ask(reader, [b"w" + word + b"\n" + text]) == [b"1" if there else b"0"]


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\0", b"")), max_size=20))
def test_any_text_is_read_to_its_end_and_no_further(reader: Path, texts: list[bytes]) -> None:
    answers = ask(reader, [b"wx\n" + text for text in texts])
    assert len(answers) == len(texts)
