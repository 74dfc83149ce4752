from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.encoded import EncodedImage
from spatialdl.data.jpeg import decode, encode
from spatialdl.data.region_shard import cut_rows
from spatialdl.data.samples import RegionSample
from spatialdl.errors import SlideError
from spatialdl.parallel.layout import even_bounds

RANDOM = np.random.default_rng(0)


def picture(rows: int, cols: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (rows, cols, 3), np.uint8)


def smooth(rows: int, cols: int) -> np.ndarray:
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, 3))).astype(np.uint8)


class Rows:
    """An image that returns rows only, and records the largest request."""

    def __init__(self, image: np.ndarray) -> None:
        self.image, self.shape, self.most = image, image.shape, 0

    def __getitem__(self, rows: slice) -> np.ndarray:
        self.most = max(self.most, rows.stop - rows.start)
        return self.image[rows]


@pytest.mark.parametrize("stripes", [1, 3])
def test_regions_of_any_size_round_trip(tmp_path: Path, stripes: int) -> None:
    images = [picture(700, 530), picture(3, 9), picture(2100, 40)]
    with ShardWriter(tmp_path / "set", ["a"], kind="regions", stripes=stripes) as writer:
        for image in images:
            writer.add(image, label=0, mask=image[..., 0], mpp=0.25, slide="s", xy=(5, 6))
    data = ShardDataset(tmp_path / "set")
    data.verify()
    for number, image in enumerate(images):
        assert data.image_size(number) == image.shape[:2]
        assert (data.read(number) == image).all()
        assert (data.read_mask(number) == image[..., 0]).all()
    assert (data.read(2, (500, 1600, 7, 9)) == images[2][500:1600, 7:9]).all()
    assert data.read(2, (512, 512, 7, 9)).shape == (0, 2, 3)


def test_bands_lie_in_different_shards(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4) as writer:
        writer.add(picture(2048, 16), mpp=0.5, slide="s", xy=(1, 2))
    sample = ShardDataset(tmp_path / "set").sample(0)
    assert isinstance(sample, RegionSample)
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


def test_a_region_that_is_not_striped_is_one_dataset(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        writer.add(picture(20, 16))
    with h5py.File(tmp_path / "set" / "shard-00000.h5") as file:
        assert file["regions/000000/image"].shape == (20, 16, 3)


def test_a_region_is_read_some_rows_at_a_time(tmp_path: Path) -> None:
    rows = Rows(picture(3000, 8))
    with ShardWriter(tmp_path / "set", kind="regions", stripes=2) as writer:
        writer.add(rows)
    assert rows.most <= 512
    assert (ShardDataset(tmp_path / "set").read(0) == rows.image).all()


def test_full_shards_are_followed_by_others(tmp_path: Path) -> None:
    images = [picture(600, 8) for _ in range(5)]
    with ShardWriter(tmp_path / "set", kind="regions", stripes=2, shard_size=1) as writer:
        for image in images:
            writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert len(list((tmp_path / "set").glob("shard-*.h5"))) == 10
    assert all((data.read(number) == image).all() for number, image in enumerate(images))


def test_a_region_that_does_not_fit_leaves_the_others(tmp_path: Path) -> None:
    class Broken(Rows):
        def __getitem__(self, rows: slice) -> np.ndarray:
            if rows.start:
                raise OSError("gone")
            return super().__getitem__(rows)

    good = picture(5, 6)
    with ShardWriter(tmp_path / "set", kind="regions", stripes=2) as writer:
        with pytest.raises(OSError, match="gone"):
            writer.add(Broken(picture(1030, 6)))
        with pytest.raises(ValueError, match="its image has 4 x 4"):
            writer.add(picture(4, 4), mask=np.zeros((4, 5), int))
        with pytest.raises(ValueError, match="has shape"):
            writer.add(np.zeros((4, 0, 3), np.uint8))
        writer.add(good)
        with pytest.raises(ValueError, match="1 channels"):
            writer.add(good[..., 0])
        with pytest.raises(ValueError, match="others do not"):
            writer.add(good, mask=good[..., 0])
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 1
    assert (data.read(0) == good).all()


class Encoded(EncodedImage):
    """An image of which only the streams are to be had, chunks of 48 x 40."""

    chunk = (48, 40)

    def __init__(self, image: np.ndarray, missing: tuple[int, int] | None = None) -> None:
        self.shape, self.missing = image.shape, missing
        rows, cols, _ = image.shape
        self.padded = np.pad(image, ((0, -rows % 48), (0, -cols % 40), (0, 0)), mode="edge")

    def encoded(self, row: int, col: int) -> bytes:
        if (row, col) == self.missing:
            raise SlideError("no tile there")
        return bytes(encode(self.padded[48 * row : 48 * row + 48, 40 * col : 40 * col + 40], 60))

    def pixels(self) -> np.ndarray:
        """What the streams hold."""
        rows, cols, channels = self.shape
        whole = np.empty_like(self.padded)
        for row in range(0, rows, 48):
            for col in range(0, cols, 40):
                stream = self.encoded(row // 48, col // 40)
                whole[row : row + 48, col : col + 40] = decode(stream, (48, 40, channels))
        return whole[:rows, :cols]


@pytest.mark.parametrize("stripes", [1, 3])
def test_streams_of_regions_are_stored_as_they_are(tmp_path: Path, stripes: int) -> None:
    images = [Encoded(smooth(*size)) for size in [(200, 130), (30, 20), (96, 80)]]
    pixels = smooth(700, 60)
    with ShardWriter(tmp_path / "set", kind="regions", stripes=stripes, codec="jpeg") as writer:
        for image in images:
            writer.add(image, mask=image.pixels()[..., 0])
        writer.add(pixels, mask=pixels[..., 0])
    data = ShardDataset(tmp_path / "set")
    data.verify()
    for number, image in enumerate(images):
        assert (data.read(number) == image.pixels()).all()
        assert (data.read_mask(number) == image.pixels()[..., 0]).all()
    assert (data.read(0, (47, 151, 39, 81)) == images[0].pixels()[47:151, 39:81]).all()
    assert np.abs(data.read(3).astype(int) - pixels).mean() < 8
    sample = data.sample(0)
    assert isinstance(sample, RegionSample)
    assert [band.row0 % 48 for band in sample.bands] == [0] * len(sample.bands)
    assert len(sample.bands) == stripes
    data.close()
    first = sample.bands[0].shard
    with h5py.File(tmp_path / "set" / f"shard-0000{first}.h5") as file:
        dataset = file["regions/000000/image" + ("/00000" if stripes > 1 else "")]
        assert dataset.chunks == (48, 40, 3)
        assert bytes(dataset.id.read_direct_chunk((0, 80, 0))[1]) == images[0].encoded(0, 2)
        with pytest.raises(OSError, match=r"."):
            dataset[:]


def test_a_region_without_one_of_its_streams_leaves_the_others(tmp_path: Path) -> None:
    image = smooth(200, 130)

    class Damaged(Encoded):
        def encoded(self, row: int, col: int) -> bytes:
            return super().encoded(row, col)[: 300 if (row, col) == (3, 1) else None]

    with ShardWriter(tmp_path / "set", kind="regions", stripes=2, codec="jpeg") as writer:
        writer.add(Encoded(image))
        with pytest.raises(SlideError, match="no tile there"):
            writer.add(Encoded(image, missing=(4, 3)))
        with pytest.raises(ValueError, match="stream at row 3, column 1 of the image"):
            writer.add(Damaged(image))
        wrong = Encoded(image)
        wrong.chunk = (40, 40)
        with pytest.raises(ValueError, match=r"row 0, column 0 .* is 48 x 40 .*, expected 40 x 40"):
            writer.add(wrong)
        writer.add(Encoded(image[:70]))
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 2
    assert (data.read(0) == Encoded(image).pixels()).all()
    assert (data.read(1) == Encoded(image[:70]).pixels()).all()


def test_codecs_of_regions_are_checked(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        with pytest.raises(ValueError, match="use codec='jpeg'"):
            writer.add(Encoded(smooth(50, 50)))
        writer.add(smooth(50, 50))
    with ShardWriter(tmp_path / "jpeg", kind="regions", codec="jpeg") as writer:
        with pytest.raises(ValueError, match="4 channels, but codec 'jpeg' supports 1 or 3"):
            writer.add(np.zeros((8, 8, 4), np.uint8))
        writer.add(smooth(50, 50)[..., :1])
    assert ShardDataset(tmp_path / "jpeg").channels == 1


@pytest.mark.parametrize("multiple", [1, 48, 512])
@pytest.mark.parametrize("bands", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("height", [1, 47, 512, 513, 1000, 2048])
def test_bands_cover_all_rows(height: int, bands: int, multiple: int) -> None:
    cuts = cut_rows(height, bands, multiple)
    assert [row for cut in cuts for row in range(*cut)] == [*range(height)]
    assert len(cuts) == min(bands, -(-height // multiple))
    assert all(first % multiple == 0 for first, _ in cuts)
    units = [-(-(last - first) // multiple) for first, last in cuts]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize("grid", [2, 4])
def test_a_grid_row_needs_the_shards_of_its_own_stripes(tmp_path: Path, grid: int) -> None:
    images = [picture(rows, 100) for rows in (701, 96, 1033, 512, 2050, 333, 64, 1400)]
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4, shard_size=200_000) as writer:
        for image in images:
            writer.add(image)
    data = ShardDataset(tmp_path / "set")
    assert all((data.read(number) == image).all() for number, image in enumerate(images))
    needed: list[set[int]] = []
    for row in range(grid):
        needed.append(set())
        for number, image in enumerate(images):
            bounds = even_bounds(len(image), grid)
            for band in data.sample(number).bands:
                if band.row0 < bounds[row + 1] and bounds[row] < band.row0 + band.rows:
                    needed[row].add(band.shard)
    shards = {path.name: path.stat().st_size for path in (tmp_path / "set").glob("shard-*.h5")}
    assert len(shards) > 8
    assert sum(map(len, needed)) == len(set.union(*needed)) == len(shards)  # none is shared
    assert max(map(len, needed)) <= 1.5 * len(shards) / grid
    assert max(shards.values()) < 200_000 + 30_000  # HDF5's own


def test_few_rows_make_few_bands(tmp_path: Path) -> None:
    images = [picture(rows, 16) for rows in (2, 1, 9)]
    with ShardWriter(tmp_path / "set", kind="regions", stripes=4) as writer:
        for image in images:
            writer.add(image)
    data = ShardDataset(tmp_path / "set")
    found = [[(band.shard, band.rows) for band in data.sample(k).bands] for k in range(3)]
    assert found == [[(0, 1), (1, 1)], [(0, 1)], [(0, 2), (1, 2), (2, 2), (3, 3)]]
    assert all((data.read(number) == image).all() for number, image in enumerate(images))


def test_rows_of_another_type_are_refused(tmp_path: Path) -> None:
    image = np.arange(600 * 8, dtype=np.float32).reshape(600, 8, 1)
    with ShardWriter(tmp_path / "other", kind="regions") as writer:
        writer.add(Rows(picture(5, 5)))
        with pytest.raises(ValueError, match="rows of float32, expected uint8; give it a"):
            writer.add(Rows(np.zeros((5, 5, 3), np.float32)))
    with ShardWriter(tmp_path / "set", kind="regions") as writer:
        rows = Rows(image)
        rows.dtype = image.dtype  # type: ignore[attr-defined]
        writer.add(rows)
        with pytest.raises(
            ValueError, match="1 channels of uint16, earlier ones have 1 of float32"
        ):
            writer.add(image.astype(np.uint16))
    assert (ShardDataset(tmp_path / "set").read(0) == image).all()
