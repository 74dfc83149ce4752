from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps

from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.inference.predicting.pictures import HEAT_OPACITY, faint
from spatialdl.inference.predicting.volume_pictures import (
    COLOURS,
    SIDE,
    cut_planes,
    draw_planes,
    heated,
    join_planes,
    window_in,
)
from spatialdl.layout.layout import even_bounds


def planes_of(volume: Any) -> list[Any]:
    """The planes through the middle of a volume (depth, height, width)."""
    depth, height, width = (n // 2 for n in volume.shape)
    return [volume[depth], volume[:, height], volume[:, :, width]]


def drawn(
    volume: Any, spacing: Sequence[float] | None = None, classes: Any = None, side: int = SIDE
) -> Any:
    overlay = None if classes is None else planes_of(classes)
    return draw_planes(planes_of(volume), spacing, classes=overlay, side=side)


@pytest.mark.parametrize("grid", [(3, 2, 2), (5, 3, 1)])
def test_parts_make_the_planes_of_the_whole_volume(grid):
    size = (9, 20, 31)
    volume = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    parts, whole = [], tuple(end for n in size for end in (0, n))
    for place in np.ndindex(*grid):
        spans = (
            even_bounds(n, count)[k : k + 2] for n, count, k in zip(size, grid, place, strict=True)
        )
        box = tuple(end for span in spans for end in span)
        own = volume[window_in(box, whole)]
        parts.append(cut_planes(lambda b, own=own, box=box: own[window_in(b, box)], box, size))
    for found, expected in zip(join_planes(parts, size), planes_of(volume), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_slices_lie_side_by_side_in_one_scale_of_millimetres():
    volume = np.zeros((5, 20, 10), np.int16)
    picture = drawn(volume, (4.0, 1.0, 1.5), side=40)
    assert picture.dtype == np.uint8
    # 20 x 20 x 15 mm, two pixels each
    assert picture.shape == (40, 30 + 4 + 30 + 4 + 40, 3)
    assert drawn(volume, side=40).shape == (40, 20 + 4 + 20 + 4 + 40, 3)


def test_voxels_that_are_no_numbers_are_black():
    volume = np.arange(512.0).reshape(8, 8, 8)
    volume[4, 0, 0], volume[4, 0, 1], volume[4, 0, 2] = np.nan, np.inf, -np.inf
    picture = drawn(volume, side=8)
    assert picture[0, :3].max() == 0 < picture[0, 3].max()
    assert drawn(np.full((2, 2, 2), np.nan)).max() == 0


def test_classes_lie_over_the_voxels():
    classes = np.zeros((6, 6, 6), np.uint8)
    classes[3, :3, :3], classes[3, :3, 3:], classes[0] = 1, 2, 255
    picture = drawn(np.zeros((6, 6, 6)), classes=classes, side=12)
    expected = (0.45 * COLOURS[:2]).round()
    np.testing.assert_array_equal(picture[0, 0], expected[0])
    np.testing.assert_array_equal(picture[0, 11], expected[1])
    assert picture[11, 0].max() == picture[0, 16].max() == 0  # class 0, and without one


def test_a_volume_of_one_voxel_and_a_thin_one_are_drawn():
    assert drawn(np.ones((1, 1, 1)), side=5).shape == (5, 23, 3)
    assert drawn(np.ones((1, 100, 100)), (0.001, 1, 1), side=100).shape[0] == 100


@pytest.mark.parametrize("stored", ["SAR", "RAS", "PLI"])
def test_sections_have_the_head_above_however_the_volume_is_stored(stored):
    rng = np.random.default_rng(0)
    volume, classes = rng.normal(size=(5, 7, 9)), rng.integers(0, 3, (5, 7, 9))
    spacing = np.array([3.0, 1.0, 2.0])
    shown = drawn(volume, spacing.tolist(), classes, side=90)
    turn = VolumeTurn.between(stored, "IPL")
    found = [planes_of(turn.stored(one)) for one in (volume, classes)]
    # columns of the affine: where slices, rows and columns lead to
    ends = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
    affine = np.zeros((3, 4))
    for dim, letter in enumerate(stored):
        axis, sign = ends[letter]
        affine[axis, dim] = sign
    apart = tuple(spacing[turn.dims.index(dim)] for dim in range(3))
    again = draw_planes(found[0], apart, affine, found[1], side=90)
    np.testing.assert_array_equal(again, shown)


def test_colours_go_from_0_to_the_most():
    image = np.full((5, 4, 3), 100, np.uint8)
    picture = heated(image, np.array([[-3.0, 0.0], [2.0, 4.0]]))
    grey, low = faint(image)[0, 0], np.array(colormaps["turbo"](0.0)[:3])
    expected = ((1 - HEAT_OPACITY) * grey + HEAT_OPACITY * 255 * low).round()
    assert picture.shape == (5, 4, 3)
    assert (picture[:2, :] == expected).all()
    assert (picture[3:, 2:] == picture[4, 3]).all()
    assert picture[4, 3, 0] > picture[4, 3, 2]  # red
    assert not (picture[4, 0] == picture[4, 3]).all()
    assert (heated(image, np.array([[-1.0]])) == expected).all()
