from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import RegionSample

RANDOM = np.random.default_rng(0)


def picture(rows: int, cols: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (rows, cols, 3), np.uint8)


class Rows:
    """An image that gives rows only, and remembers the most it was asked for."""

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
        with pytest.raises(ValueError, match="some have none"):
            writer.add(good, mask=good[..., 0])
    data = ShardDataset(tmp_path / "set")
    assert len(data) == 1
    assert (data.read(0) == good).all()
