"""Transformed images, and predictions transformed back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.image_source import whole_box
from spatialdl.data.views import Views
from spatialdl.predicting.pieces import MapPiece
from spatialdl.predicting.turning import TurnMean, turned_views, turns


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


@pytest.mark.parametrize(
    ("name", "dims", "count"),
    [
        (None, 2, 1),
        ("flips", 2, 4),
        ("d4", 2, 8),
        ("flips", 3, 8),
        ("d4", 3, 8),
        ("flips", 1, 2),
    ],
)
def test_turns_are_all_different(name, dims, count):
    found = turns(name, dims)
    image = np.random.default_rng(0).random((*(3, 3, 3)[:dims], 1))
    seen = {turn.pixels(image).tobytes() for turn in found}
    assert len(found) == len(seen) == count
    assert found[0].is_identity
    assert not any(turn.is_identity for turn in found[1:])


@pytest.mark.parametrize("size", [(7, 4), (3, 5, 6)])
def test_a_box_of_a_turned_image_is_that_box_of_it(size):
    views = views_of(*size)
    whole = views.read(0, 0, whole_box(size))
    for turn in (*turns("d4", len(size)), *turns("flips", len(size))):
        turned = turned_views(views, turn)
        expected = turn.pixels(whole)
        assert turned.size == expected.shape[:-1]
        found = turned.read(0, 0, whole_box(turned.size))
        np.testing.assert_array_equal(found, expected)
        box = tuple(number for n in turned.size for number in (1, n - 1))
        inner = tuple(slice(1, n - 1) for n in turned.size)
        np.testing.assert_array_equal(turned.read(0, 0, box), expected[inner])


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


def test_means_are_of_all_turns():
    mean = TurnMean(SingleProcess())
    for number in (1.0, 2.0, 6.0):
        piece = MapPiece((0, 0), torch.full((2, 3, 4), number, dtype=torch.float64))
        mean.add(torch.tensor([[number, 0.0]]), [piece], 2)
    assert mean.values().tolist() == [[3.0, 0.0]]
    [found] = mean.pieces(torch.float64)
    assert found.start == (0, 0)
    assert torch.equal(found.values, torch.full((2, 3, 4), 3.0, dtype=torch.float64))
    nothing = TurnMean(SingleProcess())
    nothing.add(torch.ones(1, 2), [], 2)
    assert nothing.pieces(torch.float32) == []
