from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.data.importing.image_folder import BrokenImagesError, import_images
from spatialdl.errors import ShardError

RANDOM = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["train/b/1", "train/a/2", "val/a/3", "test/b/4", "test/b/5"]):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), number, np.uint8)).save(path)
    return tmp_path / "images"


@pytest.mark.parametrize("jobs", [1, 3])
def test_images_of_one_size_are_tiles(tmp_path: Path, folder: Path, jobs: int) -> None:
    assert import_images(folder, tmp_path / "set", jobs=jobs, mpp=0.5, codec="zstd") == []
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.classes, data.codec, data.mpp) == ("tiles", ["a", "b"], "zstd", 0.5)
    assert data.splits == ["train", "val", "test"]
    names = [data.sample(k).slide for k in range(5)]
    assert names == [
        "test/b/4.png",
        "test/b/5.png",
        "train/a/2.png",
        "train/b/1.png",
        "val/a/3.png",
    ]
    assert data.labels.tolist() == [1, 1, 0, 1, 0]
    assert [int(image[0, 0, 0]) for image, _ in data] == [3, 4, 1, 0, 2]


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_images_of_any_size_are_regions(tmp_path: Path, dtype: str) -> None:
    images = [
        (RANDOM.random((rows, cols, 2)) * 999).astype(dtype) for rows, cols in ((9, 7), (600, 5))
    ]
    for number, image in enumerate(images):
        path = tmp_path / "images" / "c" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    import_images(tmp_path / "images", tmp_path / "set", mpp=0.25, stripes=2)
    data = ShardDataset(tmp_path / "set")
    assert (data.kind, data.dtype, data.sample(0).mpp) == ("regions", dtype, 0.25)
    assert all((data.read(k) == image).all() for k, image in enumerate(images))
    assert len(data.sample(1).bands) == 2


def test_broken_images_are_listed_or_left_out(tmp_path: Path, folder: Path) -> None:
    cut = folder / "test" / "b" / "4.png"
    cut.write_bytes(cut.read_bytes()[:-30])
    (folder / "val" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(BrokenImagesError, match="2 of 6 images cannot be read, and nothing") as got:
        import_images(folder, tmp_path / "set")
    assert ["4.png" in got.value.broken[0], "0.png" in got.value.broken[1]] == [True, True]
    assert not (tmp_path / "set").exists()
    said = import_images(folder, tmp_path / "set", skip_broken=True)
    assert said == got.value.broken
    assert len(ShardDataset(tmp_path / "set")) == 4


def test_nothing_but_broken_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(b"no image")
    with pytest.raises((BrokenImagesError, ShardError)):
        import_images(tmp_path / "images", tmp_path / "set", skip_broken=True)
    assert not (tmp_path / "set").exists()


def test_images_that_do_not_go_together_are_named(tmp_path: Path, folder: Path) -> None:
    Image.fromarray(np.zeros((20, 30), np.uint8)).save(folder / "train" / "b" / "9.png")
    with pytest.raises(
        ValueError, match=r"9\.png: tile has shape \(20, 30, 1\), .*; --rgb converts"
    ):
        import_images(folder, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    import_images(folder, tmp_path / "set", rgb=True)
    assert len(ShardDataset(tmp_path / "set")) == 6
