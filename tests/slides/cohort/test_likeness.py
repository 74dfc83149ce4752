"""Slides that show the same are found, however they were stored, turned or cropped; others not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.slides.cohort.likeness import ALIKE, look_at, look_of, same_slides
from spatialdl.slides.cohort.pairs import correlation
from spatialdl.slides.synthetic.drawing import write_synthetic_slide


def write(path: Path, image: np.ndarray) -> Path:
    tifffile.imwrite(path, image, tile=(64, 64), photometric="rgb", compression="jpeg")
    return path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Slides of other sizes and seeds, and the pixels of the first."""
    folder = tmp_path_factory.mktemp("drawn")
    paths = []
    for seed in range(3):
        path = folder / f"{seed}.tiff"
        write_synthetic_slide(path, "ring", (1024, 1500 - 128 * seed), seed=seed)
        paths.append(path)
    with tifffile.TiffFile(paths[0]) as tiff:
        return paths, tiff.pages[0].asarray()


CHANGES = {
    "as it is": lambda image: image,
    "half the resolution": lambda image: np.asarray(
        Image.fromarray(image).resize((image.shape[1] // 2, image.shape[0] // 2))
    ),
    "turned": np.rot90,
    "flipped": np.fliplr,
    "turned and flipped": lambda image: np.fliplr(np.rot90(image)),
    "brighter": lambda image: np.clip(1.1 * image.astype(float), 0, 255).astype(np.uint8),
    "cropped": lambda image: image[20:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_is_alike(tmp_path, drawn, change):
    paths, image = drawn
    copy = write(tmp_path / "copy.tif", np.ascontiguousarray(CHANGES[change](image)))
    assert correlation(look_at(paths[0]), look_at(copy)) > ALIKE
    assert same_slides([paths[1], copy, paths[2], paths[0]]) == [[1, 3]]


def test_others_are_not_alike(drawn):
    looks = [look_at(path) for path in drawn[0]]
    assert max(correlation(looks[k], looks[j]) for k, j in ((0, 1), (0, 2), (1, 2))) < 0.6
    assert same_slides(drawn[0]) == []


def test_slides_that_show_nothing_are_compared_with_none(tmp_path, drawn):
    empty = [
        write(tmp_path / f"{k}.tif", np.full((200, 200, 3), 250 - k, np.uint8)) for k in (0, 1)
    ]
    (tmp_path / "broken.svs").write_bytes(b"no slide")
    assert look_at(empty[0]) is None
    assert same_slides([*empty, tmp_path / "broken.svs", drawn[0][0]]) == []
    assert look_of(np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), bool)) is None


def test_files_of_the_same_bytes_are_alike(tmp_path, drawn):
    copy = tmp_path / "again.tiff"
    copy.write_bytes(drawn[0][0].read_bytes())
    assert [0, 1] in same_slides([drawn[0][0], copy])
