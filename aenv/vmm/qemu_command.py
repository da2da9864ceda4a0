"""What QEMU is told to be: its command line, and the block nodes of a disk. The reasons are in docs/vmm.md."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from aenv.errors import InvalidInputError, VmmError
from aenv.vmm.base import Disk, Machine, Nic, VmmKind

# The monitor reads commands byte by byte (some 5 µs each), so names are short and defaults are left out.
DISK_NODE = "disk"  # the node the disk device looks at; what is below it is exchanged by attach_disk
IMAGE_NODE = "i"  # what attach_disk puts there
DISK_SET = 1  # of descriptors: the disk's
# To be raised with every change of what a guest can see of its machine.
DEVICES = "microvm-2"
# A guest may write to its console without end: QEMU keeps the last bytes and drops the rest.
SERIAL_RING = 64 << 10
TRANSLATION_CACHE_MIB = 256  # a bound on what emulated code costs per machine; QEMU's own is 1 GiB


def machine_arguments(machine: Machine, kind: VmmKind, cpu_model: str, monitor: int) -> list[str]:
    # With a thread for each vCPU, one may go on running code that another has replaced: a guest of two vCPUs panics
    # when its kernel patches itself. One thread for all of them translates in order.
    threads = "multi" if machine.vcpus == 1 else "single"
    accel = f"tcg,thread={threads},tb-size={TRANSLATION_CACHE_MIB}" if kind is VmmKind.QEMU_TCG else "kvm"
    return [
        "-M", "microvm,acpi=on,rtc=on,isa-serial=on,memory-backend=ram,suppress-vmdesc=on",
        "-accel", accel,
        "-cpu", cpu_model,
        "-smp", str(machine.vcpus),
        "-m", f"{machine.memory_mib}M",
        # Anonymous, not a file: a page of a private file mapping that is written costs a second one, the file's.
        "-object", f"memory-backend-ram,id=ram,size={machine.memory_mib}M,share=off,merge=off,reserve=off",
        "-nodefaults", "-no-user-config", "-display", "none",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        # A guest that ends leaves its process behind, so that its last words can be read.
        "-action", "reboot=shutdown,shutdown=pause,panic=pause",
        # Threads for disk requests are there from the start.
        "-object", "main-loop,id=main-loop,thread-pool-min=2",
        "-chardev", f"ringbuf,id=serial,size={SERIAL_RING}", "-serial", "chardev:serial",
        "-chardev", f"socket,id=qmp,fd={monitor},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
    ]  # fmt: skip


def nic_arguments(nic: Nic, fd: int) -> list[str]:
    device = f"virtio-net-device,netdev=net,mac={nic.mac},guest_announce=off"  # nobody else knows the address
    return ["-netdev", f"tap,id=net,fd={fd},vhost=off", "-device", device]


def boot_arguments(machine: Machine, kernel: int, initrd: int) -> list[str]:
    return [
        "-kernel", f"/proc/self/fd/{kernel}", "-initrd", f"/proc/self/fd/{initrd}", "-append", machine.cmdline,
    ]  # fmt: skip


def _disk_device() -> str:
    """A disk that fails stops the machine: the guest never sees an error that the host can mend."""
    return f"virtio-blk-device,drive={DISK_NODE},rerror=stop,werror=stop"


def waiting_arguments() -> list[str]:
    """A machine that waits for device state needs no kernel (it is in RAM) and has a stand-in for its disk."""
    nothing = {"driver": "raw", "node-name": DISK_NODE, "file": {"driver": "null-co", "read-zeroes": True}}
    return [
        "-S", "-incoming", "defer", "-global", "migration.send-configuration=off",
        "-blockdev", json.dumps(nothing), "-device", _disk_device(),
    ]  # fmt: skip


def disk_arguments(disk: Disk, fd: int) -> list[str]:
    node = device_node(disk_node(disk, fd)) | {"read-only": disk.read_only}
    return ["-add-fd", f"fd={fd},set={DISK_SET}", "-blockdev", json.dumps(node), "-device", _disk_device()]


def open_disk(disk: Disk) -> int:
    """Past the page cache, which the block server fills, where the file system can do that (tmpfs from Linux 6.6)."""
    if disk.format != "raw":
        raise InvalidInputError("disk.format", f"expected raw, got {disk.format!r}")
    flags = os.O_RDONLY if disk.read_only else os.O_RDWR
    try:
        return open_image(disk.path, flags | os.O_DIRECT)
    except VmmError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EINVAL:
            raise
        return open_image(disk.path, flags)


def device_node(below: dict[str, Any] | str) -> dict[str, Any]:
    """The node of the device. Without `discard` here, too, it would drop what the guest discards."""
    return {"driver": "raw", "node-name": DISK_NODE, "discard": "unmap", "file": below}


def disk_node(disk: Disk, fd: int) -> dict[str, Any]:
    """The node below that of the device. QEMU sets and clears O_DIRECT of what it is given as the node says."""
    driver = "host_device" if stat.S_ISBLK(os.fstat(fd).st_mode) else "file"  # each refuses the other's
    # A lock would need the file opened by QEMU itself.
    node: dict[str, Any] = {"driver": driver, "filename": f"/dev/fdset/{DISK_SET}", "locking": "off"}
    # A flush of the guest ends here: what it has written is in the block server, which outlives the VMM, and reaches
    # the disk with a pause or a snapshot. A running machine does not survive a power cut anyway.
    node["cache"] = {"direct": bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), "no-flush": True}
    return node | ({"read-only": True} if disk.read_only else {"discard": "unmap"})


def open_image(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise VmmError(f"cannot open {path}: {error.strerror}") from error
