"""The root file system of the test machine: this host's own Python, tools and libraries, and the package under test."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from aenv.boot import cpio
from aenv.boot.kernel import Kernel
from aenv.boot.modules import ModuleTree

REPOSITORY = Path(__file__).parents[2]
SITE = "opt/site"  # the guest's PYTHONPATH
PACKAGES = ("click", "msgspec")  # what the block server imports besides the standard library
TOOLS = ("fio", "mke2fs", "e2fsck", "blkdiscard", "losetup")
INITRAMFS_MODULES = ("virtio_blk",)
ROOT_MODULES = ("ublk_drv", "loop", "nbd")
LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "tkinter",
    "turtledemo",
)

FIRST = """#!/bin/busybox sh
/bin/busybox mkdir -p /dev /proc /sys /new
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*.ko; do /bin/busybox insmod $module; done
/bin/busybox mount -t ext4 /dev/vda /new
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /init
"""

SECOND = f"""#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin PYTHONPATH=/{SITE} HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t ext4 /dev/vdb /data
for module in /modules/*.ko; do insmod $module; done
ifconfig lo 127.0.0.1
{{python}} -m inside </dev/ttyS1 >/dev/ttyS1
poweroff -f
"""


def build_initramfs(kernel: Kernel, out: Path) -> None:
    modules = ModuleTree(kernel.modules_dir).resolve(INITRAMFS_MODULES)
    entries = [
        cpio.directory("dev"),
        cpio.character_device("dev/console", 5, 1),
        cpio.directory("bin"),
        cpio.regular("bin/busybox", tool("busybox").read_bytes(), 0o755),
        cpio.directory("modules"),
        *(cpio.regular(f"modules/{i:02d}-{m.name}.ko", m.data) for i, m in enumerate(modules)),
        cpio.regular("init", FIRST.encode(), 0o755),
    ]
    out.write_bytes(cpio.write_archive(entries))


def build_root(kernel: Kernel, folder: Path, out: Path, more_tools: Iterable[str] = ()) -> None:
    """Fill `folder` (scratch) and make the ext4 image `out` of it."""
    root = folder / "root"
    for name in ("bin", "dev", "proc", "sys", "tmp", "run", "data", "etc", "modules", SITE):
        (root / name).mkdir(parents=True)
    for applet in ("sh", *busybox_applets()):
        (root / "bin" / applet).symlink_to("busybox")
    programs = [tool("busybox"), *(tool(name) for name in (*TOOLS, *more_tools))]
    for program in programs:
        copy_to(root / "bin" / program.name, program)
    python = copy_python(root)
    copy_site(root / SITE)
    copy_libraries(root, [*programs, *python, *(root / SITE).rglob("*.so")])
    for number, module in enumerate(ModuleTree(kernel.modules_dir).resolve(ROOT_MODULES)):
        (root / "modules" / f"{number:02d}-{module.name}.ko").write_bytes(module.data)
    copy_to(root / "init", folder / "init", SECOND.replace("{python}", str(python[0])))
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (root / "etc/mtab").symlink_to("/proc/mounts")
    used = sum(p.lstat().st_size + 4096 for p in root.rglob("*"))
    make_ext4(out, used + (used >> 3) + (32 << 20), root)


def make_ext4(path: Path, size: int, content: Path | None = None) -> None:
    with path.open("wb") as file:
        file.truncate(size >> 20 << 20)
    more = [] if content is None else ["-d", str(content)]
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=0,root_owner=0:0", *more, str(path)]
    subprocess.run(command, check=True, capture_output=True)


def tool(name: str) -> Path:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found is not None, f"there is no {name} on this host (tools/packages.txt names its package)"
    return Path(found).resolve() if name != "mke2fs" else Path(found)


def busybox_applets() -> list[str]:
    done = subprocess.run([tool("busybox"), "--list"], check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split() if name not in (*TOOLS, "busybox", "sh", "init")]


def copy_to(target: Path, source: Path, text: str | None = None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if text is None:
        shutil.copy(source, target)
    else:
        target.write_text(text)
    target.chmod(0o755)


def inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def copy_python(root: Path) -> list[Path]:
    """The interpreter, at the places where it looks for itself. Gives its ELF files, the program first."""
    program = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    copy_to(inside(root, program), program)
    shutil.copytree(
        library, inside(root, library), ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"), symlinks=False
    )
    return [program, *(library / "lib-dynload").glob("*.so")]


def copy_site(site: Path) -> None:
    """The packages under test as they are built here, what they import, and the tests that run inside."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        shutil.copytree(Path(str(spec.origin)).parent, site / name)
    only = shutil.ignore_patterns("*.c", "*.h", "*.pyx", "_guest")
    for name in ("aenv", "ublk"):
        shutil.copytree(REPOSITORY / name, site / name, ignore=only)
    shutil.copytree(Path(__file__).parent / "inside", site / "inside")


def copy_libraries(root: Path, files: Iterable[Path]) -> None:
    """What the dynamic linker would load for these files."""
    done = subprocess.run(["ldd", *map(str, files)], check=False, capture_output=True, text=True)
    for name in sorted(set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", done.stdout, re.MULTILINE))):
        target = inside(root, Path(name))
        if not target.exists():
            copy_to(target, Path(name).resolve())
