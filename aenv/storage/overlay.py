"""Private copies of a disk for the price of a few metadata blocks: empty qcow2 files over a raw base.

This is the first form of the storage layer: an image is immutable once its template exists, and each sandbox writes to
an overlay of its own. The format is the public qcow2 specification, version 3 (docs/interop/qcow2.txt of QEMU); only
an empty image is written here, the VMM fills it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from aenv.errors import InvalidInputError

CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
MAGIC = 0x514649FB
HEADER_LENGTH = 104
REFCOUNT_ORDER = 4  # 16-bit counts
# Header extension type of the backing file's format; without it QEMU would probe content that a guest may have written.
BACKING_FORMAT = 0xE2792ACA


def create_overlay(path: Path, base: Path, virtual_size: int) -> None:
    """Write an empty qcow2 image at `path` that shows `base` (raw); `virtual_size` is in bytes.

    The caller decides about durability: an overlay that is lost before its sandbox is acknowledged was never there.

    Raises InvalidInputError for a size that is not a positive multiple of 512 or a base path qcow2 cannot name,
    FileExistsError when `path` exists.
    """
    if virtual_size <= 0 or virtual_size % 512:
        raise InvalidInputError("disk size", f"must be a positive multiple of 512 bytes, got {virtual_size}")
    backing = os.fsencode(base.absolute())
    if len(backing) > 1023:
        raise InvalidInputError("base", f"path of {len(backing)} bytes is longer than qcow2's 1023")

    # One L2 table (a cluster of 8-byte entries) maps CLUSTER // 8 clusters.
    l1_entries = max(1, -(-virtual_size // (CLUSTER * (CLUSTER // 8))))
    l1_clusters = -(-l1_entries * 8 // CLUSTER)
    # Layout in clusters: 0 header, 1 refcount table, 2 refcount block, 3.. L1 table.
    used = 3 + l1_clusters
    extensions = struct.pack(">II", BACKING_FORMAT, 3) + b"raw\0\0\0\0\0" + struct.pack(">II", 0, 0)
    name_offset = HEADER_LENGTH + len(extensions)
    header = struct.pack(
        ">IIQIIQIIQQIIQQQQII",
        MAGIC, 3, name_offset, len(backing), CLUSTER_BITS, virtual_size, 0, l1_entries, 3 * CLUSTER, CLUSTER, 1, 0, 0,
        0, 0, 0, REFCOUNT_ORDER, HEADER_LENGTH,
    )  # fmt: skip
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, header + extensions + backing, 0)
        os.pwrite(fd, struct.pack(">Q", 2 * CLUSTER), CLUSTER)
        os.pwrite(fd, struct.pack(">H", 1) * used, 2 * CLUSTER)
        os.ftruncate(fd, used * CLUSTER)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
