from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.chunks import JPEG_FILTER, Chunks, read_jpeg
from spatialdl.data.codec import decode, encode

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
    Chunks(h5, "image", image.shape, (32, 48), codec="jpeg", quality=80).write(image)
    dataset = h5["image"]
    assert (dataset.shape, dataset.dtype) == (image.shape, np.uint8)
    assert dataset.chunks == (32, 48, channels)
    for where in (..., np.s_[:1, :1], np.s_[69, 99, 0]):
        with pytest.raises(OSError, match=r"."):
            dataset[where]
    settings = dataset.id.get_create_plist()
    assert settings.get_nfilters() == 1
    number, flags, values, _ = settings.get_filter(0)
    assert (number, flags) == (JPEG_FILTER, h5py.h5z.FLAG_OPTIONAL)
    assert values == (80, 48, 32, int(channels == 3))  # quality, columns, rows, colours


def test_each_chunk_is_a_jpeg_of_full_size(h5: h5py.File) -> None:
    image = picture(70, 100)
    Chunks(h5, "image", image.shape, (32, 48), codec="jpeg", quality=80).write(image)
    padded = np.pad(image, ((0, 26), (0, 44), (0, 0)), mode="edge")
    for row in range(0, 70, 32):
        for col in range(0, 100, 48):
            unfiltered, stream = h5["image"].id.read_direct_chunk((row, col, 0))
            assert unfiltered == 0
            assert bytes(stream) == encode(padded[row : row + 32, col : col + 48], 80)


@pytest.mark.parametrize("stacked", [False, True])
def test_boxes_of_jpeg_are_slices_of_the_whole(h5: h5py.File, stacked: bool) -> None:
    image = picture(70, 100)
    chunks = Chunks(h5, "image", image.shape, (32, 48), codec="jpeg", stacked=stacked)
    number = chunks.grow() if stacked else 0
    chunks.write(image[:64], number=number)
    chunks.write(image[64:], row0=64, number=number)
    before = (number,) if stacked else ()
    whole = np.empty((70, 100, 3), np.uint8)
    read_jpeg(h5["image"], whole, (*before, np.s_[0:70], np.s_[0:100]))
    first = decode(encode(image[:32, :48]), (32, 48, 3))
    assert (whole[:32, :48] == first).all()
    for row0, row1, col0, col1 in RANDOM.integers(0, [70, 70, 100, 100], (30, 4)):
        rows, cols = slice(*sorted((row0, row1))), slice(*sorted((col0, col1)))
        out = np.full((rows.stop - rows.start, cols.stop - cols.start, 3), 7, np.uint8)
        read_jpeg(h5["image"], out, (*before, rows, cols))
        assert (out == whole[rows, cols]).all()


def test_only_chunks_under_the_box_are_decoded(
    h5: h5py.File, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(70, 100)
    Chunks(h5, "image", image.shape, (32, 48), codec="jpeg").write(image)
    decoded = []

    def counted(stream: bytes, shape: tuple[int, int, int]) -> np.ndarray:
        decoded.append(stream)
        return decode(stream, shape)

    monkeypatch.setattr("spatialdl.data.chunks.decode", counted)
    for box, count in [((0, 32, 0, 48), 1), ((31, 33, 5, 6), 2), ((31, 65, 47, 97), 9)]:
        decoded.clear()
        row0, row1, col0, col1 = box
        out = np.empty((row1 - row0, col1 - col0, 3), np.uint8)
        read_jpeg(h5["image"], out, (slice(row0, row1), slice(col0, col1)))
        assert len(decoded) == count


def test_what_is_not_there_is_refused(h5: h5py.File) -> None:
    image = picture(70, 100)
    Chunks(h5, "raw", image.shape, (32, 48)).write(image)
    Chunks(h5, "empty", image.shape, (32, 48), codec="jpeg")
    Chunks(h5, "grey", (70, 100, 1), (32, 48), codec="jpeg").write(image[..., :1])
    chunks = Chunks(h5, "jpeg", image.shape, (32, 48), codec="jpeg", stacked=True)
    chunks.write(image, number=chunks.grow())
    h5["jpeg"].id.write_direct_chunk((0, 32, 48, 0), image[:32, :48].copy(), filter_mask=1)
    h5["jpeg"].id.write_direct_chunk((0, 0, 48, 0), b"no picture")
    rows, cols = np.s_[0:10], np.s_[0:10]
    for name, where, says in [
        ("raw", (rows, cols), r"filters \[\], expected bytes in JPEG"),
        ("empty", (rows, cols), r"chunk at \(0, 0, 0\): it was not written"),
        ("grey", (rows, cols), "1 channels, expected 3"),
        ("jpeg", (rows, cols), "its shape is"),
        ("jpeg", (1, rows, cols), "its shape is"),
        ("jpeg", (0, np.s_[61:71], cols), "its shape is"),
        ("jpeg", (0, rows, np.s_[91:101]), "its shape is"),
        ("jpeg", (0, np.s_[32:42], np.s_[48:58]), r"\(0, 32, 48, 0\): it is not stored as JPEG"),
        ("jpeg", (0, rows, np.s_[48:58]), r"chunk at \(0, 0, 48, 0\): "),
    ]:
        with pytest.raises(ValueError, match=says):
            read_jpeg(h5[name], np.empty((10, 10, 3), np.uint8), where)


def test_channels_that_jpeg_has_not_are_refused(h5: h5py.File) -> None:
    with pytest.raises(ValueError, match="2 channels"):
        Chunks(h5, "image", (8, 8, 2), (8, 8), codec="jpeg")
    assert "image" not in h5
