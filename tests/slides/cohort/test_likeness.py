"""Slides that show the same are found, however they were stored, turned or cropped; others not."""

from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy import ndimage, signal

from spatialdl.slides.cohort import leaks
from spatialdl.slides.cohort.leaks import (
    ALIKE,
    Look,
    correlated_pairs,
    correlation,
    look_at,
    look_of,
    same_slides,
)
from spatialdl.slides.synthetic import write_synthetic_slide


def write_tiff(path: Path, image: np.ndarray) -> Path:
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


def test_others_are_not_alike(drawn):
    looks = [look_at(path) for path in drawn[0]]
    assert max(correlation(looks[k], looks[j]) for k, j in ((0, 1), (0, 2), (1, 2))) < 0.6
    assert same_slides(drawn[0]) == []


def test_slides_that_show_nothing_are_compared_with_none(tmp_path, drawn):
    empty = [
        write_tiff(tmp_path / f"{k}.tif", np.full((200, 200, 3), 250 - k, np.uint8)) for k in (0, 1)
    ]
    (tmp_path / "broken.svs").write_bytes(b"no slide")
    assert look_at(empty[0]) is None
    assert same_slides([*empty, tmp_path / "broken.svs", drawn[0][0]]) == []
    assert look_of(np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), bool)) is None


def test_a_copy_is_alike(tmp_path, drawn):
    paths, image = drawn
    turned = np.fliplr(np.rot90(np.asarray(Image.fromarray(image).reduce(2))))
    copy = write_tiff(tmp_path / "copy.tif", np.ascontiguousarray(turned))
    assert correlation(look_at(paths[0]), look_at(copy)) > ALIKE
    assert same_slides([paths[1], copy, paths[2], paths[0]]) == [[1, 3]]


ENERGY = 1.25


def picture(seed: int) -> np.ndarray:
    """A frayed piece of tissue on glass, of 64 rows or columns."""
    draw = np.random.default_rng(seed)
    shape = (int(draw.integers(40, 65)), 64) if seed % 2 else (64, int(draw.integers(40, 65)))
    coarse, fine = (ndimage.gaussian_filter(draw.normal(size=shape), width) for width in (9, 2))
    edges = np.pad(np.ones(np.subtract(shape, 8)), 4)
    tissue = coarse / coarse.std() + ndimage.gaussian_filter(edges, 4) > 0.7
    grey = np.where(tissue, 150 + 25 * fine / fine.std(), 242)
    return np.repeat(np.clip(grey, 0, 255).astype(np.uint8)[..., None], 3, -1)


def stored_again(image: np.ndarray) -> np.ndarray:
    """As JPEG of a low quality, and smaller."""
    file = io.BytesIO()
    Image.fromarray(image).resize((48, 48 * image.shape[0] // image.shape[1])).save(
        file, "JPEG", quality=60
    )
    return np.asarray(Image.open(file).resize((image.shape[1], image.shape[0])))


CHANGES = (
    np.rot90,
    np.fliplr,
    lambda image: np.rot90(image, 3)[::-1],
    lambda image: image[3:, 2:],
    lambda image: np.clip(1.1 * image.astype(float), 0, 255).astype(np.uint8),
    stored_again,
    lambda image: np.roll(image, 9, 0),
    lambda image: 255 - image,  # its correlation is the least
    lambda image: np.clip(242 + 1.4 * (image.astype(float) - 242), 0, 255).astype(np.uint8),
)


@pytest.fixture(scope="module")
def looks() -> list[Look]:
    """Of 18 pictures, and of a changed copy of half of them."""
    images = [picture(seed) for seed in range(18)]
    images += [change(images[k]) for k, change in enumerate(CHANGES)]
    found = [look_of(one, np.ones(one.shape[:2], bool)) for one in images]
    return [look for look in found if look is not None]


def largest(one: Look, other: Look) -> float:
    """Way by way and shift by shift."""
    ways = [np.rot90(way, k) for way in (other.square, other.square.T) for k in range(4)]
    return max(float(signal.correlate(one.square, way).max()) for way in ways)


def test_the_correlation_is_the_largest_of_all_shifts_and_ways(looks):
    for one, other in ((0, 1), (0, 18), (5, 23), (7, 25)):
        expected = largest(looks[one], looks[other])
        assert correlation(looks[one], looks[other]) == pytest.approx(expected, abs=1e-5)


def test_the_pairs_are_those_of_comparing_each_with_each(looks, monkeypatch):
    count = len(looks)
    every = {  # unless their energies tell them apart
        (one, other): correlation(looks[one], looks[other])
        for one, other in combinations(range(count), 2)
        if 1 / ENERGY <= looks[one].energy / looks[other].energy <= ENERGY
    }
    assert correlated_pairs([], [], ALIKE, ENERGY) == []
    monkeypatch.setattr(leaks, "_BATCH", 2)
    for least, kinds in (
        (0.6, range(count)),
        (ALIKE, [k // 4 % 2 for k in range(count)]),
    ):
        done: list[int] = []
        found = correlated_pairs(looks, kinds, least, ENERGY, jobs=2, progress=done.append)
        assert found == [
            (one, other)
            for (one, other), value in every.items()
            if value >= least and kinds[one] != kinds[other]
        ]
        assert len(found) >= 2
        assert sum(done) == count * (count - 1) // 2
