"""The guest's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv.boot.cmdline import GuestOptions, host_tsc_khz, kernel_cmdline
from aenv.errors import InvalidInputError, UnavailableError
from aenv.vmm.base import VmmKind


def words(kind: VmmKind = VmmKind.QEMU_TCG, **options: object) -> list[str]:
    return kernel_cmdline(kind, GuestOptions(**options), tsc_khz=2_500_000).split()  # type: ignore[arg-type]


def test_emulation_needs_the_frequency() -> None:
    assert "tsc_early_khz=2500000" in words()
    assert "mitigations=off" in words()
    assert "clearcpuid=141" in words()  # cx16


@pytest.mark.parametrize("kind", [VmmKind.QEMU_KVM, VmmKind.FIRECRACKER])
def test_real_processors_keep_clock_and_mitigations(kind: VmmKind) -> None:
    line = kernel_cmdline(kind)
    assert "tsc" not in line
    assert "mitigations" not in line
    assert "clearcpuid" not in line


def test_addresses_are_those_of_every_slot() -> None:
    assert {
        "aenv.ip4=169.254.0.21/30", "aenv.gw4=169.254.0.22", "aenv.ip6=fd00:ae::21/64", "aenv.gw6=fd00:ae::22",
        "aenv.gwmac=02:ae:00:00:00:22",
    } <= set(words())  # fmt: skip


def test_options_are_passed_on() -> None:
    line = words(hostname="box-1.local", dns=("9.9.9.9", "::1"), init="/sbin/init", rootflags="discard,commit=30",
                 extra=["a=b"])  # fmt: skip
    assert line[-5:] == [
        "aenv.dns=9.9.9.9,::1", "aenv.hostname=box-1.local", "aenv.init=/sbin/init",
        "aenv.rootflags=discard,commit=30", "a=b",
    ]  # fmt: skip
    assert not any(w.startswith("aenv.dns") for w in words(dns=()))


def test_quiet_unless_asked() -> None:
    assert "quiet" in words()
    assert "quiet" not in words(verbose=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hostname", "-x"), ("hostname", "a b"), ("hostname", ""), ("hostname", "x" * 65), ("hostname", "a\nb"),
        ("dns", ["1.1.1"]), ("dns", ["1.1.1.1 init=/x"]), ("dns", ["1.1.1.1"] * 40),
        ("init", "sbin/init"), ("init", "/a b"), ("init", '/a"b'), ("init", "/" + "x" * 300),
        ("rootflags", "a b"), ("extra", ["a b"]), ("extra", [""]), ("extra", ['a="b']),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        words(**{option: value})
    assert caught.value.field == option


def test_too_long_a_line_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="command line"):
        words(extra=[f"w{n}={'x' * 200}" for n in range(20)])


@pytest.mark.parametrize("khz", [0, -1, 10**9])
def test_impossible_frequency(khz: int) -> None:
    with pytest.raises(InvalidInputError, match="tsc_khz"):
        kernel_cmdline(VmmKind.QEMU_TCG, tsc_khz=khz)


@pytest.mark.parametrize(
    ("text", "khz"),
    [
        ("processor\t: 0\ncpu MHz\t\t: 800.123\nbogomips\t: 5192.29\n", 2596145),
        ("cpu MHz\t\t: 2596.146\n", 2596146),
        ("cpu MHz\t\t: unknown\ncpu MHz\t\t: 2000.5\nflags : fpu\n", 2000500),
    ],
)
def test_frequency_of_the_host(tmp_path: Path, text: str, khz: int) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert host_tsc_khz(tmp_path / "cpuinfo") == khz


def test_unknown_frequency(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    with pytest.raises(UnavailableError):
        host_tsc_khz(tmp_path / "cpuinfo")
