from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import coded_reading
from spatialdl.data.chunk_cache import ChunkCache
from spatialdl.data.chunk_map import map_chunks
from spatialdl.data.chunks import Chunks
from spatialdl.data.codec import Codec, Coding, decode
from spatialdl.data.coded_reading import read_coded
from spatialdl.data.jpeg import encode
from spatialdl.data.raw_reading import MappedFile, PreadFile

RANDOM = np.random.default_rng(0)
Reader = Callable[..., np.ndarray]


def picture(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, channels))).astype(np.uint8)


IMAGE = picture(70, 100)


@pytest.fixture
def h5(tmp_path: Path) -> h5py.File:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


@pytest.fixture(params=[MappedFile, PreadFile])
def read(h5: h5py.File, request: pytest.FixtureRequest) -> Reader:
    def of(name: str, codec: Codec, where: tuple, **more: object) -> np.ndarray:
        h5.flush()
        size = Path(h5.filename).stat().st_size
        chunks = map_chunks(h5[name], not isinstance(where[0], slice), size, codec)
        assert chunks is not None
        *_, rows, cols = where
        shape = (rows.stop - rows.start, cols.stop - cols.start, *chunks.cell[2:])
        out = np.full(shape, 7, chunks.dtype)
        fd = os.open(h5.filename, os.O_RDONLY)
        try:
            read_coded(request.param(fd), chunks, codec, out, where, **more)
        finally:
            os.close(fd)
        return out

    return of


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("codec", ["jpeg", "zstd", "lz4"])
def test_boxes_are_slices_of_the_whole(
    h5: h5py.File, read: Reader, codec: Codec, stacked: bool
) -> None:
    chunks = Chunks(h5, "image", IMAGE.shape, (32, 48), coding=Coding(codec), stacked=stacked)
    before = (chunks.grow(),) if stacked else ()
    chunks.write(IMAGE[:64])
    chunks.write(IMAGE[64:], row0=64)
    whole = read("image", codec, (*before, np.s_[0:70], np.s_[0:100]))
    if codec == "jpeg":
        assert (whole[:32, :48] == read_whole(IMAGE[:32, :48])).all()
    else:
        assert (whole == IMAGE).all()
    for row0, row1, col0, col1 in RANDOM.integers(0, [70, 70, 100, 100], (12, 4)):
        rows, cols = slice(*sorted((row0, row1))), slice(*sorted((col0, col1)))
        if rows.stop > rows.start and cols.stop > cols.start:
            assert (read("image", codec, (*before, rows, cols)) == whole[rows, cols]).all()


def read_whole(part: np.ndarray) -> np.ndarray:
    stream = np.frombuffer(encode(part), np.uint8)
    return decode("jpeg", stream, part.shape, part.dtype)


def test_only_chunks_under_the_box_are_decoded_and_once(
    h5: h5py.File, read: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48), coding=Coding("zstd")).write(IMAGE)
    decoded = []

    def counted(codec: Codec, stored: np.ndarray, *more: object) -> np.ndarray:
        decoded.append(stored)
        return decode(codec, stored, *more)

    monkeypatch.setattr(coded_reading, "decode", counted)
    boxes = [((0, 32, 0, 48), 1), ((31, 33, 5, 6), 2), ((31, 65, 47, 97), 9)]
    for (row0, row1, col0, col1), count in boxes:
        decoded.clear()
        read("image", "zstd", (slice(row0, row1), slice(col0, col1)))
        assert len(decoded) == count
    cache, where = ChunkCache(), (slice(31, 65), slice(47, 97))
    for count in (9, 0):
        decoded.clear()
        got = read("image", "zstd", where, key="a", cache=cache)
        assert (got == IMAGE[where]).all()
        assert len(decoded) == count
    assert len(cache) == 9
    read("image", "zstd", where, key="another file", cache=cache)
    assert len(decoded) == 9


@pytest.mark.parametrize("codec", ["jpeg", "zstd"])
def test_chunks_that_are_missing_or_damaged_are_named(
    h5: h5py.File, read: Reader, codec: Codec
) -> None:
    Chunks(h5, "empty", IMAGE.shape, (32, 48), coding=Coding(codec))
    chunks = Chunks(h5, "stack", IMAGE.shape, (32, 48), coding=Coding(codec), stacked=True)
    for _ in range(2):
        chunks.write(IMAGE, number=chunks.grow())
    h5["stack"].id.write_direct_chunk((1, 32, 48, 0), b"no picture")
    with pytest.raises(ValueError, match="chunk at row 32, column 0: it was not written"):
        read("empty", codec, (slice(40, 50), slice(0, 10)))
    with pytest.raises(ValueError, match="chunk at image 1, row 32, column 48: "):
        read("stack", codec, (1, slice(0, 70), slice(0, 100)))
    assert read("stack", codec, (0, slice(0, 70), slice(0, 100))).shape == (70, 100, 3)
