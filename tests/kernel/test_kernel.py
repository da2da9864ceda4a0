"""Where the kernel with ublk comes from on a host whose own package lists have none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernel.kernel import DEFAULT_MIRROR, KEYRING, host_mirror, private_apt


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sources.list", "deb http://mirror.test/debian bookworm main\n", "http://mirror.test/debian"),
        ("sources.list", "deb [arch=amd64] https://mirror.test/debian/ bookworm main\n", "https://mirror.test/debian"),
        ("sources.list", "# deb http://old.test/debian bookworm main\n", DEFAULT_MIRROR),
        ("sources.list", "deb http://mirror.test/debian-security bookworm-security main\n", DEFAULT_MIRROR),
        (
            "sources.list.d/debian.sources",
            "Types: deb\nURIs: http://m.test/debian\nSuites: x\n",
            "http://m.test/debian",
        ),
        ("sources.list.d/other.list", "deb http://other.test/apt stable main\n", DEFAULT_MIRROR),
    ],
)
def test_mirror_of_the_host(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    assert host_mirror(tmp_path) == expected


def test_private_apt_has_state_of_its_own_and_believes_only_the_archive_keys(tmp_path: Path) -> None:
    configuration = private_apt(tmp_path, "http://mirror.test/debian")
    command = ["apt-config", "dump"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"APT_CONFIG": str(configuration), "PATH": "/usr/bin"}
    )
    settings = dict(line.rstrip(";").split(" ", 1) for line in done.stdout.splitlines())
    for name in ("Dir::State::lists", "Dir::Cache", "Dir::Etc::sourcelist", "Dir::Etc::sourceparts"):
        assert settings[name].strip('"').startswith(str(tmp_path))
    assert KEYRING.is_file()
    for line in (tmp_path / "sources.list").read_text().splitlines():
        assert f"[signed-by={KEYRING}] http://mirror.test/debian trixie" in line
