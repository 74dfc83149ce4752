from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from spatialdl.data.augmentation.drawing import Draw
from spatialdl.data.augmentation.geometry import read_padded, window_of

IMAGE = np.arange(7 * 9).reshape(7, 9)
WAYS = list(itertools.product((False, True), (False, True), range(4)))


def view(drawn: Draw, size, fill=-1):
    window = window_of(drawn, IMAGE.shape, size)
    box = window.source_box((0, size[0], 0, size[1]))
    empty = lambda: np.full((box[1] - box[0], box[3] - box[2]), fill)  # noqa: E731
    read = lambda box: IMAGE[box[0] : box[1], box[2] : box[3]]  # noqa: E731
    return window.arrange(read_padded(read, IMAGE.shape, box, empty))


@pytest.mark.parametrize(("rows", "cols", "turns"), WAYS)
def test_flips_and_turns_are_numpy_s(rows, cols, turns):
    expected = IMAGE[::-1] if rows else IMAGE
    expected = np.rot90(expected[:, ::-1] if cols else expected, turns)
    found = view(Draw(flip_rows=rows, flip_cols=cols, turns=turns), expected.shape)
    assert (found == expected).all()


@pytest.mark.parametrize(("rows", "cols", "turns"), WAYS)
@pytest.mark.parametrize("size", [(3, 5), (5, 3), (12, 4), (11, 13)])
def test_a_crop_is_turned_as_a_whole_and_padded_around(rows, cols, turns, size):
    drawn = Draw((0.5, 0.99), rows, cols, turns)
    height, width = size if turns % 2 == 0 else size[::-1]
    left = 7 - height, 9 - width
    row0 = int(0.5 * (left[0] + 1)) if left[0] > 0 else left[0] // 2
    col0 = int(0.99 * (left[1] + 1)) if left[1] > 0 else left[1] // 2
    plane = np.full((47, 49), -1)
    plane[20:27, 20:29] = IMAGE
    expected = plane[20 + row0 : 20 + row0 + height, 20 + col0 : 20 + col0 + width]
    expected = expected[::-1] if rows else expected
    expected = np.rot90(expected[:, ::-1] if cols else expected, turns)
    assert (view(drawn, size) == expected).all()


def test_the_centre_is_the_centre():
    assert view(Draw(), (3, 3)).tolist() == IMAGE[2:5, 3:6].tolist()
    assert (view(Draw(), (9, 11))[1:8, 1:10] == IMAGE).all()


def test_random_crops_reach_every_place_and_none_beyond():
    parts = np.linspace(0, 1, 400, endpoint=False)
    places = Counter(window_of(Draw((p, 0.0)), (7, 9), (3, 9)).corner[0] for p in parts)
    assert set(places) == {0, 1, 2, 3, 4}
    assert max(places.values()) - min(places.values()) <= 1


def test_what_lies_beyond_is_not_read():
    asked = []

    def read(box):
        asked.append(box)
        return IMAGE[box[0] : box[1], box[2] : box[3]]

    def at(*box):
        empty = np.full((box[1] - box[0], box[3] - box[2]), -1)
        return read_padded(read, IMAGE.shape, box, empty.copy)

    assert (at(-4, -1, 0, 5) == -1).all()
    assert (at(0, 3, 9, 12) == -1).all()
    assert at(3, 3, 2, 5).shape == (0, 3)
    assert asked == []
    assert at(5, 9, -2, 1)[:2, 2].tolist() == IMAGE[5:7, 0].tolist()
    assert asked == [(5, 7, 0, 1)]
