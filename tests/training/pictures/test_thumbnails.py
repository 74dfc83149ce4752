from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from spatialdl.parallel.layout import even_bounds
from spatialdl.training.pictures import thumbnails
from spatialdl.training.pictures.thumbnails import (
    COLOURS,
    Patch,
    as_rgb,
    drawn_signal,
    joined,
    joined_sections,
    mask_patches,
    mean_sections,
    pixel_patches,
    sections,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 13)


def boxes(size: Sequence[int], grid: Sequence[int]) -> list[tuple[int, ...]]:
    bounds = [even_bounds(n, parts) for n, parts in zip(size, grid, strict=True)]
    return [
        tuple(end for b, k in zip(bounds, part, strict=True) for end in b[k : k + 2])
        for part in np.ndindex(*grid)
    ]


def window(box: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in zip(box[::2], box[1::2], strict=True))


def shown(values: np.ndarray, dims: int) -> list[np.ndarray]:
    """An image, a signal as a row, or the three slices through the middle of a volume."""
    if dims < 3:
        return [values if dims == 2 else values[None]]
    depth, height, width = (n // 2 for n in values.shape[:3])
    return [values[depth], values[:, height], values[:, :, width]]


SIZES = [(61, 37), (13, 13), (5, 7), (200, 3), (26, 260), (40,), (7,), (9, 20, 31), (3, 5, 4)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (3, 2, 2), (5, 3, 1)])
def test_parts_make_the_thumbnails_of_the_whole_image(size, grid):
    rng, grid = np.random.default_rng(0), grid[: len(size)]
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    mask = torch.from_numpy(rng.integers(0, 9, size))
    own = boxes(size, grid)
    parts = [mask_patches(mask[window(box)], box, size) for box in own]
    found = joined_sections(parts, size)
    read = [pixel_patches(lambda one: image[window(one)], box, size) for box in own]
    thumbnails = mean_sections(read, size)
    images, masks = shown(image, len(size)), shown(mask.numpy(), len(size))
    rows = zip(sections(size), images, masks, found, thumbnails, strict=True)
    for section, whole, classes, drawn, pixels in rows:
        rows, cols = section.small
        assert max(rows, cols) <= 13
        assert section.size == whole.shape[:2]
        down, right = even_bounds(len(whole), rows), even_bounds(whole.shape[1], cols)
        expected, picked = np.zeros((rows, cols, 3)), np.zeros((rows, cols))
        for r in range(rows):
            for c in range(cols):
                expected[r, c] = whole[down[r] : down[r + 1], right[c] : right[c + 1]].mean((0, 1))
                at = (down[r] + down[r + 1]) // 2, (right[c] + right[c + 1]) // 2
                picked[r, c] = classes[at]
        np.testing.assert_array_equal(drawn, picked)
        np.testing.assert_allclose(pixels, expected, rtol=1e-12)


def test_the_sections_of_a_volume_have_one_scale():
    small = [section.small for section in sections((26, 52, 104))]
    assert small == [(6, 13), (3, 13), (3, 6)]
    assert [section.at for section in sections((4, 6, 9))] == [
        (2, None, None),
        (None, 3, None),
        (None, None, 4),
    ]


def test_a_signal_is_a_line_on_the_colours_of_its_classes():
    values = np.array([[0.0], [0.0], [1.0], [1.0]])
    plain = drawn_signal(values)
    assert plain.shape == (120, 13, 3)
    dark = plain.max(2) < 60
    assert dark[115, 0]  # low on the left, high on the right
    assert dark[4, -1]
    assert not dark[:100, 0].any()
    assert (plain[60] == 255).all(1).any()
    classes = np.array([0, 0, 1, 255])
    coloured = drawn_signal(values, classes)[60]
    assert coloured[0].tolist() == coloured[-1].tolist() == [255] * 3
    assert coloured[8].tolist() == (0.55 * 255 + 0.45 * COLOURS[0]).round().tolist()
    assert drawn_signal(np.full((5, 2), np.nan)).shape == (120, 13, 3)


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
