from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import colormaps
from PIL import Image

from spatialdl.predicting.overlay import save_overlay
from spatialdl.slides.reading.reader import Thumbnail
from spatialdl.training.pictures.heat_maps import COLOURS, OPACITY

EXTENT = (400, 600)


def drawn(
    path: Path, maps: dict[str, npt.NDArray[np.float64]], thumbnail: Thumbnail | None
) -> npt.NDArray[np.int64]:
    save_overlay(path, "a slide", maps, 50.0, EXTENT, thumbnail, "probability", (0.0, 2.0))
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), np.int64)


def box(where: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """First and last row, first and last column."""
    rows, cols = np.nonzero(where)
    return np.array([rows.min(), rows.max(), cols.min(), cols.max()])


def near(picture: npt.NDArray[np.int64], colour: Sequence[float]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(picture - np.array(colour)).max(2) <= 2)


def test_a_map_lies_over_the_slide_where_it_belongs(tmp_path):
    """A dark square of the slide is covered by the only finite pixel of the map."""
    image = np.full((40, 60, 3), 240, np.uint8)
    image[5:10, 45:50] = 10, 10, 120  # rows 50 to 100 and columns 450 to 500 of level 0
    values = np.full((8, 12), np.nan)
    values[1, 9] = 2.0
    missing = np.zeros(image.shape[:2], bool)
    picture = drawn(tmp_path / "a.png", {"yes": values}, Thumbnail(image, missing, 10.0))
    picture = picture[75:, : round(picture.shape[1] * 0.9)]  # without titles and the bar of colours
    panels = near(picture, [240] * 3), near(picture, [246] * 3)  # which is fainter, below a map
    below = 255 - (255 - np.array([10, 10, 120]).mean()) * 0.6
    mixed = (1 - OPACITY) * below + OPACITY * colour(1.0)
    squares = near(picture, [10, 10, 120]), near(picture, mixed)
    for panel, square in zip(map(box, panels), map(box, squares), strict=True):
        rows, cols = panel[1] - panel[0] + 1, panel[3] - panel[2] + 1
        assert rows / cols == pytest.approx(400 / 600, abs=0.01)
        expected = np.array([rows / 8, rows / 4, cols * 3 / 4, cols * 5 / 6])
        found = square - [panel[0], panel[0] - 1, panel[2], panel[2] - 1]
        assert np.abs(found - expected).max() <= 2


def colour(share: float) -> npt.NDArray[np.float64]:
    return np.array(colormaps[COLOURS](share)[:3]) * 255


def test_a_map_without_a_slide_has_the_colours_of_its_values(tmp_path):
    values = np.array([[0.0, 0.6, 1.2], [np.nan, np.nan, 2.0]]).repeat(4, 0).repeat(4, 1)
    picture = drawn(tmp_path / "a.png", {"yes": values}, None)
    map_ = picture[:, : round(picture.shape[1] * 0.83)]  # not the bar of colours
    side = (np.ptp(box(near(map_, colour(0.0)) | near(map_, colour(1.0)))[2:]) + 1) / 3
    corner = box(near(map_, colour(0.0)))[[0, 2]]
    for row, col, share in ((0, 0, 0.0), (0, 1, 0.3), (0, 2, 0.6), (1, 2, 1.0)):
        first = corner + np.array([row, col]) * side
        expected = [first[0], first[0] + side, first[1], first[1] + side]
        assert np.abs(box(near(map_, colour(share))) - expected).max() <= 2
