"""What the host can run: the program of the probe, its cache, and the reasons it gives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv.errors import UnavailableError
from aenv.vmm import probe as probing
from aenv.vmm.base import VmmKind
from aenv.vmm.probe import CACHE_NAME, PROGRAM, SUCCESS, probe, rom, select_vmm

SOURCE = Path(probing.__file__).with_name("probe_rom.S")


@pytest.mark.skipif(shutil.which("as") is None, reason="needs binutils")
def test_program_is_made_from_its_source(tmp_path: Path):
    subprocess.run(["as", "--64", "-o", tmp_path / "rom.o", SOURCE], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", tmp_path / "rom.o", tmp_path / "rom"], check=True)
    assert (tmp_path / "rom").read_bytes() == PROGRAM


@pytest.mark.vm
def test_program_ends_with_success_on_a_working_machine(tmp_path: Path):
    """Software emulation is one, whatever KVM does here."""
    (tmp_path / "rom").write_bytes(rom())
    command = ["qemu-system-x86_64", "-M", "microvm,acpi=off", "-accel", "tcg", "-cpu", "max", "-m", "16M"]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-bios", str(tmp_path / "rom")]
    command += ["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]
    assert subprocess.run(command, timeout=60, check=False).returncode == SUCCESS


@pytest.mark.vm
def test_this_host_gets_an_answer_and_keeps_it(tmp_path: Path):
    found = asyncio.run(probe(tmp_path))
    assert found.kind in (VmmKind.QEMU_TCG, VmmKind.QEMU_KVM)
    assert found.reasons
    assert bool(found.advice) == (found.kind is VmmKind.QEMU_TCG)
    cache = tmp_path / CACHE_NAME
    text = cache.read_bytes()
    known = json.loads(text)
    known["probe"]["reasons"] = ["remembered"]
    cache.write_text(json.dumps(known))
    assert asyncio.run(probe(tmp_path)).reasons == ["remembered"]
    for damaged in (b"", b"{", b'{"key": 1}', text.replace(b'"key":"', b'"key":"x')):
        cache.write_bytes(damaged)
        assert asyncio.run(probe(tmp_path)) == found
        assert cache.read_bytes() == text
    assert os.listdir(tmp_path) == [CACHE_NAME]


@pytest.mark.parametrize("kind", ["missing", "no-device", "wrong-device"])
def test_unusable_device_is_explained(tmp_path: Path, kind: str):
    path = {"missing": tmp_path / "kvm", "no-device": tmp_path / "file", "wrong-device": Path("/dev/null")}[kind]
    (tmp_path / "file").write_bytes(b"")
    found = asyncio.run(probe(kvm=path))
    assert found.kind is VmmKind.QEMU_TCG
    assert str(path) in found.reasons[0]
    assert found.advice


class FakeQemu:
    """A QEMU whose behaviour is a shell script."""

    def __init__(self, folder: Path, script: str) -> None:
        self.path = folder / "qemu-system-x86_64"
        self.path.write_text(
            f"#!/bin/sh\ncase $1 in -version | -object) echo QEMU emulator version 7.2.0; exit;; esac\n{script}\n"
        )
        self.path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        (f"exit {SUCCESS}", VmmKind.QEMU_KVM, "ran a test program"),
        ("exec sleep 60", VmmKind.QEMU_TCG, "emulates the guest"),
        ("echo it is broken >&2; exit 1", VmmKind.QEMU_TCG, "(status 1): it is broken"),
        ("exit 0", VmmKind.QEMU_TCG, "(status 0): no message"),
    ],
)
def test_outcomes_of_the_trial(tmp_path: Path, monkeypatch, script: str, kind: VmmKind, reason: str):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probing, "TIMEOUT", 0.2)
    monkeypatch.setattr(probing, "_open_kvm", lambda path: None)
    monkeypatch.setattr(probing, "_check_group", lambda path: None)
    FakeQemu(tmp_path, script)
    found = asyncio.run(probe())
    assert found.kind is kind
    assert reason in found.reasons[0]
    assert asyncio.run(select_vmm("auto")).kind is kind
    assert asyncio.run(select_vmm("qemu-tcg")).kind is VmmKind.QEMU_TCG
    if kind is VmmKind.QEMU_TCG:
        with pytest.raises(UnavailableError, match="qemu-kvm does not work here"):
            asyncio.run(select_vmm("qemu-kvm"))
    else:
        assert asyncio.run(select_vmm("qemu-kvm")).kind is kind


def test_old_or_strange_qemu_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = FakeQemu(tmp_path, "")
    fake.path.write_text("#!/bin/sh\necho QEMU emulator version 5.2.0\n")
    with pytest.raises(UnavailableError, match=r"version 5\.2\.0 .*7\.2"):
        asyncio.run(probe())
    fake.path.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(UnavailableError, match="does not tell its version"):
        asyncio.run(probe())
