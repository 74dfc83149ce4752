from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.layout.layout import even_bounds
from spatialdl.training.pictures import thumbnails
from spatialdl.training.pictures.orthogonal_slices import Planes, draw_planes, draw_sections
from spatialdl.training.pictures.thumbnails import (
    COLOURS,
    SIDE,
    joined_sections,
    mask_patches,
    mean_sections,
    pixel_patches,
    sections,
)


def planes_of(volume: Any) -> Planes:
    """The slices through the middle of a volume (depth, height, width)."""
    depth, height, width = (n // 2 for n in volume.shape)
    return Planes(volume[depth], volume[:, height], volume[:, :, width])


def orthogonal_slices(
    volume: Any, spacing: Sequence[float] | None = None, classes: Any = None, side: int = SIDE
) -> Any:
    """The picture of them."""
    overlay = None if classes is None else planes_of(classes)
    return draw_planes(planes_of(volume), spacing, overlay, side=side)


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


def shown(values: np.ndarray) -> list[np.ndarray]:
    """The three slices through the middle of a volume."""
    depth, height, width = (n // 2 for n in values.shape[:3])
    return [values[depth], values[:, height], values[:, :, width]]


@pytest.mark.parametrize("size", [(9, 20, 31), (5, 5, 4)])
@pytest.mark.parametrize("grid", [(3, 2, 2), (5, 3, 1)])
def test_parts_make_the_thumbnails_of_the_whole_image(size, grid):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    mask = torch.from_numpy(rng.integers(0, 9, size))
    own = boxes(size, grid)
    parts = [mask_patches(mask[window(box)], box, size) for box in own]
    found = joined_sections(parts, size)
    read = [pixel_patches(lambda one: image[window(one)], box, size) for box in own]
    thumbnails = mean_sections(read, size)
    images, masks = shown(image), shown(mask.numpy())
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


def test_slices_lie_side_by_side_in_one_scale_of_millimetres():
    volume = np.zeros((5, 20, 10), np.int16)
    picture = orthogonal_slices(volume, (4.0, 1.0, 1.5), side=40)
    assert picture.dtype == np.uint8
    # 20 x 20 x 15 mm, two pixels each
    assert picture.shape == (40, 30 + 4 + 30 + 4 + 40, 3)
    assert orthogonal_slices(volume, side=40).shape == (40, 20 + 4 + 20 + 4 + 40, 3)


def test_voxels_that_are_no_numbers_are_black():
    volume = np.arange(512.0).reshape(8, 8, 8)
    volume[4, 0, 0], volume[4, 0, 1], volume[4, 0, 2] = np.nan, np.inf, -np.inf
    picture = orthogonal_slices(volume, side=8)
    assert picture[0, :3].max() == 0 < picture[0, 3].max()
    assert orthogonal_slices(np.full((2, 2, 2), np.nan)).max() == 0


def test_classes_lie_over_the_voxels():
    classes = np.zeros((6, 6, 6), np.uint8)
    classes[3, :3, :3], classes[3, :3, 3:], classes[0] = 1, 2, 255
    picture = orthogonal_slices(np.zeros((6, 6, 6)), classes=classes, side=12)
    expected = (0.45 * COLOURS[:2]).round()
    np.testing.assert_array_equal(picture[0, 0], expected[0])
    np.testing.assert_array_equal(picture[0, 11], expected[1])
    assert picture[11, 0].max() == picture[0, 16].max() == 0  # class 0, and without one


def test_a_volume_of_one_voxel_and_a_thin_one_are_drawn():
    assert orthogonal_slices(np.ones((1, 1, 1)), side=5).shape == (5, 23, 3)
    assert orthogonal_slices(np.ones((1, 100, 100)), (0.001, 1, 1), side=100).shape[0] == 100


@pytest.mark.parametrize("stored", ["SAR", "RAS", "PLI"])
def test_sections_have_the_head_above_however_the_volume_is_stored(stored):
    rng = np.random.default_rng(0)
    volume, classes = rng.normal(size=(5, 7, 9)), rng.integers(0, 3, (5, 7, 9))
    spacing = np.array([3.0, 1.0, 2.0])
    shown = orthogonal_slices(volume, spacing.tolist(), classes, side=90)
    turn = VolumeTurn.between(stored, "IPL")
    found = [list(planes_of(turn.stored(one))) for one in (volume, classes)]
    # columns of the affine: where slices, rows and columns lead to
    ends = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
    affine = np.zeros((3, 4))
    for dim, letter in enumerate(stored):
        axis, sign = ends[letter]
        affine[axis, dim] = sign
    size = turn.stored(volume).shape
    apart = tuple(spacing[turn.dims.index(dim)] for dim in range(3))
    grey = [plane[..., None] for plane in found[0]]
    assert [plane.shape[:2] for plane in grey] == [one.size for one in sections(size)]
    drawn = draw_sections(size, grey, apart, affine, found[1], side=90)
    np.testing.assert_array_equal(drawn, shown)
