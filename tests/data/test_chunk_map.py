from __future__ import annotations

import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.data.chunk_map import MISSING, map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import Codec, Coding

IMAGE = np.random.default_rng(0).integers(0, 256, (70, 100, 3), np.uint8)


@pytest.fixture
def h5(tmp_path: Path) -> h5py.File:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


def test_offsets_are_where_the_pixels_lie(h5: h5py.File, tmp_path: Path) -> None:
    stack = Chunks(h5, "stack", IMAGE.shape, (32, 48), stacked=True)
    for number in range(3):
        stack.write(IMAGE + np.uint8(number), number=stack.grow())
    Chunks(h5, "mask", (70, 100), (32, 48)).write(IMAGE[..., 0])
    h5.flush()
    content = np.frombuffer((tmp_path / "a.h5").read_bytes(), np.uint8)
    found = map_chunks(h5["stack"], True, len(content))
    assert found is not None
    assert (found.shape, found.cell) == ((3, 70, 100, 3), (32, 48, 3))
    assert found.offsets.shape == (3, 3, 3)
    assert found.offsets.dtype == np.int64
    begin = found.offsets[2, 1, 0]
    chunk = content[begin : begin + 32 * 48 * 3].reshape(32, 48, 3)
    assert (chunk == IMAGE[32:64, :48] + np.uint8(2)).all()
    found = map_chunks(h5["mask"], False, len(content))
    assert found is not None
    begin = found.offsets[0, 1]
    chunk = content[begin : begin + 32 * 48].reshape(32, 48)
    assert (chunk == IMAGE[:32, 48:96, 0]).all()


def test_chunks_that_were_not_written_are_missing(h5: h5py.File) -> None:
    dataset = h5.create_dataset("image", (70, 100, 3), np.uint8, chunks=(32, 48, 3))
    dataset[40, 99] = 1
    found = map_chunks(dataset, False, 2**40)
    assert found is not None
    assert np.argwhere(found.offsets != MISSING).tolist() == [[1, 2]]


def test_parts_tile_the_box(h5: h5py.File) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    found = map_chunks(h5["image"], False, 2**40)
    assert found is not None
    parts = list(found.parts((slice(31, 65), slice(47, 97)), (34, 50, 3)))
    assert [part.begin for part in parts] == found.offsets.ravel().tolist()
    assert parts[0][2:] == ((slice(31, 32), slice(47, 48)), (slice(0, 1), slice(0, 1)))
    assert parts[4][2:] == ((slice(0, 32), slice(0, 48)), (slice(1, 33), slice(1, 49)))
    assert parts[8][2:] == ((slice(0, 1), slice(0, 1)), (slice(33, 34), slice(49, 50)))
    assert [part.chunk for part in parts] == [(row, col) for row in range(3) for col in range(3)]
    assert len(list(found.parts((slice(32, 64), slice(48, 96)), (32, 48, 3)))) == 1


@pytest.mark.parametrize(
    "where",
    [
        (0, slice(0, 9), slice(0, 9)),
        (slice(0, 71), slice(0, 9)),
        (slice(0, 9), slice(92, 101)),
        (slice(-1, 8), slice(0, 9)),
        (slice(0, 8), slice(0, 9)),
    ],
)
def test_boxes_that_are_not_there_are_refused(h5: h5py.File, where: tuple) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    found = map_chunks(h5["image"], False, 2**40)
    assert found is not None
    with pytest.raises(ValueError, match=r"its shape is \(70, 100, 3\), requested .* into"):
        list(found.parts(where, (9, 9, 3)))


def test_what_is_not_raw_is_left_to_hdf5(h5: h5py.File) -> None:
    h5["whole"] = IMAGE
    h5.create_dataset("zip", data=IMAGE, chunks=(32, 48, 3), compression="gzip")
    h5.create_dataset("big", data=IMAGE.astype(">i2"), chunks=(32, 48, 3))
    h5.create_dataset("planes", data=IMAGE, chunks=(32, 48, 1))
    h5.create_dataset("pairs", data=np.stack([IMAGE, IMAGE]), chunks=(2, 32, 48, 3))
    h5.create_dataset("line", data=IMAGE.reshape(-1), chunks=(48,))
    for name in ("whole", "zip", "big", "planes", "line"):
        assert map_chunks(h5[name], False, 2**40) is None, name
    assert map_chunks(h5["pairs"], True, 2**40) is None


def test_types_of_more_than_a_byte_are_counted_in_bytes(h5: h5py.File) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48), np.float32).write(IMAGE.astype(np.float32))
    h5.flush()
    content = Path(h5.filename).read_bytes()
    found = map_chunks(h5["image"], False, len(content))
    assert found is not None
    assert (found.dtype, found.sizes) == (np.float32, None)
    chunk = np.frombuffer(content, "<f4", 32 * 48 * 3, found.offsets[1, 1])
    assert (chunk.reshape(32, 48, 3) == IMAGE[32:64, 48:96]).all()


@pytest.mark.parametrize("codec", ["jpeg", "zstd", "lz4"])
def test_streams_have_sizes(h5: h5py.File, codec: Codec) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48), coding=Coding(codec)).write(IMAGE)
    h5.flush()
    content = Path(h5.filename).read_bytes()
    found = map_chunks(h5["image"], False, len(content), codec)
    assert found is not None
    assert found.sizes is not None
    assert found.nbytes == 2 * found.offsets.nbytes
    begin = found.offsets[1, 2]
    stream = h5["image"].id.read_direct_chunk((32, 96, 0))[1]
    assert content[begin : begin + found.sizes[1, 2]] == bytes(stream)


def test_other_codecs_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "raw", IMAGE.shape, (32, 48)).write(IMAGE)
    Chunks(h5, "zstd", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    for name, codec, filters in [
        ("raw", "jpeg", "[]"),
        ("raw", "zstd", "[]"),
        ("zstd", "lz4", "[32015, 3]"),
    ]:
        says = re.escape(f"it has uint8 in filters {filters}, expected codec {codec!r}")
        with pytest.raises(ValueError, match=says):
            map_chunks(h5[name], False, 2**40, codec)
    assert map_chunks(h5["zstd"], False, 2**40) is None
    h5["zstd"].id.write_direct_chunk((32, 48, 0), IMAGE[:32, :48].copy(), filter_mask=1)
    with pytest.raises(ValueError, match=r"chunk at \(32, 48, 0\) skipped its filters"):
        map_chunks(h5["zstd"], False, 2**40, "zstd")


def test_chunks_beyond_the_file_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    with pytest.raises(ValueError, match=r"chunk at \(\d+, \d+, 0\) has 4608 bytes at \d+, expect"):
        map_chunks(h5["image"], False, 20_000)


@pytest.mark.parametrize(
    ("rows", "says"),
    [(0, "lies outside of"), (40, "lies outside of"), (2**60, "whose chunks do not fit")],
)
def test_an_image_of_another_size_than_its_chunks(tmp_path: Path, rows: int, says: str) -> None:
    """A few damaged bytes were an `IndexError`, or more memory than there is."""
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    content = (tmp_path / "a.h5").read_bytes()
    before = struct.pack("<3Q", *IMAGE.shape)
    assert before in content
    damaged = content.replace(before, struct.pack("<3Q", rows, *IMAGE.shape[1:]))
    (tmp_path / "a.h5").write_bytes(damaged)
    with h5py.File(tmp_path / "a.h5") as h5, pytest.raises(ValueError, match=says):
        map_chunks(h5["image"], False, len(content))


def test_chunks_of_shards_begin_with_a_page(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8)
    with ShardWriter(tmp_path / "set") as writer:
        for _ in range(3):
            writer.add(pixels, mask=pixels[..., 0])
    shard = tmp_path / "set" / "shard-00000.h5"
    with h5py.File(shard) as file:
        for name in ("images", "masks"):
            found = map_chunks(file[name], True, shard.stat().st_size)
            assert found is not None
            assert (found.offsets % 4096 == 0).all()
    assert shard.stat().st_size < 3 * 4 * 512 * 512 * 4 + 50_000  # and there is little between
