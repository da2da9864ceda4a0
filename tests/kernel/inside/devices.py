"""One device: is it a disk?"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

from aenv._native.lsmt import Image, Layer, Stack, Writer
from aenv.errors import UnavailableError

from .support import OWNER, Direct, control, disk, exercise, kernel_devices, raises, sh, until

SIZE = 16 << 20


def test_device_is_a_disk(folder: Path) -> None:
    model = bytearray(SIZE)
    with disk(folder, SIZE) as (device, image):
        assert int(sh(f"blockdev --getsize64 {device.path}")) == SIZE
        exercise(device.path, model, 150, 1)
        assert image.read(0, SIZE) == model


def test_several_queues_serve_several_writers(folder: Path) -> None:
    models = [bytearray(4 << 20) for _ in range(4)]
    with disk(folder, 16 << 20, control(queues=2, depth=4)) as (device, image):
        threads = [
            threading.Thread(target=exercise, args=(device.path, model, 40, i, i << 22))
            for i, model in enumerate(models)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert image.read(0, SIZE) == b"".join(models)


def test_fio_finds_what_it_wrote(folder: Path) -> None:
    with disk(folder, 32 << 20) as (device, _):
        sh(
            f"fio --name=v --filename={device.path} --rw=randwrite --bsrange=4k-256k --direct=1 --ioengine=io_uring "
            "--iodepth=32 --size=32M --io_size=24M --verify=crc32c --verify_fatal=1 --thread --fsync=64"
        )


def test_file_system(folder: Path) -> None:
    mounted = folder / "mnt"
    mounted.mkdir()
    with disk(folder, 64 << 20) as (device, image):
        sh(f"/bin/mke2fs -q -t ext4 {device.path}")
        sh(f"mount -t ext4 -o discard {device.path} {mounted}")
        content = os.urandom(3 << 20)
        (mounted / "file").write_bytes(content)
        sh("cp -r /opt/site/aenv /opt/site/ublk " + str(mounted))
        sh(f"rm -r {mounted}/aenv && sync && fstrim {mounted} && umount {mounted}")
        sh(f"mount -t ext4 {device.path} {mounted}")
        assert (mounted / "file").read_bytes() == content
        assert image.stats.discards
        sh(f"umount {mounted} && e2fsck -f -n {device.path}")


def test_flush_and_fua_reach_the_image(folder: Path) -> None:
    with disk(folder, SIZE) as (device, image):
        direct = Direct(device.path)
        os.fsync(direct.fd)
        before = image.stats.flushes
        assert before >= 1
        direct.write(0, b"a" * 4096)
        assert image.stats.flushes == before
        direct.close()
        synchronous = Direct(device.path, os.O_DSYNC)  # the kernel makes FUA writes of it
        synchronous.write(4096, b"b" * 4096)
        assert image.stats.flushes == before + 2  # that of the write, and the one that the kernel sends all the same
        synchronous.close()


def test_stack_of_all_kinds_of_layers(folder: Path) -> None:
    """Plain layers are read without a copy, compressed ones by the workers; one request may need both, and holes."""
    model = bytearray(SIZE)
    layers = []
    for number, form in enumerate(("plain", "lz4", "zstd", "plain")):
        path = folder / f"layer{number}"
        with path.open("wb") as file:
            writer = Writer(file.fileno(), SIZE, form=form)
            for offset in range(number * 8192, SIZE, 5 * 65536):
                data = os.urandom(4096) * 3
                writer.add(offset, data)
                model[offset : offset + len(data)] = data
            writer.finish()
        layers.append(Layer(path))
    image = Image(Stack(layers))
    device = control().prepare()
    try:
        device.start(image)
        path = device.path
        assert int(sh(f"blockdev --getro {path}")) == 1
        assert raises(lambda: Direct(path).write(0, bytes(4096)))[0] in (OSError, PermissionError)
        fd = os.open(path, os.O_RDONLY)
        for offset in range(0, SIZE, 1 << 20):
            assert os.pread(fd, 1 << 20, offset) == model[offset : offset + (1 << 20)], offset >> 20
        os.close(fd)
        sh(
            f"fio --name=r --filename={path} --readonly --rw=randread --bs=4k --direct=1 --ioengine=io_uring --thread "
            "--iodepth=64 --runtime=1 --time_based --size=16M"
        )
    finally:
        device.remove()
        image.close()


def test_layer_cut_short_is_an_error_not_zeros(folder: Path) -> None:
    path = folder / "layer"
    with path.open("wb") as file:
        writer = Writer(file.fileno(), SIZE)
        writer.add(0, os.urandom(1 << 20))
        writer.finish()
    image = Image(Stack([Layer(path)]))
    device = control().prepare()
    try:
        device.start(image)
        os.truncate(path, 512 << 10)
        fd = os.open(device.path, os.O_RDONLY | os.O_DIRECT)
        assert raises(lambda: direct_read(fd, 768 << 10)) == (OSError, errno.EIO)
        assert len(direct_read(fd, 0)) == 4096
        assert direct_read(fd, 8 << 20) == bytes(4096)
        os.close(fd)
    finally:
        device.remove()
        image.close()


def direct_read(fd: int, offset: int) -> bytes:
    with mmap.mmap(-1, 4096) as buffer:
        assert os.preadv(fd, [buffer], offset) == 4096
        return bytes(buffer)


def test_resize_is_refused_or_done(folder: Path) -> None:
    front = control()
    with disk(folder, SIZE, front) as (device, image):
        if front.can_resize:
            image.resize(2 * SIZE)
            device.resized()
            assert int(sh(f"blockdev --getsize64 {device.path}")) == 2 * SIZE
        else:
            assert raises(device.resized)[0] is UnavailableError


def test_removing_a_device_that_is_open_gives_errors(folder: Path) -> None:
    with disk(folder, SIZE) as (device, _):
        direct = Direct(device.path)
        direct.write(0, b"x" * 4096)
    assert raises(lambda: direct.write(0, b"y" * 4096))[0] is OSError
    direct.close()


def test_spare_devices_leave_nothing(folder: Path) -> None:
    front = control(queues=2)
    spare = [front.prepare() for _ in range(8)]
    assert len(kernel_devices()) == 8
    for device in spare:
        assert front.find(device.number) is not None
        assert control(owner=OWNER + 1).find(device.number) is None  # another server's are not touched
        assert raises(lambda number=device.number: control(owner=OWNER + 1).delete(number))[0] is UnavailableError
        device.remove()
    until(lambda: not kernel_devices())


def test_idle_devices_are_small(folder: Path) -> None:
    """At most 200 KB each, also after large requests."""
    front = control(depth=128)
    with disk(folder, SIZE, front) as (first, _):
        exercise(first.path, bytearray(SIZE), 20, 1)
        spare = [front.prepare() for _ in range(4)]  # what is allocated once is there now
        before = resident()
        spare += [front.prepare() for _ in range(20)]
        used = resident() - before
        for device in spare:
            device.remove()
    assert used < 20 * 200_000, used // 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
