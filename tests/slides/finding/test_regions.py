from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.draw import polygon2mask

from spatialdl.slides.finding.regions import Region, class_map, class_names, filled


def square(x0: float, y0: float, side: float) -> np.ndarray:
    return np.array([(x0, y0), (x0 + side, y0), (x0 + side, y0 + side), (x0, y0 + side)], float)


def test_a_pixel_is_inside_if_its_centre_is() -> None:
    mask = filled(np.array([(1.4, 2.6), (4.6, 2.6), (4.6, 5.4), (1.4, 5.4)]), (7, 6))
    expected = np.zeros((7, 6), bool)
    expected[3:5, 1:5] = True
    assert (mask == expected).all()
    # tiles of the plane: no pixel is in two, none is left out
    halves = [
        filled(np.array(t), (9, 9)) for t in ([(0, 0), (9, 0), (9, 9)], [(0, 0), (9, 9), (0, 9)])
    ]
    assert (halves[0] ^ halves[1]).all()


@given(st.integers(3, 12), st.integers(0, 2**32 - 1))
def test_any_polygon_is_filled_as_by_scikit_image(corners: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ring = random.uniform(-15, 45, (corners, 2))  # crosses itself, leaves the picture
    expected = polygon2mask((30, 25), ring[:, ::-1] - 0.5)
    assert (filled(ring, (30, 25)) == expected).all()


def test_areas_of_a_circle() -> None:
    angle = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    circle = 500 + 300 * np.stack([np.cos(angle), np.sin(angle)], 1)
    region = Region(circle)
    assert region.area == pytest.approx(np.pi * 300**2, rel=1e-3)
    mask = class_map([region], (100, 110), 10.0) > 0
    assert mask.sum() * 100 == pytest.approx(region.area, rel=3e-3)


def test_the_smallest_region_counts_whatever_the_order() -> None:
    large = Region(square(0, 0, 100), (square(60, 60, 30),), "stroma")
    small = Region(square(20, 20, 20), label="tumour")
    none = Region(square(5, 5, 4))
    assert class_names([large, small, none, small]) == [None, "stroma", "tumour"]
    for regions in ([large, small, none], [none, small, large]):
        classes = class_map(regions, (50, 60), 2.0)
        assert classes.shape == (50, 60)
        assert (classes[10:20, 10:20] == 3).all()
        assert (classes[30:45, 30:45] == 0).all()
        assert np.bincount(classes.ravel()).tolist() == [
            500 + 225,
            4,
            2500 - 225 - 100 - 4,
            100,
        ]


def test_what_lies_outside_is_cut_off() -> None:
    regions = [
        Region(square(-1000, -1000, 1005)),
        Region(square(500, 0, 9)),
        Region(square(3, -20, 9)),
    ]
    classes = class_map(regions, (10, 10), 1.0)
    assert classes[:5, :5].all()
    assert classes.sum() == 25
    assert class_map([], (3, 4), 1.0).tolist() == np.zeros((3, 4)).tolist()


def test_holes_lie_where_they_are_drawn() -> None:
    region = Region(square(40, 20, 40), (square(60, 30, 10),))
    expected = np.zeros((50, 60), np.uint16)
    expected[10:30, 20:40] = 1
    expected[15:20, 30:35] = 0
    assert (class_map([region], (50, 60), 2.0) == expected).all()


def test_a_region_elsewhere() -> None:
    region = Region(square(40, 20, 40), (square(60, 30, 10),), "a").moved((-5, 7))
    assert region.outline.tolist() == square(35, 27, 40).tolist()
    assert region.holes[0].tolist() == square(55, 37, 10).tolist()
    assert region.label == "a"
