"""guest/init in real guests: what the console says, what the agent sees, how the machine ends."""

from __future__ import annotations

import http.client
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv.boot import cmdline
from aenv.boot.initramfs import MODULES, assemble
from aenv.boot.kernel import Kernel
from aenv.boot.modules import ModuleTree
from aenv.network.base import GUEST_ADDRESS6, HOST_ADDRESS, HOST_ADDRESS6, TAP_MAC
from tests.boot.conftest import Boot

pytestmark = pytest.mark.vm
CONNECTION_ENDS = (OSError, http.client.HTTPException)


@pytest.mark.parametrize("form", ["vmlinux", "vmlinuz"])
def test_boots_and_serves_on_both_families(boot: Boot, kernel: Kernel, busybox_tree: Path, form: str) -> None:
    guest = boot(busybox_tree, image=getattr(kernel, form), hostname="box-1")
    guest.wait_health()
    guest.wait_health(GUEST_ADDRESS6)
    console = guest.wait_serial("aenv-init: ready in ")
    assert re.search(r"^aenv-init: ready in \d+ ms\r?$", console, re.MULTILINE)
    assert "fatal" not in console


def test_the_world_inside(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree, hostname="box-1", dns=("9.9.9.9", "2620:fe::fe"))
    guest.wait_health()
    mounts = {line.split()[1]: line.split() for line in guest.shell("cat /proc/mounts").splitlines()}
    assert {"/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/sys/fs/cgroup"} <= mounts.keys()
    assert mounts["/"][:3] == ["/dev/vda", "/", "ext4"]
    assert mounts["/sys/fs/cgroup"][2] == "cgroup2"
    assert "memory" in guest.shell("cat /sys/fs/cgroup/cgroup.subtree_control")

    assert guest.shell("hostname").strip() == "box-1"
    assert "box-1" in guest.shell("cat /etc/hosts")
    assert "localhost" in guest.shell("cat /etc/hosts")
    assert guest.shell("cat /etc/resolv.conf") == "nameserver 9.9.9.9\nnameserver 2620:fe::fe\n"

    neighbours = guest.shell("ip neigh")
    for gateway in (HOST_ADDRESS, HOST_ADDRESS6):
        assert re.search(rf"^{gateway} dev eth0 lladdr {TAP_MAC} .*PERMANENT$", neighbours, re.MULTILINE)
    assert f"default via {HOST_ADDRESS} dev eth0" in guest.shell("ip route")
    assert f"default via {HOST_ADDRESS6} dev eth0" in guest.shell("ip -6 route")
    assert "tentative" not in guest.shell("ip addr")

    for link in ("fd", "stdin", "stdout", "stderr"):
        assert guest.shell(f"readlink /dev/{link}").strip()
    assert guest.shell("cat /proc/self/oom_score_adj").strip() == "-1000"  # the agent's; it resets its children's
    assert guest.shell("ls /").split() == sorted(["bin", "dev", "etc", "lost+found", "proc", "run", "sys", "tmp"]), (
        "nothing of the initramfs may show in the image"
    )


def test_init_is_small(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree)
    guest.wait_health()
    resident = int(guest.shell("grep VmRSS /proc/1/status").split()[1])
    assert resident < 1200  # KiB


def test_an_image_with_nothing_in_it(boot: Boot, tmp_path: Path) -> None:
    empty = tmp_path / "nothing"
    empty.mkdir()
    guest = boot(empty)
    guest.wait_health()


def test_agent_is_started_again(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree)
    for death in range(3):
        guest.wait_health()
        with pytest.raises(CONNECTION_ENDS):
            guest.request("GET", "/die")
        guest.wait_serial(f"envd exited with status 3; restart in {[0, 100, 200][death]} ms")
    guest.wait_health()


def test_orphans_are_reaped(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree)
    guest.wait_health()
    guest.shell("for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
    guest.shell("sleep 0.5")
    states = guest.shell("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z 1 '")
    assert states.strip() == "0"


@pytest.mark.parametrize("signal", ["TERM", "INT"])
def test_powers_off_cleanly(boot: Boot, busybox_tree: Path, tmp_path: Path, signal: str) -> None:
    guest = boot(busybox_tree)
    guest.wait_health()
    guest.shell("echo kept > /etc/kept")
    guest.shell(f"(sleep 0.3; kill -{signal} 1) >/dev/null &")
    assert "aenv-init: powering off" in guest.wait_exit()
    assert guest.process.returncode == 0
    (disk,) = tmp_path.glob("disk-*")
    check = subprocess.run(["e2fsck", "-fn", str(disk)], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    assert "recover" not in check.stdout  # the journal is empty
    kept = subprocess.run(["debugfs", "-R", "cat /etc/kept", str(disk)], capture_output=True, text=True, check=False)
    assert kept.stdout == "kept\n"


def test_files_of_the_image_win(boot: Boot, busybox_tree: Path) -> None:
    (busybox_tree / "etc/hosts").write_text("127.0.0.1 localhost\n10.0.0.1 theirs")
    (busybox_tree / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (busybox_tree / "etc/hostname").write_text("theirs\n")
    guest = boot(busybox_tree)
    guest.wait_health()
    assert guest.shell("cat /etc/hosts") == "127.0.0.1 localhost\n10.0.0.1 theirs"
    assert guest.shell("cat /etc/resolv.conf") == "nameserver 192.0.2.1\n"
    assert guest.shell("hostname").strip() == "theirs"


def test_dangling_resolver_is_replaced(boot: Boot, busybox_tree: Path) -> None:
    (busybox_tree / "etc/resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
    (busybox_tree / "etc/hosts").write_text("# localhost sandbox\n10.0.0.1 theirs")  # comments do not count
    guest = boot(busybox_tree)
    guest.wait_health()
    assert "nameserver 8.8.8.8" in guest.shell("cat /etc/resolv.conf")
    assert guest.shell("cat /etc/hosts").splitlines()[1:] == [
        "10.0.0.1 theirs",
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost ip6-localhost ip6-loopback",
        "127.0.1.1\tsandbox",
    ]


@pytest.mark.parametrize("turn", [0, 1])
def test_odd_files_in_etc_do_not_stop_the_boot(boot: Boot, busybox_tree: Path, turn: int) -> None:
    kinds: list[Callable[[Path], None]] = [os.mkfifo, Path.mkdir, _make_endless_device]
    for number, name in enumerate(("resolv.conf", "hosts", "hostname")):
        kinds[(number + turn) % 3](busybox_tree / "etc" / name)
    guest = boot(busybox_tree, hostname="box")
    guest.wait_health()
    assert guest.shell("hostname").strip() == "box"


def _make_endless_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


@pytest.mark.parametrize("last_word", ["reboot", "poweroff"])
def test_image_init_runs_as_process_one_of_its_namespace(boot: Boot, busybox_tree: Path, last_word: str) -> None:
    init = busybox_tree / "sbin/init"
    init.parent.mkdir()
    init.write_text(
        "#!/bin/sh\necho $$ $container > /run/own\nmount -t tmpfs none /mnt\necho seen > /mnt/file\n"
        "while [ ! -e /run/stop ]; do sleep 0.1; done\n"
        f"busybox {last_word} -f\n"
    )
    init.chmod(0o755)
    (busybox_tree / "mnt").mkdir()
    guest = boot(busybox_tree, init="/sbin/init")
    guest.wait_health()
    guest.wait_serial("started /sbin/init")
    assert guest.shell("for i in 1 2 3 4 5 6 7 8 9; do [ -s /mnt/file ] && break; sleep 0.5; done; cat /run/own") == (
        "1 aenv\n"
    )
    assert guest.shell("cat /mnt/file") == "seen\n", "its mounts show in the sandbox"
    assert guest.shell("readlink /proc/1/exe").strip() != "/bin/busybox", "but its /proc does not"
    guest.shell("echo > /run/stop")
    assert "powering off" in guest.wait_exit()


def test_image_init_that_is_missing_does_no_harm(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree, init="/no/such/init")
    guest.wait_serial("run /no/such/init: No such file or directory")
    guest.wait_health()


@pytest.mark.parametrize(
    "words",
    [
        {
            "aenv.ip4=300.1.1.1/30": "not an address: 300.1.1.1/30",
            "aenv.gw6=nonsense": "not a gateway address: nonsense",
            "aenv.hostname=-x": "not a host name: -x",
            "aenv.dns=1.1.1.1,evil%20x": "not a name server's address: evil%20x",
        },
        {
            "aenv.ip6=1.2.3.4/33": "not an address: 1.2.3.4/33",
            "aenv.gwmac=02:ae:00": "not a MAC address: 02:ae:00",
            "aenv.hostname=" + "x" * 240: "not a host name: xxx",
            "aenv.dns=" + "1" * 300: "aenv.dns is too long, ignored",
        },
    ],
)
def test_bad_words_are_told_and_survived(
    boot: Boot, busybox_tree: Path, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmdline, "_checked", lambda field, word: word)  # the host refuses some of them itself
    console = boot(busybox_tree, extra=list(words)).wait_serial(
        "aenv-init: ready in "
    )  # the last of equal words counts
    for said in words.values():
        assert said in console


def test_no_disk_is_fatal_and_says_why(boot: Boot) -> None:
    console = boot(None).wait_exit()
    assert "aenv-init: mount the root disk /dev/vda: No such file or directory" in console
    assert "fatal" in console


def test_disk_without_file_system_is_fatal(boot: Boot, tmp_path: Path) -> None:
    blank = tmp_path / "blank"
    with blank.open("wb") as file:
        file.truncate(16 << 20)
    assert "aenv-init: mount the root disk /dev/vda: Invalid argument" in boot(None, disk=blank).wait_exit()


def test_agent_that_cannot_be_executed_is_fatal(
    boot: Boot, kernel: Kernel, busybox_tree: Path, programs: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.cpio"
    modules = ModuleTree(kernel.modules_dir).resolve(MODULES)
    broken.write_bytes(assemble(programs[0].read_bytes(), b"no program", modules))
    assert "start envd: Exec format error" in boot(busybox_tree, initramfs=broken).wait_exit()


def test_two_processors(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree, vcpus=2)
    guest.wait_health()
    assert guest.shell("grep -c ^processor /proc/cpuinfo").strip() == "2"


def test_a_kernel_panic_ends_the_machine(boot: Boot, busybox_tree: Path) -> None:
    guest = boot(busybox_tree)
    guest.wait_health()
    guest.shell("(sleep 0.3; echo c > /proc/sysrq-trigger) >/dev/null &")
    assert "Kernel panic" in guest.wait_exit()
