from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.volume_geometry import VolumeTurn
from spatialdl.training.pictures.orthogonal_slices import draw_sections, turned
from spatialdl.training.pictures.thumbnails import COLOURS, sections
from tests.training.pictures.whole_volumes import orthogonal_slices, planes_of


def test_slices_lie_side_by_side_in_one_scale_of_millimetres():
    volume = np.zeros((5, 20, 10), np.int16)
    picture = orthogonal_slices(volume, (4.0, 1.0, 1.5), side=40)
    assert picture.dtype == np.uint8
    # 20 x 20 x 15 mm, two pixels each
    assert picture.shape == (40, 30 + 4 + 30 + 4 + 40, 3)
    assert orthogonal_slices(volume, side=40).shape == (40, 20 + 4 + 20 + 4 + 40, 3)


def test_each_slice_goes_through_the_middle():
    volume = np.zeros((4, 6, 8))
    volume[2, 0, 0] = volume[0, 3, 0] = volume[0, 0, 4] = 1
    axial, coronal, sagittal = planes_of(volume)
    assert axial[0, 0] == coronal[0, 0] == sagittal[0, 0] == 1
    picture = orthogonal_slices(volume, side=8)
    assert picture[0, 0].tolist() == picture[0, 12].tolist() == picture[0, 24].tolist() == [255] * 3


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.float32, np.float64, bool, np.int32])
def test_darkest_is_black_and_brightest_white(dtype):
    volume = np.zeros((8, 8, 8), dtype)
    volume[4] = 1
    picture = orthogonal_slices(volume, side=8)
    assert picture[:, :8].min() == 255
    assert picture[0, 12:20].max() == 0


def test_voxels_that_are_no_numbers_are_black():
    volume = np.arange(512.0).reshape(8, 8, 8)
    volume[4, 0, 0], volume[4, 0, 1], volume[4, 0, 2] = np.nan, np.inf, -np.inf
    picture = orthogonal_slices(volume, side=8)
    assert picture[0, :3].max() == 0
    assert picture[0, 3].max() > 0
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


@pytest.mark.parametrize("stored", ["SAR", "IPL", "RAS", "ASL", "PLI"])
def test_slices_of_a_turned_volume_are_turned_slices(stored):
    volume = np.random.default_rng(0).normal(size=(5, 7, 9))  # the middle is that from both ends
    turn = VolumeTurn.between(stored, "IPL")
    found, expected = turned(planes_of(volume), turn), planes_of(turn.seen(volume))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stored", ["IPL", "SAR", "RAS", "ASL", "PLI"])
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
