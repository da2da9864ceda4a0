"""Building and running the fuzz targets of guest/envd (libFuzzer with AddressSanitizer and UBSan).

`python -m tests.fuzz.targets --seconds 300 [--merge] [--out DIR] [NAME...]` fuzzes by hand. What is found lies in
DIR/NAME; with `--merge` what reaches new code goes into the committed corpus, minimised.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVD = ROOT / "guest/envd"
LIBRARIES = ["-levent_core", "-lhttp_parser", "-ljansson", "-lnettle", "-lz"]
SANITIZERS = "address,undefined"
# A low mark for back-pressure, so that short inputs reach it.
FLAGS = ["-g", "-O1", "-std=gnu11", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]
FLAGS += [
    "-Wno-unused-parameter",
    "-Wno-sign-compare",
    "-Wno-gnu-variable-sized-type-not-at-end",
    "-DHTTP_HIGH_WATER=4096",
]
# Functions that world.c has in place of the agent's or the C library's: the agent must not act on this machine.
WRAPPED = [
    "path_resolve",
    "user_lookup",
    "spawn_process",
    "kill",
    "waitpid",
    "socket",
    "connect",
    "event_assign",
    "event_add",
]
WORLDLY = ("http", "rpc")
# Longest input in bytes: the targets that run the whole agent are slow with long ones.
MAX_LENGTH = {"http": 4096, "rpc": 2048, "path": 9000, "content": 512, "gunzip": 2048}
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c"))


def missing() -> str | None:
    """Why the targets cannot be built here; None: they can."""
    clang = shutil.which("clang")
    if clang is None:
        return "clang is not installed (Debian packages clang and libclang-rt-dev)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9 ? 0 : 0; }\n")
        command = [clang, f"-fsanitize=fuzzer,{SANITIZERS}", str(source), "-o", f"{folder}/probe"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    return None if done.returncode == 0 else "clang has no libFuzzer (Debian package libclang-rt-dev)"


def compile_one(source: Path, out: Path) -> Path:
    """One object with coverage counters and sanitizers."""
    command = ["clang", f"-fsanitize=fuzzer-no-link,{SANITIZERS}", *FLAGS, "-I", str(ENVD), "-I", str(HERE)]
    subprocess.run([*command, "-c", str(source), "-o", str(out)], check=True)
    return out


def link(out: Path, objects: list[Path], *options: str) -> Path:
    """A target's program."""
    command = ["clang", f"-fsanitize=fuzzer,{SANITIZERS}", *options, *map(str, objects), *LIBRARIES]
    subprocess.run([*command, "-o", str(out)], check=True)
    return out


def build(folder: Path, names: list[str] | None = None) -> dict[str, Path]:
    """Builds the targets (all of them by default) in `folder`; returns name to program."""
    chosen = names or TARGETS
    shared = [*(path for path in sorted(ENVD.glob("*.c")) if path.name != "main.c"), HERE / "world.c"]
    sources = [*shared, *(HERE / f"fuzz_{name}.c" for name in chosen)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda path: compile_one(path, folder / f"{path.stem}.o"), sources)
        objects = dict(zip(sources, made, strict=True))
    # From an archive each target takes what it uses: only WORLDLY ones get the world and its functions.
    archive = folder / "libagent.a"
    archive.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", str(archive), *(str(objects[path]) for path in shared)], check=True)
    wraps = [f"-Wl,--wrap={function}" for function in WRAPPED]
    return {
        name: link(
            folder / f"fuzz_{name}", [objects[HERE / f"fuzz_{name}.c"], archive], *(wraps if name in WORLDLY else [])
        )
        for name in chosen
    }


@contextmanager
def scratch() -> Iterator[dict[str, str]]:
    """Environment of a target. Its files are removed however it ends; they lie in memory where possible, since most of
    the time would go into removing files from a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield os.environ | {"TMPDIR": folder}


def run(name: str, program: Path, found: Path, seconds: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the committed corpus, then fuzzes until `seconds` are over (0: not at all). New inputs and faults are left
    in `found`."""
    found.mkdir(parents=True, exist_ok=True)
    corpus = HERE / "corpus" / name
    dictionary = HERE / "dictionaries" / f"{name}.dict"
    command = [str(program), f"-max_len={MAX_LENGTH.get(name, 4096)}", "-timeout=20", "-rss_limit_mb=1024"]
    command += ["-print_final_stats=1", f"-artifact_prefix={found}/fault-", *options]
    if dictionary.exists():
        command.append(f"-dict={dictionary}")
    command += [f"-max_total_time={seconds}", str(found)] if seconds else ["-runs=0"]
    if corpus.exists():
        command.append(str(corpus))
    with scratch() as environment:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds * 3 + 100, env=environment
        )


def merge(name: str, program: Path, found: Path) -> None:
    """Makes the committed corpus the smallest set that reaches all the code that it and `found` reach; inputs named
    seed-… and fault-… stay."""
    corpus = HERE / "corpus" / name
    with tempfile.TemporaryDirectory() as folder, scratch() as environment:
        length = f"-max_len={MAX_LENGTH.get(name, 4096)}"
        command = [str(program), "-merge=1", "-use_counters=0", length, folder, str(corpus), str(found)]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        kept = [path.name for path in Path(folder).iterdir()]
        for path in corpus.iterdir():
            if path.name not in kept and not path.name.startswith("seed-") and not path.name.startswith("fault-"):
                path.unlink()
        seeds = {path.read_bytes() for path in corpus.iterdir()}
        for path in Path(folder).iterdir():
            if path.read_bytes() not in seeds:
                shutil.copy(path, corpus / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"targets: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--merge", action="store_true", help="put what reaches new code into the committed corpus")
    parser.add_argument("--out", type=Path, default=None, help="folder of programs and findings (a temporary one)")
    options = parser.parse_args()
    if problem := missing():
        parser.error(problem)
    out = options.out or Path(tempfile.mkdtemp(prefix="envd-fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, program in build(out, options.names or None).items():
        done = run(name, program, out / name, options.seconds)
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAULT'}, {out / name}\n{done.stderr[-3000:]}")
        failed += done.returncode != 0
        if options.merge:
            merge(name, program, out / name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
