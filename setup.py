"""Build of the compiled parts: Cython extensions for the host, static C programs for the guest, and the mapper, a
library that is loaded into QEMU (`mapper/`, shipped as data of `aenv._native`).

The guest programs (`guest/envd`, `guest/init`) run inside the micro-VM, whose image may hold no libc at all, so they
are linked statically and shipped as data of the package `aenv._guest`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-sign-compare"]
OPTIMISE = ["-O2", "-g", "-std=gnu11"]
# Distributions build archives for programs (PIE): their symbols must bind inside the extension, and stay hidden.
ARCHIVE_FLAGS = ["-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"]
# Static archives in link order.
GUEST_LIBRARIES = {
    "envd": ["-levent_core", "-lhttp_parser", "-ljansson", "-lnettle", "-lz"],
    "init": [],
}


def extension(folder: str, name: str, **options: list[str]) -> Extension:
    """One extension from `folder/name.pyx` and the C files beside it that start with `c_<name>`."""
    sources = [f"{folder}/{name}.pyx", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / folder).glob(f"c_{name}*.c"))]
    headers = {p for where in (folder, "aenv/_native") for p in (ROOT / where).glob("*.h")}
    depends = sorted(str(p.relative_to(ROOT)) for p in headers)
    module = f"{folder.replace('/', '.')}.{name}"
    return Extension(
        module, sources, depends=depends, extra_compile_args=[*OPTIMISE, *WARNINGS],
        include_dirs=[folder, "aenv/_native"], **options,
    )  # fmt: skip


def archive(name: str) -> str:
    """The static library `name`, so that the extension needs no package at run time; else a link option."""
    command = [os.environ.get("CC", "cc"), f"-print-file-name=lib{name}.a"]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else f"-l{name}"


def extensions() -> list[Extension]:
    options: dict[str, dict[str, list[str]]] = {
        "lsmt": {"extra_link_args": [*ARCHIVE_FLAGS, archive("lz4"), archive("zstd")]},
        "device": {"extra_link_args": [*ARCHIVE_FLAGS, archive("uring")]},
        "fuse": {"extra_link_args": ["-lfuse3"]},  # its versioned symbols cannot go into an extension statically
    }
    found = [p for folder in ("aenv/_native", "ublk") for p in sorted((ROOT / folder).glob("*.pyx"))]
    return [extension(str(p.parent.relative_to(ROOT)), p.stem, **options.get(p.stem, {})) for p in found]


class Build(build_ext):
    """`build_ext` that also links the guest programs and the mapper."""

    def run(self) -> None:
        super().run()
        base = ROOT if self.inplace else Path(self.build_lib)
        self.link_mapper(base / "aenv/_native/aenv-mapper.so")
        target = base / "aenv/_guest"
        target.mkdir(parents=True, exist_ok=True)
        (target / "__init__.py").write_text('"""Static programs that run inside the micro-VM."""\n')
        for program, libraries in GUEST_LIBRARIES.items():
            self.link_guest_program(program, libraries, target / program)

    def link_mapper(self, out: Path) -> None:
        folder = ROOT / "mapper"
        newest = max(p.stat().st_mtime for p in [*folder.iterdir(), Path(__file__)])
        if out.exists() and out.stat().st_mtime >= newest:
            return
        command = [
            os.environ.get("CC", "cc"), "-shared", "-fPIC", "-fvisibility=hidden", *OPTIMISE, *WARNINGS, "-pthread",
            "-o", str(out), *map(str, sorted(folder.glob("*.c"))),
        ]  # fmt: skip
        self.announce("linking the mapper", level=2)
        subprocess.run(command, check=True)
        out.chmod(0o644)  # machines run as users of their own, which load it

    def link_guest_program(self, program: str, libraries: list[str], out: Path) -> None:
        folder = ROOT / "guest" / program
        sources = sorted(folder.glob("*.c"))
        newest = max(p.stat().st_mtime for p in [*folder.iterdir(), Path(__file__)])
        if not sources or (out.exists() and out.stat().st_mtime >= newest):
            return
        command = [
            os.environ.get("CC", "cc"), "-static", *OPTIMISE, *WARNINGS, "-ffunction-sections", "-fdata-sections",
            "-Wl,--gc-sections", "-o", str(out), *map(str, sources), *libraries,
        ]  # fmt: skip
        self.announce(f"linking guest program {program}", level=2)
        subprocess.run(command, check=True)
        if strip := shutil.which("strip"):
            subprocess.run([strip, str(out)], check=True)


setup(
    ext_modules=cythonize(extensions(), language_level="3str", compiler_directives={"boundscheck": False}),
    cmdclass={"build_ext": Build},
)
