"""What we write, an independent reader accepts and reads back to the bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv._native.lsmt import Image, Layer, Stack, Writer
from aenv.errors import InvalidInputError
from tests.blocks.reader import read_layer

SIZE = 4 << 20
NewWritable = Callable[..., tuple[Path, Path]]
FORMS = [("plain", 4096), *((f, b) for f in ("lz4", "zstd") for b in (4096, 8192, 16384, 32768, 65536))]


def some_bytes(generator: random.Random, length: int) -> bytes:
    """Half of it compresses well."""
    return b"".join(
        generator.randbytes(512) if generator.random() < 0.5 else bytes([generator.randrange(1, 256)]) * 512
        for _ in range(length // 512)
    )


def fill(image: Image, model: bytearray, generator: random.Random, writes: int = 60) -> None:
    for _ in range(writes):
        offset = generator.randrange(SIZE // 512) * 512
        length = min(generator.choice([512, 4096, 4096, 20480, 131072]), SIZE - offset)
        if generator.random() < 0.2:
            image.discard(offset, length)
            model[offset : offset + length] = bytes(length)
        else:
            data = bytes(length) if generator.random() < 0.15 else some_bytes(generator, length)
            image.write(offset, data)
            model[offset : offset + length] = data


def commit(stack: Stack, path: Path, **options: object) -> Layer:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        result = stack.commit(fd, **options)  # type: ignore[arg-type]
    finally:
        os.close(fd)
    assert path.stat().st_size == result.file_size
    return Layer(path)


@pytest.fixture
def two(new_writable: NewWritable) -> tuple[Stack, Layer, bytes, bytes]:
    """A lower stack, a writable layer over it, and their contents."""
    generator = random.Random(1)
    model = bytearray(SIZE)
    lower = new_writable("lower", SIZE)
    image = Image(None, *lower)
    fill(image, model, generator)
    image.flush()
    image.close()
    below = Stack([Layer(*lower)])
    content = bytes(model)
    upper = new_writable("upper", SIZE)
    image = Image(below, *upper)
    fill(image, model, generator)
    image.flush()
    image.close()
    return below, Layer(*upper), content, bytes(model)


@pytest.mark.parametrize(("form", "block_size"), FORMS)
@pytest.mark.parametrize("tar", [False, True])
def test_committed_stack_reads_the_same(
    two: tuple[Stack, Layer, bytes, bytes], tmp_path: Path, form: str, block_size: int, tar: bool
) -> None:
    below, upper, _, content = two
    uuid = "01234567-89ab-cdef-0123-456789abcdef"
    layer = commit(
        below.push(upper), tmp_path / "out", form=form, block_size=block_size, tar=tar, uuid=uuid, user_tag="a tag"
    )
    assert Stack([layer]).read(0, SIZE) == content
    layer.verify()
    independent = read_layer(tmp_path / "out")
    assert (independent.virtual_size, independent.uuid, independent.user_tag) == (SIZE, uuid, "a tag")
    image = bytearray(SIZE)
    independent.lay_over(image)
    assert image == content


def test_bottom_layer_holds_no_zero_block(two: tuple[Stack, Layer, bytes, bytes], tmp_path: Path) -> None:
    below, _, content, _ = two
    commit(below, tmp_path / "out")
    for sector, _, data in read_layer(tmp_path / "out").segments:
        assert data is not None, "nothing lies below that a zeroed segment could hide"
        whole = range(-sector % 8 * 512, len(data) - 4095, 4096)
        assert all(any(data[at : at + 4096]) for at in whole)
    assert any(content)


def test_upper_layer_hides_the_lower_with_zeros(two: tuple[Stack, Layer, bytes, bytes], tmp_path: Path) -> None:
    below, upper, lower_content, content = two
    layer = commit(Stack([upper]), tmp_path / "out", keep_zeros=True)
    assert below.push(layer).read(0, SIZE) == content
    image = bytearray(lower_content)
    read_layer(tmp_path / "out").lay_over(image)
    assert image == content


def test_blocks_equal_to_the_parent_are_left_out(new_writable: NewWritable, tmp_path: Path) -> None:
    generator = random.Random(2)
    content = generator.randbytes(65536)
    lower = new_writable("lower", SIZE)
    image = Image(None, *lower)
    image.write(0, content)
    image.close()
    below = Stack([Layer(*lower)])
    upper = new_writable("upper", SIZE)
    image = Image(below, *upper)
    image.write(0, content[:4096] + generator.randbytes(4096) + content[8192:])
    image.write(131072, bytes(4096))
    image.close()
    layer = commit(Stack([Layer(*upper)]), tmp_path / "out", keep_zeros=True, parent=below)
    assert [(s, n) for s, n, _ in read_layer(tmp_path / "out").segments] == [(8, 8)]
    assert layer.info.data_bytes == 4096


def test_adjacent_segments_coalesce_and_none_is_too_long(new_writable: NewWritable, tmp_path: Path) -> None:
    size = 32 << 20
    files = new_writable("lower", size)
    image = Image(None, *files)
    for offset in reversed(range(0, size, 1 << 16)):
        image.write(offset, bytes([offset >> 16 & 255 | 1]) * (1 << 16))
    image.close()
    commit(Stack([Layer(*files)]), tmp_path / "out")
    segments = read_layer(tmp_path / "out").segments
    assert len(segments) <= 5
    assert max(sectors for _, sectors, _ in segments) <= 16383


def test_gaps_are_bridged_when_there_are_too_many_segments(new_writable: NewWritable, tmp_path: Path) -> None:
    generator = random.Random(3)
    lower, upper = new_writable("lower", SIZE), new_writable("upper", SIZE)
    image = Image(None, *lower)
    image.write(0, generator.randbytes(SIZE))
    image.close()
    below = Stack([Layer(*lower)])
    image = Image(below, *upper)
    for block in range(0, SIZE // 4096, 2):
        image.write(block * 4096, generator.randbytes(4096))
    content = image.read(0, SIZE)
    image.close()
    alone = Stack([Layer(*upper)])
    layer = commit(alone, tmp_path / "plain", keep_zeros=True, parent=below)
    assert layer.info.entries == 512
    layer = commit(alone, tmp_path / "bridged", keep_zeros=True, parent=below, max_entries=100)
    assert len(read_layer(tmp_path / "bridged").segments) <= 100
    assert below.push(layer).read(0, SIZE) == content
    with pytest.raises(InvalidInputError, match="parent"):
        commit(alone, tmp_path / "without", keep_zeros=True, max_entries=100)


def test_compaction_of_a_range_keeps_the_stack_the_same(new_writable: NewWritable, tmp_path: Path) -> None:
    generator = random.Random(4)
    model = bytearray(SIZE)
    layers: list[Layer] = []
    for i in range(5):
        files = new_writable(f"layer{i}", SIZE)
        image = Image(Stack(layers) if layers else None, *files)
        fill(image, model, generator, 20)
        image.close()
        layers.append(Layer(*files))
    assert Stack(layers).read(0, SIZE) == model
    middle = commit(Stack(layers[1:4]), tmp_path / "middle", keep_zeros=True, parent=Stack(layers[:1]))
    assert Stack([layers[0], middle, layers[4]]).read(0, SIZE) == model


def test_stack_of_255_layers_and_not_more(tmp_path: Path) -> None:
    layers = []
    for i in range(255):
        with (tmp_path / f"{i}").open("wb") as file:
            writer = Writer(file.fileno(), SIZE)
            writer.add(i * 4096, bytes([i + 1]) * 4096)
            writer.add((i + 1) * 4096, bytes([255 - i]) * 4096)
            writer.finish()
        layers.append(Layer(tmp_path / f"{i}"))
    expected = b"".join(bytes([i + 1]) * 4096 for i in range(255)) + bytes([1]) * 4096
    pushed = Stack(layers[:1])
    for layer in layers[1:]:
        pushed = pushed.push(layer)
    for stack in (Stack(layers), pushed):
        assert stack.layer_count == 255
        assert stack.read(0, len(expected)) == expected
    assert pushed.level_count <= 9
    with pytest.raises(InvalidInputError, match="layers"):
        pushed.push(layers[0])
    with pytest.raises(InvalidInputError, match="layers"):
        Stack([*layers, layers[0]])
    with pytest.raises(InvalidInputError, match="layers"):
        Stack([])


def test_exception_in_progress_stops_a_commit(two: tuple[Stack, Layer, bytes, bytes], tmp_path: Path) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(two[0], tmp_path / "out", progress=stop)


def test_index_is_padded_to_whole_blocks(tmp_path: Path) -> None:
    for count in (0, 1, 256, 257):
        path = tmp_path / str(count)
        with path.open("wb") as file:
            writer = Writer(file.fileno(), 1 << 30)
            for i in range(count):
                writer.add(i * 8192, b"x" * 512)
            writer.finish()
        assert Layer(path).info.entries == -(-count // 256) * 256
        assert path.stat().st_size == 8192 + count * 512 + -(-count // 256) * 4096
        assert len(read_layer(path).segments) == count


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("form", {"form": "lzma"}),
        ("block_size", {"form": "lz4", "block_size": 2048}),
        ("block_size", {"form": "zstd", "block_size": 131072}),
        ("block_size", {"form": "lz4", "block_size": 5000}),
        ("uuid", {"uuid": "no"}),
        ("uuid", {"uuid": "01234567-89ab-cdef-0123-456789abcdefg"}),
        ("parent_uuid", {"parent_uuid": "0123456789ab-cdef-0123-456789abcdef1"}),
        ("user_tag", {"user_tag": "x" * 257}),
        ("user_tag", {"user_tag": "a\0b"}),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, field: str, options: dict[str, object]) -> None:
    with (tmp_path / "out").open("wb") as file:
        with pytest.raises(InvalidInputError) as caught:
            Writer(file.fileno(), SIZE, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_writer_refuses_wrong_order_and_bad_sizes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        for size in (511, -512, 1 << 62):
            with pytest.raises(InvalidInputError, match="virtual_size"):
                Writer(file.fileno(), size)
        writer = Writer(file.fileno(), SIZE)
        writer.add(8192, b"x" * 4096)
        for offset, length in ((4096, 4096), (8192, 512), (SIZE, 512), (SIZE - 512, 1024), (100, 512), (12288, 100)):
            with pytest.raises(InvalidInputError):
                writer.add(offset, b"y" * length)
        with pytest.raises(InvalidInputError):
            writer.add_zeros(SIZE, 512)
        writer.finish()
    assert [(s, n) for s, n, _ in read_layer(tmp_path / "out").segments] == [(16, 8)]


def test_full_disk_fails_a_commit_with_the_reason(two: tuple[Stack, Layer, bytes, bytes]) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(Exception, match="No space left") as caught:
            two[0].commit(fd)
    finally:
        os.close(fd)
    assert type(caught.value).__name__ == "UnavailableError"
