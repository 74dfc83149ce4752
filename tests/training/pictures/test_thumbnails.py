from __future__ import annotations

import numpy as np
import pytest

from spatialdl.parallel.layout import even_bounds
from spatialdl.training.pictures import thumbnails
from spatialdl.training.pictures.thumbnails import (
    Patch,
    as_rgb,
    joined,
    means,
    middles,
    sums,
    thumbnail_size,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 13)


def boxes(size: tuple[int, int], grid: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    down, right = even_bounds(size[0], grid[0]), even_bounds(size[1], grid[1])
    return [
        (down[r], down[r + 1], right[c], right[c + 1])
        for r in range(grid[0])
        for c in range(grid[1])
    ]


@pytest.mark.parametrize("size", [(61, 37), (13, 13), (5, 7), (200, 3), (26, 260)])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_parts_make_the_thumbnail_of_the_whole_image(size, grid):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    mask = rng.integers(0, 9, size, np.int32)
    rows, cols = thumbnail_size(size)
    assert max(rows, cols) <= 13
    down, right = even_bounds(size[0], rows), even_bounds(size[1], cols)
    expected, picked = np.zeros((rows, cols, 3)), np.zeros((rows, cols))
    for r in range(rows):
        for c in range(cols):
            expected[r, c] = image[down[r] : down[r + 1], right[c] : right[c + 1]].mean((0, 1))
            picked[r, c] = mask[(down[r] + down[r + 1]) // 2, (right[c] + right[c + 1]) // 2]
    cut = [(box, np.s_[box[0] : box[1], box[2] : box[3]]) for box in boxes(size, grid)]
    pixels = means([sums(image[s], box, size) for box, s in cut], size)
    np.testing.assert_allclose(pixels, expected, rtol=1e-12)
    classes = joined([middles(mask[s], box, size) for box, s in cut], (rows, cols))
    np.testing.assert_array_equal(classes, picked)


def test_numbers_of_any_range_become_colours():
    wide = np.array([[[0.0], [65535.0]]])
    assert as_rgb(wide).tolist() == [[[0] * 3, [255] * 3]]
    assert as_rgb(np.full((2, 2, 4), 7.4)).tolist() == [[[7] * 3] * 2] * 2
    assert as_rgb(np.zeros((1, 1, 2))).tolist() == [[[0, 0, 0]]]
    assert as_rgb(np.array([[[0.0], [0.5], [1.0]]]))[0, :, 0].tolist() == [0, 128, 255]


def test_dark_images_are_stretched():
    image = np.zeros((20, 20, 3))
    image[5:10, :, 2] = 30
    assert as_rgb(image)[7, 0].tolist() == [0, 0, 255]
    image[5:10, :, 2] = 100  # bright enough
    assert as_rgb(image)[7, 0].tolist() == [0, 0, 100]


def test_a_patch_without_pixels_adds_nothing():
    empty = Patch(4, 3, np.zeros((0, 1), np.int32))
    assert joined([empty], (4, 4)).sum() == 0
