"""`aenv doctor` on this machine and on worse ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aenv.cli import doctor
from aenv.cli.doctor import Level, Report, examine
from aenv.cli.main import aenv
from aenv.config import load
from aenv.daemon import Daemon
from aenv.errors import UnavailableError
from aenv.network.check import Finding as NetworkFinding
from aenv.snapshot.manifest import BootFile
from aenv.storage.blocks import Blocks, control_socket
from aenv.storage.home import Home
from aenv.storage.repository import Repository
from aenv.vmm.base import VmmKind
from aenv.vmm.probe import Probe
from tests.storage.templates import committed

TCG = Probe(VmmKind.QEMU_TCG, "7.2.22", ["there is no /dev/kvm", "emulation works everywhere"], ["load kvm_intel"])
KVM = Probe(VmmKind.QEMU_KVM, "7.2.22", ["a virtual machine with KVM ran a test program"], [])


class Host:
    """A machine where all is well, until a test takes something away."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.probe: Probe | UnavailableError = TCG
        self.network: Sequence[NetworkFinding] = [NetworkFinding("tap devices", True, "/dev/net/tun")]
        self.programs = {"qemu-system-x86_64", *doctor.BUILD_TOOLS}
        self.free = 1 << 40
        patch.setattr(os, "geteuid", lambda: 0)
        patch.setattr(doctor, "probe", self._probe)
        patch.setattr(doctor, "check_network", lambda uplink: self.network)
        patch.setattr(doctor, "find_binary", self._find)
        patch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(self.free, 0, self.free))  # type: ignore[attr-defined]

    async def _probe(self) -> Probe:
        if isinstance(self.probe, UnavailableError):
            raise self.probe
        return self.probe

    def _find(self, name: str) -> Path:
        if name not in self.programs:
            raise UnavailableError(f"the program {name} is not on this machine", hint=f"apt-get install {name}")
        return Path("/usr/bin") / name

    def build_base(self, **changes: object) -> None:
        boot = self.home / "boot"
        boot.parent.mkdir(exist_ok=True)
        boot.write_text("kernel")
        (self.home / "templates").mkdir()
        file = BootFile.of(boot)
        fields = {"kernel": file, "initrd": file, "vmm_version": TCG.version} | changes
        committed(Repository(self.home / "templates"), self.home / "staging", "base", **fields)

    def examine(self, **settings: str) -> Report:
        return examine(load({"home": str(self.home), **settings}, environ={}))

    def levels(self, **settings: str) -> dict[str, Level]:
        return {f.name: f.level for f in self.examine(**settings).findings}

    def hint(self, name: str) -> str:
        return next(f.hint for f in self.examine().findings if f.name == name)

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(aenv, ["--home", str(self.home), "doctor", *words])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in [n for n in os.environ if n.startswith("AENV_")]:
        monkeypatch.delenv(name)
    return Host(tmp_path / "home", monkeypatch)


def test_a_fresh_machine_is_told_what_comes_next(host: Host) -> None:
    levels = host.levels()
    assert Level.MISSING not in levels.values()
    assert levels["template base"] is Level.NOTE
    assert "aenv template build base" in host.hint("template base")
    assert levels["guest kernel"] is Level.NOTE
    assert not host.home.exists(), "it changes nothing"


def test_json_and_exit_status(host: Host) -> None:
    done = host.run("--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert (answer["ok"], answer["vmm"], answer["home"]) == (True, "qemu-tcg", str(host.home))
    assert {tuple(f) for f in answer["findings"]} == {("name", "level", "detail", "hint")}
    host.network = [NetworkFinding("tap devices", False, "/dev/net/tun is missing", "modprobe tun")]
    done = host.run("--json")
    assert done.exit_code == 1
    answer = json.loads(done.output)
    assert answer["ok"] is False
    assert {"name": "tap devices", "level": "missing", "detail": "/dev/net/tun is missing", "hint": "modprobe tun"} in (
        answer["findings"]
    )


def test_table_for_people(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "wants_json", lambda as_json: False)
    monkeypatch.setenv("COLUMNS", "200")
    host.network = [NetworkFinding("tap devices", False, "[red]/dev/net/tun is missing", "modprobe tun")]
    done = host.run()
    assert done.exit_code == 1
    assert "[red]/dev/net/tun is missing" in done.output, "what was found is no markup"
    assert "→ modprobe tun" in done.output
    assert "Sandboxes cannot run here yet" in done.output
    host.network = []
    assert "Sandboxes run here with qemu-tcg." in host.run().output


def test_why_it_is_slow_and_how_to_be_faster(host: Host) -> None:
    monitor = next(f for f in host.examine().findings if f.name == "VM monitor")
    assert (monitor.level, monitor.hint) == (Level.NOTE, "to be faster: load kvm_intel")
    assert "there is no /dev/kvm" in monitor.detail
    host.probe = KVM
    report = host.examine()
    assert report.vmm is VmmKind.QEMU_KVM
    assert next(f for f in report.findings if f.name == "VM monitor").level is Level.OK


def test_the_setting_decides(host: Host) -> None:
    assert host.levels(**{"vmm.kind": "qemu-kvm"})["VM monitor"] is Level.MISSING
    assert host.examine(**{"vmm.kind": "qemu-kvm"}).vmm is None
    host.probe = KVM
    assert host.levels(**{"vmm.kind": "qemu-tcg"})["VM monitor"] is Level.NOTE
    assert host.examine(**{"vmm.kind": "qemu-tcg"}).vmm is VmmKind.QEMU_TCG


def test_without_qemu(host: Host) -> None:
    host.probe = UnavailableError("the program qemu-system-x86_64 is not on this machine", hint="apt-get install it")
    report = host.examine()
    assert not report.ok
    assert report.vmm is None
    assert host.hint("QEMU") == "apt-get install it"


def test_without_root(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host.levels()["root"] is Level.MISSING
    assert "sudo" in host.hint("root")


@pytest.mark.parametrize("tool", doctor.BUILD_TOOLS)
def test_tools_are_needed_only_until_the_template_is_there(host: Host, tool: str) -> None:
    host.programs.remove(tool)
    assert host.levels()[tool] is Level.MISSING
    assert host.hint(tool) == f"apt-get install {tool}"
    host.build_base()
    assert host.levels()[tool] is Level.NOTE


def test_a_template_that_does_not_fit_any_more(host: Host) -> None:
    host.build_base(vmm_version="6.0.0")
    finding = next(f for f in host.examine().findings if f.name == "template base")
    assert finding.level is Level.NOTE
    assert "VMM version is 6.0.0, this node has 7.2.22" in finding.detail
    assert finding.hint.endswith("--force")


def test_a_template_whose_kernel_changed(host: Host) -> None:
    host.build_base()
    assert host.levels()["template base"] is Level.OK
    (host.home / "boot").write_text("another kernel")
    assert host.levels()["template base"] is Level.NOTE


def test_a_damaged_repository_is_named(host: Host) -> None:
    host.build_base()
    (host.home / "templates/names.json").write_text("{")
    finding = next(f for f in host.examine().findings if f.name == "template base")
    assert finding.level is Level.MISSING
    assert "names.json" in finding.detail


def test_disk_space(host: Host) -> None:
    host.free = 1 << 30
    assert host.levels()["disk space"] is Level.MISSING
    host.build_base()
    assert host.levels()["disk space"] is Level.NOTE
    host.free = 1 << 40
    assert host.levels()["disk space"] is Level.OK


def test_a_running_daemon_is_shown(host: Host) -> None:
    assert host.levels()["daemon"] is Level.INFO
    host.home.mkdir()
    Daemon("http://127.0.0.1:3000", os.getpid()).write(host.home)
    assert host.levels()["daemon"] is Level.OK
    (host.home / "daemon.json").write_text("{}")
    assert host.levels()["daemon"] is Level.INFO


def test_missing_devices_of_the_block_server(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory images are FUSE files in any case; disks can be, too."""
    monkeypatch.setattr(doctor, "UBLK", tmp_path / "none")
    assert host.levels()["ublk"] is Level.INFO
    monkeypatch.setattr(doctor, "FUSE", tmp_path / "none")
    assert host.levels()["FUSE"] is Level.MISSING


def test_what_an_old_kernel_lacks_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for release, waits in (("6.1.0-57-cloud-amd64", False), ("6.9.0", True), ("10.0", True), ("unknown", False)):
        uname = os.uname_result(("Linux", "host", release, "#1", "x86_64"))
        monkeypatch.setattr(os, "uname", lambda uname=uname: uname)
        found = next(f for f in host.examine().findings if f.name == "FUSE")
        assert ("only wait when" in found.detail) is waits


@pytest.mark.root
def test_the_block_server_is_shown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    async def session() -> None:
        blocks = await Blocks.start(Home(host.home, host.home).blocks)
        try:
            found = await doctor._block_server(control_socket(blocks.folder))
            assert found.level is Level.OK
            assert f"process {blocks.pid} serves 0 images by fuse" in found.detail
        finally:
            await blocks.close(stop_server=True)
            shutil.rmtree(blocks.folder.parent)

    assert host.levels()["block server"] is Level.INFO
    asyncio.run(session())
    silent = host.home / "control"
    host.home.mkdir()
    monkeypatch.setattr(doctor, "control_socket", lambda folder: silent)
    silent.write_bytes(b"")
    assert host.levels()["block server"] is Level.NOTE
    silent.unlink()
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(silent))
        listening.listen()
        assert host.levels()["block server"] is Level.NOTE


@pytest.mark.root
def test_this_machine(tmp_path: Path) -> None:
    """Nothing stands in for anything: what runs the other tests must not be found missing."""
    report = examine(load({"home": str(tmp_path / "home"), "network.uplink": "none"}, environ={}))
    assert [f for f in report.findings if f.level is Level.MISSING] == []
    assert report.vmm is not None
    assert not (tmp_path / "home").exists()
