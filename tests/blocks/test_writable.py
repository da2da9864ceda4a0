"""Writable layers survive: every flushed write is there after any cut, and no half of an unacknowledged one."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv._native.lsmt import Image, Layer, Sealing, Stack, create_writable
from aenv.errors import AenvError, ConflictError, InvalidInputError, UnavailableError
from tests.blocks.reader import read_layer

SIZE = 1 << 20
NewWritable = Callable[..., tuple[Path, Path]]


def content(files: tuple[Path, Path], stack: Stack | None = None) -> bytes:
    image = Image(stack, *files)
    try:
        return image.read(0, image.size)
    finally:
        image.close()


def copy(files: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(files[0], folder / "data")), Path(shutil.copy(files[1], folder / "index"))


def history(image: Image, steps: int, generator: random.Random) -> list[bytes]:
    """Random operations; gives the content after each record of the index file."""
    model = bytearray(image.size)
    states = [bytes(model)]
    for _ in range(steps):
        offset = generator.randrange(SIZE // 512) * 512
        length = min(generator.choice([512, 1024, 4096, 16384]), SIZE - offset)
        if generator.random() < 0.25:
            image.discard(offset, length)
            model[offset : offset + length] = bytes(length)
        else:
            data = generator.randbytes(length)
            image.write(offset, data)
            model[offset : offset + length] = data
        states.append(bytes(model))
    return states


def test_index_cut_at_every_byte_leaves_a_prefix_of_the_history(new_writable: NewWritable, tmp_path: Path) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    states = history(image, 12, random.Random(1))
    image.close()
    whole = files[1].stat().st_size
    assert whole == 4096 + 32 * 12
    for cut in range(4096, whole + 1):
        data, index = copy(files, tmp_path / "cut")
        os.truncate(index, cut)
        assert content((data, index)) == states[(cut - 4096) // 32]
        assert index.stat().st_size == 4096 + (cut - 4096) // 32 * 32
    for cut in (0, 1, 4095):
        data, index = copy(files, tmp_path / "cut")
        os.truncate(index, cut)
        with pytest.raises(InvalidInputError, match="index"):
            Image(None, data, index)


def test_data_cut_at_every_byte_leaves_a_prefix_of_the_history(new_writable: NewWritable, tmp_path: Path) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    generator = random.Random(2)
    model = bytearray(SIZE)
    states, ends = [bytes(model)], [4096]
    for _ in range(2):
        offset = generator.randrange(SIZE // 512 - 2) * 512
        data = generator.randbytes(1024)
        image.write(offset, data)
        model[offset : offset + 1024] = data
        states.append(bytes(model))
        ends.append(files[0].stat().st_size)
    image.close()
    for cut in range(4096, ends[-1] + 1):
        pair = copy(files, tmp_path / "cut")
        os.truncate(pair[0], cut)
        expected = states[sum(end <= cut for end in ends) - 1]
        found = Stack([Layer(*pair)]).read(0, SIZE)  # changes nothing and so needs no fsync
        assert found == expected
        if cut % 61 == 0:
            assert content(pair) == expected


@pytest.mark.parametrize("which", [0, 1])
def test_any_damaged_byte_of_an_unflushed_tail_cuts_there(
    new_writable: NewWritable, tmp_path: Path, which: int
) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    states = history(image, 8, random.Random(3))
    image.close()
    generator = random.Random(4)
    for _ in range(150):
        pair = copy(files, tmp_path / "cut")
        blob = bytearray(pair[which].read_bytes())
        blob[generator.randrange(4096, len(blob))] ^= 1 << generator.randrange(8)
        pair[which].write_bytes(blob)
        assert content(pair) in states


def test_what_was_cut_does_not_come_back(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    for i in range(4):
        image.write(i * 4096, bytes([i + 1]) * 4096)
    image.close()
    blob = bytearray(files[1].read_bytes())
    blob[4096 + 32] ^= 1
    files[1].write_bytes(blob)
    image = Image(None, *files)
    assert image.recovery is not None
    assert (image.recovery.records, image.recovery.cut_records) == (1, 3)
    image.write(8 * 4096, b"x" * 4096)
    image.close()
    assert content(files)[:16384] == bytes([1]) * 4096 + bytes(12288)


def test_damage_of_a_flushed_record_is_an_error_and_not_a_cut(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    for i in range(4):
        image.write(i * 4096, bytes([i + 1]) * 4096)
    image.flush()
    image.close()
    blob = bytearray(files[1].read_bytes())
    blob[4096 + 32] ^= 1
    files[1].write_bytes(blob)
    with pytest.raises(InvalidInputError) as caught:
        Image(None, *files)
    assert caught.value.field == "index.record"
    assert files[1].read_bytes() == blob


def test_a_discard_after_a_write_that_failed_can_be_read_again(new_writable: NewWritable) -> None:
    """The failed write had a place in the data file, and the discard stands behind it."""
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    image.write(0, b"x" * 65536)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 65536, before[1]))
    try:
        with pytest.raises(UnavailableError, match="File too large"):
            image.write(131072, b"y" * 65536)
        image.discard(0, 4096)
        image.write(8192, bytes(4096))
        image.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    image.close()
    wanted = bytes(4096) + b"x" * 4096 + bytes(4096) + b"x" * 53248 + bytes(SIZE - 65536)
    image = Image(None, *files)
    assert image.read(0, SIZE) == wanted
    image.write(131072, b"z" * 4096)
    image.close()
    Sealing(*files).finish()
    rebuilt = bytearray(SIZE)
    read_layer(files[0]).lay_over(rebuilt)
    assert rebuilt == wanted[:131072] + b"z" * 4096 + wanted[135168:]


def test_missing_flushed_data_is_an_error(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    image.write(0, b"x" * 8192)
    image.flush()
    image.close()
    os.truncate(files[0], 8192)
    with pytest.raises(InvalidInputError) as caught:
        Image(None, *files)
    assert caught.value.field == "index.moffset"


@pytest.mark.parametrize("cut", ["index", "data", "both"])
def test_flushed_writes_survive_any_loss_of_later_ones(new_writable: NewWritable, tmp_path: Path, cut: str) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    history(image, 10, random.Random(5))
    image.flush()
    flushed = image.read(0, SIZE)
    ends = files[0].stat().st_size, files[1].stat().st_size
    history(image, 10, random.Random(6))
    image.close()
    pair = copy(files, tmp_path / "cut")
    if cut in ("data", "both"):
        os.truncate(pair[0], ends[0])
    if cut in ("index", "both"):
        os.truncate(pair[1], ends[1])
    after = content(pair)
    if cut != "data":
        assert after == flushed
    else:  # discards need no data: those before the first lost write may hold
        assert all(a in (b, 0) for a, b in zip(after, flushed, strict=True))


def test_discard_holds_after_reopen_and_hides_the_lower_layer(new_writable: NewWritable) -> None:
    lower, upper = new_writable("lower", SIZE), new_writable("upper", SIZE)
    image = Image(None, *lower)
    image.write(0, b"l" * 65536)
    image.close()
    stack = Stack([Layer(*lower)])
    image = Image(stack, *upper)
    image.discard(4096, 8192)
    image.close()
    assert content(upper, stack)[:16384] == b"l" * 4096 + bytes(8192) + b"l" * 4096


def test_zeros_written_are_not_stored(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    image.write(0, b"x" * 65536)
    size = files[0].stat().st_size
    image.write(4096, bytes(32768))
    assert files[0].stat().st_size == size
    image.close()
    assert content(files)[:65536] == b"x" * 4096 + bytes(32768) + b"x" * 28672


def test_second_writer_is_refused(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    with pytest.raises(ConflictError, match="open for writing"):
        Image(None, *files)
    image.close()
    Image(None, *files).close()
    with pytest.raises(ConflictError, match="closed"):
        image.read(0, 512)


def test_create_refuses_what_exists_and_bad_arguments(new_writable: NewWritable, tmp_path: Path) -> None:
    data, index = new_writable("top", SIZE)
    before = data.read_bytes(), index.read_bytes()
    good = str(uuid.uuid4())
    with pytest.raises(ConflictError):
        create_writable(data, tmp_path / "other", SIZE, uuid=good)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConflictError):
        create_writable(tmp_path / "other", index, SIZE, uuid=good)
    assert (data.read_bytes(), index.read_bytes()) == before
    for size in (0, 100, 1 << 62):
        with pytest.raises(InvalidInputError, match="virtual_size"):
            create_writable(tmp_path / "a", tmp_path / "b", size, uuid=good)
    with pytest.raises(InvalidInputError, match="uuid"):
        create_writable(tmp_path / "a", tmp_path / "b", SIZE, uuid="x")
    with pytest.raises(AenvError):
        create_writable(tmp_path / "no/a", tmp_path / "no/b", SIZE, uuid=good)


def test_standard_index_becomes_checked_and_stays_readable(vectors: Path, tmp_path: Path) -> None:
    pair = tmp_path / "data", tmp_path / "index"
    shutil.copy(vectors / "layer2.rw.data", pair[0])
    shutil.copy(vectors / "layer2.rw.index", pair[1])
    with pair[1].open("ab") as file:
        file.write(b"torn")
    before = Stack([Layer(vectors / "layer2.rw.data", vectors / "layer2.rw.index")])
    image = Image(None, *pair)
    for offset in range(0, 1 << 30, 1 << 24):
        assert image.read(offset, 1 << 16) == before.read(offset, 1 << 16)
    image.write(0, b"new" * 512)
    image.close()
    image = Image(None, *pair)
    assert image.read(0, 1536) == b"new" * 512
    image.close()
    assert [s.offset for s in Layer(*pair).segments()][:1] == [0]


def test_index_file_is_one_that_other_readers_understand(new_writable: NewWritable) -> None:
    """Each record is a standard entry and a padding entry; an own, simple replay gives the same content."""
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    state = history(image, 50, random.Random(7))[-1]
    image.flush()
    image.close()
    data, index = files[0].read_bytes(), files[1].read_bytes()
    replay = bytearray(SIZE)
    for at in range(4096, len(index), 16):
        word0, word1 = (int.from_bytes(index[at + i : at + i + 8], "little") for i in (0, 8))
        offset, length = word0 & (1 << 50) - 1, word0 >> 50
        if offset == (1 << 50) - 1:
            continue
        moffset, zeroed = word1 & (1 << 55) - 1, word1 >> 55 & 1
        found = bytes(length * 512) if zeroed else data[moffset * 512 : (moffset + length) * 512]
        replay[offset * 512 : (offset + length) * 512] = found
    assert replay == state


# --- sealing and restack ---------------------------------------------------------------------------------------


def test_seal_in_place_is_standard_and_repeatable(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    state = history(image, 40, random.Random(8))[-1]
    image.close()
    sealing = Sealing(*files)
    sealing.finish()
    sealing.finish()
    assert not files[1].exists()
    rebuilt = bytearray(SIZE)
    read_layer(files[0]).lay_over(rebuilt)
    assert rebuilt == state
    assert Stack([Layer(files[0])]).read(0, SIZE) == state


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 8193])
def test_seal_stores_every_segment(new_writable: NewWritable, count: int) -> None:
    files = new_writable("top", 1024 * 8193)
    image = Image(None, *files)
    places = list(range(count))
    random.Random(count).shuffle(places)  # so that none goes on where another ends, in the file either
    for place in places:
        image.write(1024 * place, place.to_bytes(4, "little") * 127 + b"last")
    image.close()
    Sealing(*files).finish()
    found = list(Layer(files[0]).segments())
    assert [(s.offset, s.length) for s in found] == [(1024 * i, 512) for i in range(count)]
    rebuilt = bytearray(1024 * 8193)
    read_layer(files[0]).lay_over(rebuilt)
    assert rebuilt == Stack([Layer(files[0])]).read(0, len(rebuilt))


def test_sealed_layer_is_not_opened_for_writing_again(new_writable: NewWritable, tmp_path: Path) -> None:
    files = new_writable("top", SIZE)
    index = files[1].read_bytes()
    image = Image(None, *files)
    image.write(0, b"x" * 4096)
    image.close()
    index = files[1].read_bytes()
    Sealing(*files).finish()
    files[1].write_bytes(index)  # a crash between the trailer and the removal of the index file
    sealed = files[0].read_bytes()
    with pytest.raises(ConflictError, match="sealed"):
        Image(None, *files)
    assert files[0].read_bytes() == sealed


def test_seal_interrupted_before_its_trailer_can_be_repeated(new_writable: NewWritable, tmp_path: Path) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    state = history(image, 10, random.Random(9))[-1]
    image.close()
    before = copy(files, tmp_path / "before")
    Sealing(*files).finish()
    sealed = files[0].read_bytes()
    for cut in range(before[0].stat().st_size, len(sealed), 97):
        pair = copy(before, tmp_path / "again")
        pair[0].write_bytes(sealed[:cut])
        Sealing(*pair).finish()
        assert Stack([Layer(pair[0])]).read(0, SIZE) == state


def test_restack_changes_nothing_that_is_read(new_writable: NewWritable) -> None:
    generator = random.Random(10)
    image = Image(None, *new_writable("0", SIZE))
    model = bytearray(SIZE)
    names = []
    for i in range(1, 20):
        offset = generator.randrange(SIZE // 4096 - 4) * 4096
        data = generator.randbytes(16384)
        image.write(offset, data)
        model[offset : offset + 16384] = data
        sealing = image.restack(*new_writable(str(i), SIZE))
        names.append(sealing.data_path)
        assert image.read(0, SIZE) == model
        if i % 2:
            sealing.finish()
            assert image.read(0, SIZE) == model
        else:
            unfinished = sealing
            unfinished.finish()
        assert image.segments[0] == 0
    stack = image.stack
    assert stack is not None
    assert stack.layer_count == 19
    image.close()
    assert Stack([Layer(name) for name in names]).read(0, SIZE) == model


def test_restack_refuses_a_layer_of_another_size(new_writable: NewWritable) -> None:
    image = Image(None, *new_writable("a", SIZE))
    image.write(0, b"x" * 512)
    with pytest.raises(InvalidInputError, match="virtual_size"):
        image.restack(*new_writable("b", 2 * SIZE))
    image.write(512, b"y" * 512)
    assert image.read(0, 1024) == b"x" * 512 + b"y" * 512
    with pytest.raises(ConflictError):
        Image(image.stack or Stack([Layer(*new_writable("c", SIZE))])).restack(*new_writable("d", SIZE))


def test_restack_at_255_layers_leaves_the_image_writable(new_writable: NewWritable) -> None:
    image = Image(None, *new_writable("0", SIZE))
    for i in range(1, 256):
        image.restack(*new_writable(str(i), SIZE))
    with pytest.raises(InvalidInputError, match="255"):
        image.restack(*new_writable("256", SIZE))
    image.write(0, b"x" * 512)
    assert image.read(0, 512) == b"x" * 512


def test_resize_hides_what_was_cut_off_and_survives(new_writable: NewWritable) -> None:
    lower, files = new_writable("lower", SIZE), new_writable("top", SIZE)
    image = Image(None, *lower)
    image.write(0, b"l" * SIZE)
    image.close()
    stack = Stack([Layer(*lower)])
    image = Image(stack, *files)
    image.resize(SIZE // 2)
    with pytest.raises(InvalidInputError):
        image.read(SIZE // 2, 512)
    image.resize(2 * SIZE)
    image.write(2 * SIZE - 512, b"e" * 512)
    expected = b"l" * (SIZE // 2) + bytes(3 * SIZE // 2 - 512) + b"e" * 512
    assert image.read(0, 2 * SIZE) == expected
    image.close()
    assert content(files, stack) == expected
    for bad in (0, 100, 1 << 61):
        image = Image(stack, *files)
        with pytest.raises(InvalidInputError):
            image.resize(bad)
        image.close()


@pytest.mark.parametrize(("offset", "length"), [(1, 512), (0, 511), (SIZE, 512), (SIZE - 512, 1024), (1 << 63, 512)])
def test_unaligned_or_outside(new_writable: NewWritable, offset: int, length: int) -> None:
    image = Image(None, *new_writable("top", SIZE))
    with pytest.raises(InvalidInputError):
        image.write(offset, b"x" * length)
    with pytest.raises(InvalidInputError):
        image.discard(offset, length)
    with pytest.raises(InvalidInputError):
        image.read(offset, length)
    assert image.read(0, SIZE) == bytes(SIZE)


def test_read_only_image_refuses_changes(new_writable: NewWritable) -> None:
    files = new_writable("lower", SIZE)
    image = Image(Stack([Layer(*files)]))
    assert image.read_only
    for change in (
        lambda: image.write(0, b"x" * 512),
        lambda: image.discard(0, 512),
        lambda: image.resize(SIZE * 2),
    ):
        with pytest.raises(ConflictError):
            change()
    image.flush()


# --- against a flat model --------------------------------------------------------------------------------------

sectors = st.integers(0, 255)
operation = st.one_of(
    st.tuples(st.just("write"), sectors, st.integers(1, 40), st.integers(0, 255)),
    st.tuples(st.just("discard"), sectors, st.integers(1, 80), st.just(0)),
    st.tuples(st.just("restack"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("flush"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.integers(0, 70), st.just(0)),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(operation, max_size=40))
def test_any_history_agrees_with_a_flat_model(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int, int]]
) -> None:
    """`reopen` cuts so many bytes off the index: the content must be that after some operation since the last flush."""
    folder = tmp_path_factory.mktemp("model")
    size = 256 * 512
    names = iter(range(1000))

    def new() -> tuple[Path, Path]:
        name = next(names)
        pair = folder / f"{name}.data", folder / f"{name}.index"
        create_writable(*pair, size, uuid=str(uuid.uuid4()))
        return pair

    files = new()
    layers: list[str] = []
    image = Image(None, *files)
    model = bytearray(size)
    since_flush = [bytes(model)]
    for what, sector, count, byte in operations:
        offset = sector * 512
        length = min(count * 512, size - offset)
        if what == "write":
            image.write(offset, bytes([byte]) * length)
            model[offset : offset + length] = bytes([byte]) * length
        elif what == "discard":
            image.discard(offset, length)
            model[offset : offset + length] = bytes(length)
        elif what == "restack":
            files = new()
            sealing = image.restack(*files)
            sealing.finish()
            layers.append(sealing.data_path)
            since_flush = []
        elif what == "flush":
            image.flush()
            since_flush = []
        else:
            image.close()
            index_size = files[1].stat().st_size
            flushed = 4096 if not since_flush else None
            if flushed is None:
                os.truncate(files[1], max(4096, index_size - min(count, 32 * (len(since_flush) - 1))))
            image = Image(Stack([Layer(name) for name in layers]) if layers else None, *files)
            found = image.read(0, size)
            assert found in [*since_flush, bytes(model)]
            model[:] = found
            image.flush()
            since_flush = []
        since_flush.append(bytes(model))
        assert image.read(0, size) == model
    image.close()


# --- kill -9, ENOSPC, EIO --------------------------------------------------------------------------------------

WRITER = """
import sys, random
from aenv._native.lsmt import Image
image = Image(None, sys.argv[1], sys.argv[2])
generator = random.Random(int(sys.argv[3]))
number = 0
while True:
    number += 1
    offset = generator.randrange(256) * 4096
    image.write(offset, number.to_bytes(8, "little") * 512)
    print(number, offset, flush=True)
    if number % 16 == 0:
        image.flush()
"""


def test_killed_writer_loses_no_acknowledged_write(new_writable: NewWritable) -> None:
    """A killed server is no power loss: the page cache has all that was acknowledged."""
    files = new_writable("top", SIZE)
    expected = dict.fromkeys(range(0, SIZE, 4096), 0)
    generator = random.Random(11)
    for round_ in range(6):
        command = [sys.executable, "-c", WRITER, *map(str, files), str(round_)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(generator.randrange(20, 200))]
        process.send_signal(signal.SIGKILL)
        lines += [line for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]
        replay = random.Random(round_)
        for line in lines:
            number, offset = map(int, line.split())
            assert offset == replay.randrange(256) * 4096
            expected[offset] = number
        unacknowledged = replay.randrange(256) * 4096, len(lines) + 1
        image = Image(None, *files)
        for offset, number in expected.items():
            found = image.read(offset, 4096)
            value = int.from_bytes(found[:8], "little")
            assert value == number or (offset, value) == unacknowledged
            assert found == found[:8] * 512, "no write shows half"
            expected[offset] = value
        image.close()


@pytest.mark.root
def test_full_disk_fails_the_write_and_loses_nothing(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", mount], check=True)
    try:
        files = mount / "data", mount / "index"
        create_writable(*files, 16 << 20, uuid=str(uuid.uuid4()))
        image = Image(None, *files)
        model = bytearray(16 << 20)
        reasons: set[str] = set()
        for i in range(300):
            data = bytes([i % 255 + 1]) * 8192
            try:
                image.write(i * 8192, data)
            except UnavailableError as error:
                reasons.add(str(error))
                continue
            model[i * 8192 : i * 8192 + 8192] = data
        assert reasons == {"write: No space left on device"}
        assert image.read(0, len(model)) == model
        image.flush()
        image.close()
        assert content(files) == model
    finally:
        subprocess.run(["umount", mount], check=True)


def until_full(write: Callable[[], object]) -> None:
    for _ in range(10_000):
        try:
            write()
        except (OSError, UnavailableError):
            return
    pytest.fail("the disk is not full yet")


@pytest.mark.root
def test_layer_full_of_dead_data_opens_on_a_full_disk(tmp_path: Path) -> None:
    """Finding the dead space again rewrites the index file, for which there is no room here."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "tmpfs", mount], check=True)
    try:
        files = mount / "data", mount / "index"
        create_writable(*files, 4 << 20, uuid=str(uuid.uuid4()))
        image = Image(None, *files)
        for i in range(300):
            image.write(i % 64 * 65536, bytes([i % 255 + 1]) * 65536)
        until_full(lambda: image.write(0, b"x" * 65536))
        expected = image.read(0, 4 << 20)
        image.close()
        with (mount / "fill").open("wb", buffering=0) as file:
            until_full(lambda: file.write(b"x" * 4096))
        assert content(files) == expected
        (mount / "fill").unlink()
        assert content(files) == expected
        image = Image(None, *files)
        for i in range(64):
            image.write(i * 65536, b"y" * 65536)
        assert image.read(0, 4 << 20) == b"y" * (4 << 20)
        image.close()
    finally:
        subprocess.run(["umount", mount], check=True)


FAIL_SYNC = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
int fdatasync(int fd) { (void)fd; errno = EIO; return -1; }
"""

AFTER_EIO = """
import sys
from aenv._native.lsmt import Image
image = Image(None, sys.argv[1], sys.argv[2])
image.write(0, b"x" * 4096)
for operation in (image.flush, image.flush, lambda: image.write(4096, b"y" * 4096)):
    try:
        operation()
    except Exception as error:
        print(type(error).__name__, error)
print(image.read(0, 4096) == b"x" * 4096)
"""


def test_failed_flush_is_never_forgotten(new_writable: NewWritable, tmp_path: Path) -> None:
    """After EIO the kernel marks pages clean: a second flush that succeeds would be a lie."""
    files = new_writable("top", SIZE)
    (tmp_path / "fail.c").write_text(FAIL_SYNC)
    library = tmp_path / "fail.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "fail.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", AFTER_EIO, *map(str, files)], env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["UnavailableError"] * 3 + ["True"]
    assert "flush: Input/output error" in lines[0]


# --- space -----------------------------------------------------------------------------------------------------


def test_overwritten_space_is_used_again(new_writable: NewWritable) -> None:
    size = 8 << 20
    files = new_writable("top", size)
    image = Image(None, *files)
    model = bytearray(size)
    generator = random.Random(12)
    for _ in range(1500):
        offset = generator.randrange(size // 65536) * 65536
        data = generator.randbytes(65536)
        image.write(offset, data)
        model[offset : offset + 65536] = data
        if generator.random() < 0.03:
            image.flush()
    assert image.read(0, size) == model
    assert files[0].stat().st_size < 5 * size, "94 MB were written"
    image.close()
    assert content(files) == model


def test_dead_space_is_found_again_after_open(new_writable: NewWritable) -> None:
    size = 4 << 20
    files = new_writable("top", size)
    for round_ in range(1, 9):
        image = Image(None, *files)
        for offset in range(0, size, 65536):
            for value in (0x80, round_):
                image.write(offset, bytes([value]) * 65536)
        image.flush()
        image.close()
    assert files[0].stat().st_size < 6 * size, "64 MB were written"
    assert content(files) == bytes([8]) * size


def test_index_file_of_a_busy_disk_stays_short(new_writable: NewWritable) -> None:
    files = new_writable("top", SIZE)
    image = Image(None, *files)
    for i in range(150_000):
        image.write(i % 16 * 4096, (i + 1).to_bytes(4, "little") * 128)
        if i % 1000 == 0:
            image.flush()
    state = image.read(0, SIZE)
    image.close()
    assert files[1].stat().st_size < 4 << 20, "150,000 records are 4.8 MB"
    assert content(files) == state
