"""Real guests for the tests of the boot: init of this tree, a small agent instead of envd, QEMU without KVM."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv.boot.cmdline import GuestOptions, kernel_cmdline
from aenv.boot.initramfs import build_initramfs
from aenv.boot.kernel import Kernel, ensure_kernel
from aenv.network import namespace
from aenv.network.base import (
    GUEST_ADDRESS,
    GUEST_ADDRESS6,
    GUEST_MAC,
    HOST_ADDRESS,
    HOST_ADDRESS6,
    PREFIX_LENGTH,
    PREFIX_LENGTH6,
    TAP_MAC,
    TAP_NAME,
)
from aenv.template.rootfs import make_image
from aenv.vmm.base import VmmKind
from tests.leftovers import CLAIMS

ROOT = Path(__file__).parents[2]
PORT = 49983
PATIENCE = 60.0  # seconds that an emulated guest on a busy machine may take for anything
COMPILE = ["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]


def link_static(sources: list[Path], out: Path) -> Path:
    subprocess.run([*COMPILE, "-static", "-o", str(out), *map(str, sources)], check=True)
    subprocess.run(["strip", str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    """The kernel package is 35 MB: it is kept between runs, where AENV_TEST_CACHE says."""
    cache = os.environ.get("AENV_TEST_CACHE", str(Path(tempfile.gettempdir()) / "aenv-test-cache"))
    return ensure_kernel(Path(cache), print)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """init and the stand-in for envd."""
    folder = tmp_path_factory.mktemp("guest")
    init = link_static(sorted((ROOT / "guest/init").glob("*.c")), folder / "init")
    return init, link_static([Path(__file__).with_name("agent.c")], folder / "agent")


@pytest.fixture(scope="session")
def initrd(kernel: Kernel, programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_initramfs(kernel, *programs, tmp_path_factory.mktemp("initramfs"))


@pytest.fixture
def busybox_tree(tmp_path: Path) -> Path:
    """A root file system of one program."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "etc").mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None, "apt-get install busybox-static"
    shutil.copy(busybox, tree / "bin/busybox")
    for name in ("sh", "cat", "ls", "ip", "ps", "kill", "mount", "grep", "sleep", "hostname", "ping", "readlink"):
        (tree / "bin" / name).symlink_to("busybox")
    return tree


class Guest:
    """A running guest on a tap in a namespace of its own."""

    def __init__(self, process: subprocess.Popen[bytes], netns: int, serial: Path) -> None:
        self.process, self._netns, self._serial = process, netns, serial

    def serial(self) -> str:
        return self._serial.read_text(errors="replace") if self._serial.exists() else ""

    def wait_serial(self, text: str) -> str:
        self._until(lambda: text in self.serial(), f"{text!r} on the console")
        return self.serial()

    def wait_exit(self) -> str:
        self._until(lambda: self.process.poll() is not None, "the end of the machine", alive=False)
        return self.serial()

    def _until(self, done: Callable[[], bool], what: str, *, alive: bool = True) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > deadline or (alive and self.process.poll() is not None):
                pytest.fail(f"no {what}; console:\n{self.serial()[-3000:]}")
            time.sleep(0.02)  # the console is a file: there is no event to wait for

    def request(self, method: str, path: str, body: bytes | None = None, *, address: str = GUEST_ADDRESS) -> bytes:
        connection = http.client.HTTPConnection(address, PORT, timeout=PATIENCE)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection.sock = namespace.open_in(self._netns, lambda: socket.socket(family))
        try:
            connection.sock.settimeout(PATIENCE)
            connection.sock.connect((address, PORT))
            connection.request(method, path, body)
            answer = connection.getresponse()
            assert answer.status in (200, 204), answer.status
            return answer.read()
        finally:
            connection.close()

    def wait_health(self, address: str = GUEST_ADDRESS) -> None:
        def healthy() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.request("GET", "/health", address=address)
                return True
            return False

        self._until(healthy, "answer of the agent")

    def shell(self, command: str) -> str:
        return self.request("POST", "/sh", command.encode()).decode()


Boot = Callable[..., Guest]


@pytest.fixture
def boot(kernel: Kernel, initrd: Path, tmp_path: Path) -> Iterator[Boot]:
    """Starts guests: `boot(tree, hostname="x", memory_mib=256)`; a tree of None means no disk at all."""
    with contextlib.ExitStack() as stack:

        def start(tree: Path | None, *, disk: Path | None = None, memory_mib: int = 256, vcpus: int = 1,
                  image: Path | None = None, initramfs: Path = initrd, **options: object) -> Guest:  # fmt: skip
            if tree is not None:
                disk = tmp_path / f"disk-{secrets.token_hex(4)}"
                make_image(tree, disk, 64)
            netns, tap = stack.enter_context(_network())
            serial = tmp_path / f"serial-{secrets.token_hex(4)}"
            line = kernel_cmdline(VmmKind.QEMU_TCG, GuestOptions(**options))  # type: ignore[arg-type]
            disks = ["-blockdev", f"driver=file,filename={disk},node-name=disk", "-device",
                     "virtio-blk-device,drive=disk"] if disk else []  # fmt: skip
            process = subprocess.Popen(
                ["qemu-system-x86_64", "-M", "microvm,acpi=on,rtc=on,isa-serial=on", "-accel", "tcg,thread=single",
                 "-cpu", "max", "-m", str(memory_mib), "-smp", str(vcpus), "-nodefaults", "-no-user-config",
                 "-display", "none", "-no-reboot", "-chardev", f"file,id=serial,path={serial}", "-serial",
                 "chardev:serial", "-netdev", f"tap,id=net,fd={tap},vhost=off", "-device",
                 f"virtio-net-device,netdev=net,mac={GUEST_MAC}", *disks, "-kernel", str(image or kernel.boot_image),
                 "-initrd", str(initramfs), "-append", line],
                pass_fds=[tap],
            )  # fmt: skip
            stack.callback(_end, process)
            return Guest(process, netns, serial)

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextlib.contextmanager
def _network() -> Iterator[tuple[int, int]]:
    """A closed namespace with the host's end of the tap. Gives descriptors of the namespace and of the tap."""
    name = f"aenv-test-{CLAIMS.mark(secrets.token_hex(4))}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", "-n", name, *words], check=True)

    namespace.create(name)
    with contextlib.ExitStack() as stack:
        stack.callback(namespace.delete, name)
        netns = namespace.open_handle(name)
        stack.callback(os.close, netns)
        ip("tuntap", "add", TAP_NAME, "mode", "tap", "vnet_hdr")
        ip("link", "set", TAP_NAME, "address", TAP_MAC)
        ip("addr", "add", f"{HOST_ADDRESS}/{PREFIX_LENGTH}", "dev", TAP_NAME)
        ip("addr", "add", f"{HOST_ADDRESS6}/{PREFIX_LENGTH6}", "dev", TAP_NAME, "nodad")
        ip("link", "set", TAP_NAME, "up")
        ip("neigh", "replace", GUEST_ADDRESS, "lladdr", GUEST_MAC, "dev", TAP_NAME)
        ip("neigh", "replace", GUEST_ADDRESS6, "lladdr", GUEST_MAC, "dev", TAP_NAME)
        tap = namespace.open_in(netns, _open_tap)
        stack.callback(os.close, tap)
        yield netns, tap


def _open_tap() -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = 0x0002 | 0x1000 | 0x4000  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR (linux/if_tun.h)
    fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH22x", TAP_NAME.encode(), flags))  # TUNSETIFF
    return tap
