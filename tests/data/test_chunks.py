"""Chunks as they are written to HDF5, and the map of where they lie."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import JPEG, Coding
from spatialdl.data.jpeg import encode
from tests.data.conftest import noise, picture

IMAGE = noise(70, 100)


@pytest.mark.parametrize("channels", [1, 3])
def test_chunks_of_jpeg_are_whole_streams_that_hdf5_does_not_read(h5: h5py.File, channels) -> None:
    image = picture(70, 100, channels)
    Chunks(h5, "image", image.shape, (32, 48), coding=Coding("jpeg", 80)).write(image)
    dataset = h5["image"]
    assert (dataset.shape, dataset.dtype) == (image.shape, np.uint8)
    assert dataset.chunks == (32, 48, channels)
    for where in (..., np.s_[:1, :1], np.s_[69, 99, 0]):
        with pytest.raises(OSError, match=r"."):
            dataset[where]
    settings = dataset.id.get_create_plist()
    assert settings.get_nfilters() == 1
    number, flags, values, _ = settings.get_filter(0)
    assert (number, flags) == (JPEG, h5py.h5z.FLAG_OPTIONAL)
    assert values == (80, 48, 32, int(channels == 3))  # quality, columns, rows, colours
    padded = np.pad(image, ((0, 26), (0, 44), (0, 0)), mode="edge")
    for row in range(0, 70, 32):
        for col in range(0, 100, 48):
            unfiltered, stream = dataset.id.read_direct_chunk((row, col, 0))
            assert unfiltered == 0
            assert bytes(stream) == encode(padded[row : row + 32, col : col + 48], 80)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_others_read_what_is_compressed_without_loss(h5: h5py.File, codec: str, dtype: str) -> None:
    pytest.importorskip("hdf5plugin")
    image = (picture(70, 100) * 1.5).astype(dtype)
    Chunks(h5, "a", image.shape, (32, 48), dtype, coding=Coding(codec)).write(image)
    h5.flush()
    with h5py.File(h5.filename) as again:
        assert (again["a"][:] == image).all()
        assert again["a"].fletcher32


def test_what_a_codec_does_not_hold_is_refused(h5: h5py.File) -> None:
    for channels, dtype, says in [
        (2, np.uint8, "2 channels"),
        (3, np.uint16, "type uint16, but codec 'jpeg' supports only uint8; use codec="),
    ]:
        with pytest.raises(ValueError, match=says):
            Chunks(h5, "image", (8, 8, channels), (8, 8), dtype, coding=Coding("jpeg"))
    assert "image" not in h5


def test_boxes_that_are_not_there_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    found = map_chunks(h5["image"], False, 2**40)
    assert len(list(found.parts((slice(32, 64), slice(48, 96)), (32, 48, 3)))) == 1
    for where in [
        (0, slice(0, 9), slice(0, 9)),
        (slice(0, 71), slice(0, 9)),
        (slice(0, 9), slice(92, 101)),
        (slice(-1, 8), slice(0, 9)),
        (slice(0, 8), slice(0, 9)),
    ]:
        with pytest.raises(ValueError, match=r"its shape is \(70, 100, 3\), requested .* into"):
            list(found.parts(where, (9, 9, 3)))


def test_what_is_not_raw_is_left_to_hdf5(h5: h5py.File) -> None:
    h5["whole"] = IMAGE
    h5.create_dataset("zip", data=IMAGE, chunks=(32, 48, 3), compression="gzip")
    h5.create_dataset("big", data=IMAGE.astype(">i2"), chunks=(32, 48, 3))
    h5.create_dataset("planes", data=IMAGE, chunks=(32, 48, 1))
    h5.create_dataset("pairs", data=np.stack([IMAGE, IMAGE]), chunks=(2, 32, 48, 3))
    h5.create_dataset("line", data=IMAGE.reshape(-1), chunks=(48,))
    for name in h5:
        assert map_chunks(h5[name], name == "pairs", 2**40) is None, name


def test_other_codecs_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "raw", IMAGE.shape, (32, 48)).write(IMAGE)
    Chunks(h5, "zstd", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    for name, codec, filters in [("raw", "jpeg", "[]"), ("zstd", "lz4", "[32015, 3]")]:
        says = re.escape(f"it has uint8 in filters {filters}, expected codec {codec!r}")
        with pytest.raises(ValueError, match=says):
            map_chunks(h5[name], False, 2**40, codec)
    assert map_chunks(h5["zstd"], False, 2**40) is None
    h5["zstd"].id.write_direct_chunk((32, 48, 0), IMAGE[:32, :48].copy(), filter_mask=1)
    with pytest.raises(ValueError, match=r"chunk at \(32, 48, 0\) skipped its filters"):
        map_chunks(h5["zstd"], False, 2**40, "zstd")
    with pytest.raises(ValueError, match=r"chunk at \(\d+, \d+, 0\) has 4608 bytes at \d+, expect"):
        map_chunks(h5["raw"], False, 20_000)  # beyond the file


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
    with ShardWriter(tmp_path / "set") as writer:
        for _ in range(3):
            writer.add(noise(600, 600), mask=noise(600, 600)[..., 0])
    shard = tmp_path / "set" / "shard-00000.h5"
    with h5py.File(shard) as file:
        for name in ("images", "masks"):
            assert (map_chunks(file[name], True, shard.stat().st_size).offsets % 4096 == 0).all()
    assert shard.stat().st_size < 3 * 4 * 512 * 512 * 4 + 50_000  # and there is little between
