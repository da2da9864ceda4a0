"""The root file system of the template `base` in a real guest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from aenv.boot.initramfs import build_initramfs
from aenv.boot.kernel import Kernel
from aenv.template.rootfs import build_rootfs
from tests.boot.conftest import ROOT, Boot, Guest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages are kept between runs, where AENV_TEST_CACHE says; the first run needs the package mirror."""
    cache = os.environ.get("AENV_TEST_CACHE", str(Path(tempfile.gettempdir()) / "aenv-test-cache"))
    path = tmp_path_factory.mktemp("base") / "rootfs.ext4"
    build_rootfs(path, Path(cache) / "rootfs", print)
    return path


@pytest.fixture
def guest(boot: Boot, image: Path) -> Guest:
    guest = boot(None, disk=image, memory_mib=512, hostname="box")
    guest.wait_health()
    return guest


def test_what_people_expect_of_a_sandbox(guest: Guest) -> None:
    def user(command: str) -> str:
        return guest.shell(f"cd /home/user && runuser -u user -- /bin/bash -l -c '{command}' 2>&1").strip()

    assert user("id -un; id -u; pwd; echo ~").split() == ["user", "1000", "/home/user", "/home/user"]
    assert user("sudo id -u") == "0", "password-less, and no word about an unknown host name"
    assert user('export FOO=bar; sudo sh -c "echo [\\$FOO]"') == "[]", "sudo resets the environment"
    assert user("python --version").startswith("Python 3.")
    assert user('python3 -c "import ssl, sqlite3, json; print(1)"') == "1"
    for program in ("git", "curl", "ps", "ip", "bash", "nano", "less", "pip"):
        assert user(f"command -v {program}").startswith("/"), program
    assert user("echo $LANG") == "C.UTF-8"
    assert user("ping -c1 -W5 127.0.0.1").count("1 received") == 1
    assert user("git init -q repo && echo done") == "done"
    assert user("ls -ld ~/repo").split()[2:4] == ["user", "user"]
    assert user("tty >/dev/null; stat -c %a /dev/pts/ptmx /tmp /dev/shm /run").split() == ["666", "1777", "1777", "755"]


def test_an_idle_sandbox_has_no_work(guest: Guest) -> None:
    assert "ext4lazyinit" not in guest.shell("ps -e"), "the file system was initialised when it was made"
    assert guest.shell("cat /etc/machine-id") == ""
    assert "nameserver" in guest.shell("cat /etc/resolv.conf")
    assert guest.shell("cat /etc/hostname").strip() == "box"


def test_it_powers_off(guest: Guest) -> None:
    guest.shell("(sleep 0.3; kill -TERM 1) >/dev/null &")
    assert "powering off" in guest.wait_exit()


def test_the_real_envd_answers(boot: Boot, image: Path, kernel: Kernel, tmp_path: Path) -> None:
    """The programs as they are shipped, not the stand-in."""
    shipped = ROOT / "aenv/_guest"
    initramfs = build_initramfs(kernel, shipped / "init", shipped / "envd", tmp_path)
    guest = boot(None, disk=image, memory_mib=512, initramfs=initramfs)
    guest.wait_health()
    guest.wait_serial("aenv-init: ready in ")
