"""QEMU's own block layer and memory back end on our files."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv._native.lsmt import Layer, Stack
from tests.blocks.test_server import SIZE, Blockd, disk, run, sealed
from ublk.client import BlockClient

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-utils"),
]


async def qemu_io(path: Path, *commands: str) -> str:
    arguments = [argument for command in commands for argument in ("-c", command)]
    full = ["qemu-io", "-f", "raw", "-t", "none", "-d", "unmap", *arguments, str(path)]
    done = await asyncio.to_thread(subprocess.run, full, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_direct_io_discard_and_zeroes(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        async with disk(server, client) as path:
            await qemu_io(
                path, "write -P 17 0 1M", "write -P 34 1M 64k", "write -P 51 512 512", "discard 64k 64k",
                "write -z 128k 4k", "write -z -u 132k 4k", "write -f -P 68 3M 512", "flush",
            )  # fmt: skip
            out = await qemu_io(
                path, "read -P 17 0 512", "read -P 51 512 512", "read -P 17 1k 63k", "read -P 0 64k 64k",
                "read -P 0 128k 8k", "read -P 17 136k 888k", "read -P 34 1M 64k", "read -P 68 3M 512",
            )  # fmt: skip
            assert "Pattern verification failed" not in out
            stats = await client.stats("disk")
            assert stats["discards"] >= 3
            assert stats["flushes"] >= 1

    run(tmp_path, body)


def test_conversion_from_and_to_other_formats(tmp_path: Path) -> None:
    async def body(server: Blockd, client: BlockClient) -> None:
        content = random.Random(1).randbytes(SIZE // 2)
        found = await client.open("layer", [sealed(tmp_path / "layer", content)])
        qcow = tmp_path / "copy.qcow2"
        for command in (
            ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", found["path"], qcow],
            ["qemu-img", "compare", "-f", "raw", "-F", "qcow2", found["path"], qcow],
        ):
            await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        async with disk(server, client) as path:
            back = ["qemu-img", "convert", "-n", "-f", "qcow2", "-O", "raw", "-t", "none", qcow, path]
            await asyncio.to_thread(subprocess.run, back, check=True, capture_output=True)
        assert Stack([Layer(tmp_path / "disk.data", tmp_path / "disk.index")]).read(0, SIZE // 2) == content
        await client.close_image("layer")

    run(tmp_path, body)


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="needs qemu-system-x86")
def test_two_machines_map_one_memory_image(tmp_path: Path) -> None:
    """`share=off`: both write to their RAM, and the image stays as it is."""

    async def body(server: Blockd, client: BlockClient) -> None:
        content = random.Random(2).randbytes(SIZE)
        found = await client.open("memory", [sealed(tmp_path / "layer", content)], cached=True)
        ram = f"memory-backend-file,id=ram,size={SIZE},mem-path={found['path']},share=off"
        command = [
            "qemu-system-x86_64", "-M", "microvm,memory-backend=ram", "-m", f"{SIZE >> 20}", "-accel", "tcg",
            "-nodefaults", "-no-user-config", "-display", "none", "-object", ram, "-qmp", "stdio",
        ]  # fmt: skip
        machines = [
            await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(2)
        ]
        for machine in machines:
            assert machine.stdin is not None
            assert machine.stdout is not None
            assert "QMP" in json.loads(await machine.stdout.readline())
        assert (await client.list_images())[0]["opens"] >= 1
        for machine in machines:
            out, _ = await machine.communicate(b'{"execute":"qmp_capabilities"}\n{"execute":"quit"}\n')
            assert machine.returncode == 0, out
        fd = os.open(found["path"], os.O_RDONLY)
        assert os.pread(fd, SIZE, 0) == content
        os.close(fd)
        await client.close_image("memory")

    run(tmp_path, body)
