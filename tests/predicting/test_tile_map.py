from __future__ import annotations

import numpy as np
import pytest

from spatialdl.predicting.results import Overview
from spatialdl.predicting.tile_map import TileMap


def whole(found: TileMap, column: int, rows: int = 7) -> np.ndarray:
    return np.concatenate(list(found.bands(column, rows)))


def test_a_tile_fills_its_place_and_overlaps_are_means():
    places = np.array([[0, 0], [16, 0], [48, 32]])
    values = np.array([[[[0.2]]], [[[0.6]]], [[[1.0]]]])
    found = TileMap(places, (32.0, 32.0), (64, 90), values)
    assert found.scale == 4
    image = whole(found, 0)
    assert image.shape == found.size == (16, 23)
    assert np.allclose(image[:8, :4], 0.2)
    assert np.allclose(image[:8, 4:8], 0.4)
    assert np.allclose(image[:8, 8:12], 0.6)
    assert np.isnan(image[:8, 12:]).all()
    assert np.allclose(image[8:, 12:20], 1.0)
    assert np.isnan(image[8:, 20:]).all()


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_bands_do_not_depend_on_their_rows(rows):
    rng = np.random.default_rng(0)
    places, values = rng.integers(-3, 80, (20, 2)), rng.random((20, 2, 3, 3))
    found = TileMap(places, (17.5, 17.5), (91, 77), values)
    for column in (0, 1):
        expected = whole(found, column, 1000)
        assert np.array_equal(whole(found, column, rows), expected, equal_nan=True)


def test_values_inside_of_a_tile_lie_where_they_belong():
    values = np.arange(200.0).reshape(1, 2, 10, 10)
    found = TileMap(np.array([[20, 10]]), (20.0, 20.0), (40, 50), values)
    assert found.scale == 2
    image = whole(found, 1)
    assert np.array_equal(image[5:15, 10:20], values[0, 1])
    assert np.isfinite(image).sum() == 100


def test_an_overview_has_the_means_of_what_is_known(monkeypatch):
    monkeypatch.setattr("spatialdl.predicting.results.LONGEST", 4)
    image = np.random.default_rng(0).random((11, 7))
    image[:3, :3] = np.nan
    image[4, 5] = np.nan
    overview = Overview(image.shape)
    assert overview.factor == 3
    passed = list(overview.accumulate(iter([image[:4], image[4:8], image[8:]])))
    assert np.array_equal(np.concatenate(passed), image, equal_nan=True)
    for row in range(4):
        for col in range(3):
            block = image[3 * row : 3 * row + 3, 3 * col : 3 * col + 3]
            known = block[np.isfinite(block)]
            if known.size:
                assert overview.means[row, col] == pytest.approx(known.mean())
            else:
                assert np.isnan(overview.means[row, col])


def test_of_a_tile_that_ends_beyond_the_slide_its_inner_part_is_shown():
    values = np.arange(128.0).reshape(2, 1, 8, 8)
    found = TileMap(np.array([[32, 24], [-16, 0]]), (32.0, 32.0), (40, 52), values)
    assert found.scale == 4
    image = whole(found, 0)
    assert image.shape == (10, 13)
    assert np.array_equal(image[6:, 8:], values[0, 0, :4, :5])
    assert np.array_equal(image[:8, :4], values[1, 0, :, 4:])
    assert np.isfinite(image).sum() == 20 + 32
