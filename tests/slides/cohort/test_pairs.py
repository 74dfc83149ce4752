"""Pairs among many pictures are those that comparing each with each finds."""

from __future__ import annotations

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, signal

from spatialdl.slides.cohort import pairs
from spatialdl.slides.cohort.likeness import ALIKE, look_of
from spatialdl.slides.cohort.pairs import Look, correlated_pairs, correlation

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
    """Of 40 pictures, and of a changed copy of half of them."""
    images = [picture(seed) for seed in range(40)]
    images += [CHANGES[k % len(CHANGES)](images[k]) for k in range(20)]
    found = [look_of(one, np.ones(one.shape[:2], bool)) for one in images]
    return [look for look in found if look is not None]


@pytest.fixture(scope="module")
def every(looks: list[Look]) -> dict[tuple[int, int], float]:
    """The correlation of each with each, of those of like energy."""
    return {
        (one, other): correlation(looks[one], looks[other])
        for one, other in combinations(range(60), 2)
        if max(looks[one].energy, looks[other].energy)
        <= ENERGY * min(looks[one].energy, looks[other].energy)
    }


def largest(one: Look, other: Look) -> float:
    """Way by way and shift by shift."""
    ways = [np.rot90(way, k) for way in (other.square, other.square.T) for k in range(4)]
    return max(float(signal.correlate(one.square, way).max()) for way in ways)


def test_the_correlation_is_the_largest_of_all_shifts_and_ways(looks: list[Look]) -> None:
    for one, other in ((0, 1), (0, 40), (3, 43), (5, 45), (7, 47)):
        expected = largest(looks[one], looks[other])
        assert correlation(looks[one], looks[other]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("size", [256, 7])
def test_the_pairs_are_those_of_comparing_each_with_each(
    looks: list[Look],
    every: dict[tuple[int, int], float],
    size: int,
    jobs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "_BLOCK", size)
    monkeypatch.setattr(pairs, "_BATCH", 2)
    done: list[int] = []
    for least, kinds in (
        (ALIKE, range(60)),
        (0.6, range(60)),
        (ALIKE, [k // 3 % 2 for k in range(60)]),
    ):
        found = correlated_pairs(looks, kinds, least, ENERGY, jobs=jobs, progress=done.append)
        expected = [
            pair
            for pair, value in every.items()
            if value >= least and kinds[pair[0]] != kinds[pair[1]]
        ]
        assert found == expected
        assert len(found) >= (5 if len(set(kinds)) == 2 else 10)
        assert sum(done) == 60 * 59 // 2
        done.clear()


def test_few_are_correlated(looks: list[Look], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    whole = pairs._largest
    monkeypatch.setattr(
        pairs, "_largest", lambda *given: (counts.append(len(given[0])), whole(*given))[1]
    )
    assert correlated_pairs(looks, range(60), ALIKE, ENERGY)
    assert sum(counts) < 0.2 * 60 * 59 / 2


def test_nothing_is_like_nothing() -> None:
    assert correlated_pairs([], [], ALIKE, ENERGY) == []
