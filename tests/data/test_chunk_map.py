from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter
from spatialdl.data.chunk_map import MISSING, map_chunks
from spatialdl.data.chunks import Chunks

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
    assert [part[0] for part in parts] == found.offsets.ravel().tolist()
    assert parts[0][1:] == ((slice(31, 32), slice(47, 48)), (slice(0, 1), slice(0, 1)))
    assert parts[4][1:] == ((slice(0, 32), slice(0, 48)), (slice(1, 33), slice(1, 49)))
    assert parts[8][1:] == ((slice(0, 1), slice(0, 1)), (slice(33, 34), slice(49, 50)))
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
    with pytest.raises(ValueError, match=r"its shape is \(70, 100, 3\), where .* is wanted in"):
        list(found.parts(where, (9, 9, 3)))


def test_what_is_not_raw_is_left_to_hdf5(h5: h5py.File) -> None:
    h5["whole"] = IMAGE
    h5.create_dataset("zip", data=IMAGE, chunks=(32, 48, 3), compression="gzip")
    h5.create_dataset("wide", data=IMAGE.astype(np.int16), chunks=(32, 48, 3))
    h5.create_dataset("planes", data=IMAGE, chunks=(32, 48, 1))
    h5.create_dataset("pairs", data=np.stack([IMAGE, IMAGE]), chunks=(2, 32, 48, 3))
    h5.create_dataset("line", data=IMAGE.reshape(-1), chunks=(48,))
    for name in ("whole", "zip", "wide", "planes", "line"):
        assert map_chunks(h5[name], False, 2**40) is None, name
    assert map_chunks(h5["pairs"], True, 2**40) is None


def test_chunks_beyond_the_file_are_refused(h5: h5py.File) -> None:
    Chunks(h5, "image", IMAGE.shape, (32, 48)).write(IMAGE)
    with pytest.raises(ValueError, match=r"chunk at \(\d+, \d+, 0\) has 4608 bytes at \d+, expect"):
        map_chunks(h5["image"], False, 20_000)


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
