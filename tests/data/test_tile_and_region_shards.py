"""Tiles and regions in shards: JPEG streams that are stored as they are, and bands of regions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.jpeg import EncodedImage, decode, encode
from spatialdl.errors import SlideError
from spatialdl.layout.layout import even_bounds
from tests.data.conftest import noise, picture

CHUNK = (32, 48)


@dataclass
class Tiled(EncodedImage):
    """An image as streams of chunks, row by row, one of which may be missing."""

    shape: tuple[int, int, int]
    chunk: tuple[int, int]
    streams: list[bytes]
    missing: tuple[int, int] | None = None

    def encoded(self, row: int, col: int) -> bytes:
        if (row, col) == self.missing:
            raise SlideError("no tile there")
        return self.streams[row * -(-self.shape[1] // self.chunk[1]) + col]

    def pixels(self) -> np.ndarray:
        """What the streams hold."""
        rows, cols, channels = self.shape
        across = -(-cols // CHUNK[1])
        parts = [decode(stream, (*CHUNK, channels)) for stream in self.streams]
        lines = [np.concatenate(parts[k : k + across], 1) for k in range(0, len(parts), across)]
        return np.concatenate(lines)[:rows, :cols]


def streams_of(image: np.ndarray) -> Tiled:
    """An image as streams of chunks, its last pixels repeated to whole ones."""
    (rows, cols, _), (high, wide) = image.shape, CHUNK
    padded = np.pad(image, ((0, -rows % high), (0, -cols % wide), (0, 0)), mode="edge")
    streams = [
        bytes(encode(padded[row : row + high, col : col + wide], 70))
        for row in range(0, rows, high)
        for col in range(0, cols, wide)
    ]
    return Tiled(image.shape, CHUNK, streams)


@pytest.mark.parametrize(("size", "channels"), [((64, 96), 1), ((70, 50), 3)])
def test_streams_of_tiles_are_stored_as_they_are(tmp_path: Path, size, channels: int) -> None:
    images = [streams_of(picture(*size, channels)) for _ in range(3)]
    with ShardWriter(tmp_path / "set", codec="jpeg") as writer:
        for number, image in enumerate(images):
            writer.add(image, slide="s", xy=(number, 7))
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        dataset = file["images"]
        assert (dataset.shape, dataset.chunks) == ((3, *size, channels), (1, *CHUNK, channels))
        for number, image in enumerate(images):
            for row in range(0, size[0], CHUNK[0]):
                for col in range(0, size[1], CHUNK[1]):
                    stored = dataset.id.read_direct_chunk((number, row, col, 0))[1]
                    assert bytes(stored) == image.encoded(row // CHUNK[0], col // CHUNK[1])
    data = ShardDataset(tmp_path / "set")
    data.verify()
    for number, image in enumerate(images):
        assert (data.read(number) == image.pixels()).all()
        assert data.sample(number).x == number


@pytest.mark.parametrize("first", [0, 1])
def test_streams_and_pixels_of_one_data_set(tmp_path: Path, first: int) -> None:
    image = streams_of(picture(64, 96))
    pixels = image.pixels()
    with ShardWriter(tmp_path / "set", codec="jpeg", chunk=CHUNK, quality=80) as writer:
        for number in (first, 1 - first):
            writer.add(image if number == 0 else pixels, mask=pixels[..., number])
    data = ShardDataset(tmp_path / "set")
    assert (data.read(first) == pixels).all()
    assert 0 < np.abs(data.read(1 - first).astype(int) - pixels).mean() < 8
    corner = decode(encode(pixels[:32, :48], 80), (32, 48, 3))
    assert (data.read(1 - first, (0, 32, 0, 48)) == corner).all()
    data.close()
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert (file["masks"][first] == pixels[..., 0]).all()
        with pytest.raises(OSError, match=r"."):
            file["images"][0]


@pytest.mark.parametrize("kind", ["tiles", "regions"])
def test_streams_that_do_not_fit_are_refused_and_nothing_is_added(tmp_path: Path, kind) -> None:
    image = streams_of(picture(64, 96))
    cut = [*image.streams[:3], image.streams[3][:200]]
    with ShardWriter(tmp_path / "set", kind=kind, codec="jpeg") as writer:
        for wrong, says in [
            (replace(image, streams=cut), "stream at row 1, column 1 of the image: "),
            (replace(image, chunk=(48, 48)), "the JPEG is 32 x 48 .*, expected 48 x 48"),
            (replace(image, shape=(64, 96, 1)), "with 3 channels, expected .* 1 channel"),
            (replace(image, missing=(1, 0)), "no tile there"),
            (replace(image, chunk=(0, 48)), "has shape"),
            (picture(64, 96, 2), "2 channels, but codec 'jpeg' supports 1 or 3"),
            (picture(64, 96).astype(np.uint16), "type uint16, but codec 'jpeg' supports only uint"),
        ]:
            with pytest.raises((ValueError, SlideError), match=says):
                writer.add(wrong)
        writer.add(image)
        other = Tiled((64, 96, 3), (64, 96), [encode(picture(64, 96))])
        if kind == "tiles":
            says = r"chunks of \(64, 96\), the data set has \(32, 48\)"
            with pytest.raises(ValueError, match=says):
                writer.add(other)
        writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 2
    assert (data.read(1) == image.pixels()).all()
    with ShardWriter(tmp_path / "raw", kind=kind) as writer:
        with pytest.raises(ValueError, match="use codec='jpeg'"):
            writer.add(image)
        writer.add(picture(8, 8))


@pytest.mark.parametrize("stripes", [1, 3])
def test_streams_of_regions_are_stored_as_they_are(tmp_path: Path, stripes: int) -> None:
    images = [streams_of(picture(*size)) for size in [(200, 130), (30, 20), (96, 80)]]
    with ShardWriter(tmp_path / "set", kind="regions", stripes=stripes, codec="jpeg") as writer:
        for image in images:
            writer.add(image, mask=image.pixels()[..., 0])
    data = ShardDataset(tmp_path / "set")
    data.verify()
    for number, image in enumerate(images):
        assert (data.read(number) == image.pixels()).all()
        assert (data.read_mask(number) == image.pixels()[..., 0]).all()
    assert (data.read(0, (47, 151, 39, 81)) == images[0].pixels()[47:151, 39:81]).all()
    bands = data.sample(0).bands
    assert [band.row0 % 32 for band in bands] == [0] * stripes
    data.close()
    with h5py.File(tmp_path / "set" / f"shard-0000{bands[0].shard}.h5") as file:
        dataset = file["regions/000000/image" + ("/00000" if stripes > 1 else "")]
        assert dataset.chunks == (*CHUNK, 3)
        assert bytes(dataset.id.read_direct_chunk((0, 96, 0))[1]) == images[0].encoded(0, 2)


class Rows:
    """An image that returns rows only, and records the largest request."""

    def __init__(self, image: np.ndarray, broken: bool = False) -> None:
        self.image, self.shape, self.most, self.broken = image, image.shape, 0, broken

    def __getitem__(self, rows: slice) -> np.ndarray:
        if rows.start and self.broken:
            raise OSError("gone")
        self.most = max(self.most, rows.stop - rows.start)
        return self.image[rows]


def test_bands_lie_in_different_shards_and_are_read_some_rows_at_a_time(tmp_path: Path) -> None:
    rows = Rows(noise(2048, 16))
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4) as writer:
        writer.add(rows, mpp=0.5, slide="s", xy=(1, 2))
        writer.add(noise(20, 16))
    assert rows.most <= 512
    data = ShardDataset(tmp_path / "set")
    assert (data.read(0) == rows.image).all()
    assert data.read(0, (512, 512, 7, 9)).shape == (0, 2, 3)
    sample = data.sample(0)
    data.close()
    assert sorted(band.shard for band in sample.bands) == [0, 1, 2, 3]
    for number, band in enumerate(sample.bands):
        with h5py.File(tmp_path / "set" / f"shard-0000{band.shard}.h5") as file:
            group = file["regions/000000"]
            assert dict(group.attrs) == {
                **{"height": 2048, "width": 16, "mpp": 0.5, "slide": "s"},
                **{"x": 1, "y": 2, "label": -1},
            }
            assert list(group["image"]) == [f"{number:05d}"]
            dataset = group[f"image/{number:05d}"]
            assert dataset.attrs["row0"] == band.row0 == 512 * number
            assert dataset.chunks == (512, 16, 3)


def test_few_rows_make_few_bands(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4) as writer:
        for rows in (2, 1, 9):
            writer.add(noise(rows, 16))
    data = ShardDataset(tmp_path / "set")
    found = [[(band.shard, band.rows) for band in data.sample(k).bands] for k in range(3)]
    assert found == [[(0, 1), (1, 1)], [(0, 1)], [(0, 2), (1, 2), (2, 2), (3, 3)]]


def test_a_region_that_does_not_fit_leaves_the_others(tmp_path: Path) -> None:
    good = noise(5, 6)
    with ShardWriter(tmp_path / "set", kind="regions", stripes=2) as writer:
        for image, mask, error, says in [
            (Rows(noise(1030, 6), broken=True), None, OSError, "gone"),
            (noise(4, 4), np.zeros((4, 5), int), ValueError, "its image has 4 x 4"),
            (np.zeros((4, 0, 3), np.uint8), None, ValueError, "has shape"),
            (Rows(np.zeros((5, 5, 3), np.float32)), None, ValueError, "rows of float32, expected"),
        ]:
            with pytest.raises(error, match=says):
                writer.add(image, mask=mask)
        writer.add(good)
        for image, mask, says in [
            (good[..., 0], None, "1 channels"),
            (good, good[..., 0], "others do not"),
            (good.astype(np.uint16), None, "3 channels of uint16, earlier ones have 3 of uint8"),
        ]:
            with pytest.raises(ValueError, match=says):
                writer.add(image, mask=mask)
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 1
    assert (data.read(0) == good).all()


def test_rows_of_a_type_that_they_name_are_taken(tmp_path: Path) -> None:
    rows = Rows(np.arange(600 * 8, dtype=np.float32).reshape(600, 8, 1))
    rows.dtype = rows.image.dtype
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        writer.add(rows)
    assert (ShardDataset(tmp_path / "set").read(0) == rows.image).all()


def test_a_grid_row_needs_the_shards_of_its_own_stripes(tmp_path: Path) -> None:
    images = [noise(rows, 100) for rows in (701, 96, 1033, 512, 2050, 333, 64, 1400)]
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4, shard_size=200_000) as writer:
        for image in images:
            writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert all((data.read(number) == image).all() for number, image in enumerate(images))
    grid, needed = 4, [set[int]() for _ in range(4)]
    for row, shards in enumerate(needed):
        for number, image in enumerate(images):
            bounds = even_bounds(len(image), grid)
            for band in data.sample(number).bands:
                if band.row0 < bounds[row + 1] and bounds[row] < band.row0 + band.rows:
                    shards.add(band.shard)
    sizes = [path.stat().st_size for path in (tmp_path / "set").glob("shard-*.h5")]
    assert len(sizes) > 8
    assert sum(map(len, needed)) == len(set.union(*needed)) == len(sizes)  # none is shared
    assert max(map(len, needed)) <= 1.5 * len(sizes) / grid
    assert max(sizes) < 200_000 + 30_000  # HDF5's own
