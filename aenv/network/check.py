"""What this machine lacks for sandbox networks, found by trying; `aenv doctor` shows it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import AenvError, UnavailableError
from aenv.network import namespace
from aenv.network.base import Uplink, UplinkKind
from aenv.network.nft import Nft
from aenv.network.policy import render_uplink
from aenv.network.slot import install_trial

_TUN = Path("/dev/net/tun")
_HEAD = "table inet t\nadd chain inet t c {{ type {type}; }}\nadd rule inet t c {rule}\n"
_FORWARD = "filter hook forward priority filter"
# One rule for each kernel part that the tables of policy.py need.
_FEATURES = (
    ("connection tracking", "NFT_CT", _FORWARD, "ct state established accept"),
    ("masquerading", "NFT_MASQ", "nat hook postrouting priority srcnat", "masquerade"),
    ("rejecting", "NFT_REJECT_INET", _FORWARD, "reject with icmpx admin-prohibited"),
    ("connection limits", "NFT_CONNLIMIT", _FORWARD, "ct count over 10 drop"),
    ("address sets", "NF_TABLES", _FORWARD, "ip daddr { 10.0.0.0/8, 192.168.0.0/16 } drop"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing sandbox networks need. `hint` says how to get it when `ok` is false."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


def check(uplink: Uplink) -> list[Finding]:
    """Try everything slots need. Changes nothing outside a namespace that is gone when this returns. Blocks."""
    with ThreadPoolExecutor(1) as executor:  # a thread of its own: the trial enters a fresh namespace
        return executor.submit(_check, uplink).result()


def describe(uplink: Uplink) -> str:
    """One sentence on the way out of sandboxes."""
    if uplink.kind is UplinkKind.NONE:
        return "sandboxes have no way out; the host reaches them"
    place = "this host's own network" if uplink.kind is UplinkKind.HOST else f"the network namespace {uplink.name}"
    return f"sandboxes reach public addresses by NAT through {place}"


def _check(uplink: Uplink) -> list[Finding]:
    findings = [_check_tun(), _check_uplink(uplink)]
    try:
        nft = Nft()
    except UnavailableError as error:
        findings.append(Finding("libnftables", False, error.message, error.hint or ""))
        nft = None
    else:
        findings.append(Finding("libnftables", True, "loaded"))
    try:
        with namespace.fresh():
            findings.append(Finding("network namespaces", True, "can be made"))
            if nft:
                findings += _check_kernel(nft)
    except UnavailableError as error:
        findings.append(Finding("network namespaces", False, error.message, error.hint or "run as root"))
    return findings


def _check_tun() -> Finding:
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Finding("tap devices", False, f"{_TUN} is missing", "modprobe tun; in a container pass the device")
    except OSError as error:
        return Finding("tap devices", False, f"{_TUN}: {error.strerror}", "run as root; in a container pass the device")
    return Finding("tap devices", True, str(_TUN))


def _check_uplink(uplink: Uplink) -> Finding:
    if uplink.kind is UplinkKind.NETNS and not (namespace.NETNS_DIRECTORY / uplink.name).exists():
        return Finding("uplink", False, f"there is no network namespace {uplink.name}", f"ip netns add {uplink.name}")
    return Finding("uplink", True, describe(uplink))


def _check_kernel(nft: Nft) -> list[Finding]:
    """The real tables first; only if they are refused, each part by itself to find which is missing."""
    try:
        install_trial(nft)
        nft.run(render_uplink("aenv_trial", "aetrial-", "192.0.2.0/24", "2001:db8::/64"))
    except (AenvError, OSError) as error:
        missing = [f for f in (_check_feature(nft, *feature) for feature in _FEATURES) if not f.ok]
        return missing or [Finding("firewall", False, str(error), "a Linux kernel of 5.10 or newer with nf_tables")]
    return [Finding("firewall", True, "nf_tables takes all rules")]


def _check_feature(nft: Nft, name: str, option: str, kind: str, rule: str) -> Finding:
    try:
        nft.run(_HEAD.format(type=kind, rule=rule))
    except UnavailableError as error:
        return Finding(name, False, error.message, f"a kernel with CONFIG_{option}")
    return Finding(name, True, "works")
