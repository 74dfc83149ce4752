"""Maps of tiles and pieces, and predictions of turned images that are turned back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from matplotlib import colormaps
from PIL import Image

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.image_source import whole_box
from spatialdl.data.views import Views
from spatialdl.inference.predicting.maps import Overview, TileMap
from spatialdl.inference.predicting.pictures import HEAT_COLOURS, HEAT_OPACITY, save_overlay
from spatialdl.inference.predicting.pieces import MapPiece, PiecedMap, to_file, turned_views, turns
from spatialdl.slides.reading.reader import Thumbnail


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


def test_an_overview_has_the_means_of_what_is_known(monkeypatch):
    monkeypatch.setattr("spatialdl.inference.predicting.maps.LONGEST", 4)
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
    mixed = (1 - HEAT_OPACITY) * below + HEAT_OPACITY * colour(1.0)
    squares = near(picture, [10, 10, 120]), near(picture, mixed)
    for panel, square in zip(map(box, panels), map(box, squares), strict=True):
        rows, cols = panel[1] - panel[0] + 1, panel[3] - panel[2] + 1
        assert rows / cols == pytest.approx(400 / 600, abs=0.01)
        expected = np.array([rows / 8, rows / 4, cols * 3 / 4, cols * 5 / 6])
        found = square - [panel[0], panel[0] - 1, panel[2], panel[2] - 1]
        assert np.abs(found - expected).max() <= 2


def colour(share: float) -> npt.NDArray[np.float64]:
    return np.array(colormaps[HEAT_COLOURS](share)[:3]) * 255


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
@pytest.mark.parametrize("offset", [(0, 0), (4, 3), (5, 0), (8, 9)])
def test_a_region_lies_at_its_place_in_the_map(offset, rows):
    size, (top, left) = (17, 20), offset
    values = torch.rand(2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [(0, 0, 5, 4), (0, 4, 5, 11), (5, 0, 9, 7), (5, 7, 9, 11)]  # 2 x 2, uneven
    pieces = [MapPiece((r0, c0), values[:, r0:r1, c0:c1]) for r0, c0, r1, c1 in parts]
    found = PiecedMap(SingleProcess(), size, pieces, (9, 11), offset)
    assert found.size == size
    for column in (0, 1):
        bands = list(found.bands(column, rows))
        assert [len(band) for band in bands[:-1]] == [rows] * (len(bands) - 1)
        expected = np.full(size, np.nan)
        expected[top : top + 9, left : left + 11] = values[column]
        assert np.array_equal(np.concatenate(bands), expected, equal_nan=True)


def test_a_piece_may_lie_in_a_file_that_nobody_sees(tmp_path):
    values = torch.rand(3, 4, 5).transpose(1, 2)
    kept = to_file(tmp_path, MapPiece((7, 9), values))
    assert kept.start == (7, 9)
    assert torch.equal(kept.values, values)
    assert list(tmp_path.iterdir()) == []


class Array:
    """One stored image, ([slices,] rows, columns, channels)."""

    has_masks, classes = False, ("a",)

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.labels, self.channels = pixels, np.zeros(1, int), pixels.shape[-1]

    def __len__(self) -> int:
        return 1

    def image_size(self, sample: int) -> tuple[int, ...]:
        return self.pixels.shape[:-1]

    def read(self, sample, box=None):
        pairs = zip(box[::2], box[1::2], strict=True)
        return self.pixels[tuple(slice(*pair) for pair in pairs)]


def views_of(*size: int, view: tuple[int, ...] | None = None) -> Views:
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 2), np.uint8)
    return Views(Array(pixels), view or size)


def test_the_view_is_turned_and_not_what_is_stored():
    """An odd crop would be off by a pixel in the transformed stored image."""
    views = views_of(9, 8, view=(6, 5))
    whole = views.read(0, 0, (0, 6, 0, 5))
    for turn in turns("d4", 2):
        turned = turned_views(views, turn)
        np.testing.assert_array_equal(turned.read(0, 0, whole_box(turned.size)), turn.pixels(whole))


@pytest.mark.parametrize("size", [(7, 4), (3, 5, 6)])
def test_pieces_come_back_to_their_place(size):
    values = np.random.default_rng(0).random((*size, 2))
    for turn in (*turns("d4", len(size)), *turns("flips", len(size))):
        turned = torch.from_numpy(turn.pixels(values).copy()).movedim(-1, 0)
        start = tuple(range(1, len(size) + 1)) if min(turned.shape[1:]) > 3 else (1,) * len(size)
        part = turned[(slice(None), *(slice(first, first + 2) for first in start))]
        back = turn.piece_before(MapPiece(start, part), turned.shape[1:])
        place = tuple(
            slice(first, first + extent)
            for first, extent in zip(back.start, back.values.shape[1:], strict=True)
        )
        np.testing.assert_array_equal(back.values.movedim(0, -1).numpy(), values[place])
