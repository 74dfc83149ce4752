from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import JPEG, Coding
from spatialdl.data.jpeg import encode

RANDOM = np.random.default_rng(0)


def picture(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, channels))).astype(np.uint8)


@pytest.fixture
def h5(tmp_path: Path) -> h5py.File:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


@pytest.mark.parametrize("chunk", [(32, 48), (70, 100), (128, 128)])
def test_raw_chunks_are_plain_hdf5(h5: h5py.File, chunk: tuple[int, int]) -> None:
    image = picture(70, 100)
    Chunks(h5, "image", image.shape, chunk).write(image)
    Chunks(h5, "mask", (70, 100), chunk).write(image[..., 0])
    stack = Chunks(h5, "stack", image.shape, chunk, stacked=True)
    for number in range(3):
        assert stack.grow() == number
        stack.write(image + np.uint8(number), number=number)
    assert (h5["image"][:] == image).all()
    assert (h5["mask"][:] == image[..., 0]).all()
    assert (h5["stack"][:] == [image, image + 1, image + 2]).all()
    assert h5["stack"].chunks == (1, *chunk, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_reader_without_the_filter_gets_an_error(h5: h5py.File, channels: int) -> None:
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


def test_each_chunk_is_a_jpeg_of_full_size(h5: h5py.File) -> None:
    image = picture(70, 100)
    Chunks(h5, "image", image.shape, (32, 48), coding=Coding("jpeg", 80)).write(image)
    padded = np.pad(image, ((0, 26), (0, 44), (0, 0)), mode="edge")
    for row in range(0, 70, 32):
        for col in range(0, 100, 48):
            unfiltered, stream = h5["image"].id.read_direct_chunk((row, col, 0))
            assert unfiltered == 0
            assert bytes(stream) == encode(padded[row : row + 32, col : col + 48], 80)


def test_types_that_are_not_bytes_are_plain_hdf5(h5: h5py.File) -> None:
    for dtype in ("uint16", "float16", "float32", "float64"):
        image = (picture(70, 100, 2) * 100.5).astype(dtype)
        Chunks(h5, dtype, image.shape, (32, 48), dtype).write(image)
        assert h5[dtype].dtype == dtype
        assert (h5[dtype][:] == image).all()


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
    jpeg = Coding("jpeg")
    with pytest.raises(ValueError, match="2 channels"):
        Chunks(h5, "image", (8, 8, 2), (8, 8), coding=jpeg)
    with pytest.raises(
        ValueError, match="type uint16, but codec 'jpeg' supports only uint8; use codec="
    ):
        Chunks(h5, "image", (8, 8, 3), (8, 8), np.uint16, coding=jpeg)
    assert "image" not in h5
