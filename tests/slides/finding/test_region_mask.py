from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.format import UNLABELLED
from spatialdl.errors import SlideError
from spatialdl.slides.finding.region_mask import RegionMask, class_list
from spatialdl.slides.finding.regions import Region


def square(x: float, y: float, side: float, label: str | None) -> Region:
    corners = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
    return Region(np.array(corners, np.float64), label=label)


REGIONS = [
    square(100, 60, 200, "tumour"),
    square(140, 100, 60, "necrosis"),  # within the tumour
    square(110, 70, 20, None),
]
CLASSES = class_list({"tumour", "necrosis", "stroma"})


def test_every_pixel_has_the_class_of_the_smallest_region_around_it() -> None:
    assert CLASSES == ["background", "necrosis", "stroma", "tumour"]
    mask = RegionMask(REGIONS, CLASSES, (80, 50), (101, 93), 2.0)
    found = mask[0:101]
    assert (mask.shape, found.shape, found.dtype) == ((101, 93), (101, 93), np.uint8)
    expected = np.zeros((101, 93), np.uint8)
    expected[5:105, 10:110] = 3
    expected[25:55, 30:60] = 1
    expected[10:20, 15:25] = UNLABELLED
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("scale", [1.0, 1.7, 4.0])
def test_rows_are_the_same_however_many_are_asked_for(scale: float) -> None:
    mask = RegionMask(REGIONS, CLASSES, (90.0, 41.0), (150, 140), scale)
    rows = [mask[first : first + 17] for first in range(0, 150, 17)]
    assert np.array_equal(np.concatenate(rows), mask[0:150])


def test_no_region_is_background_and_a_class_of_that_name_is_it() -> None:
    assert not RegionMask([], ["background"], (0, 0), (4, 5), 1.0)[0:4].any()
    assert class_list({"background", "b", "a"}) == ["background", "a", "b"]
    mask = RegionMask([square(0, 0, 9, "background")], ["background"], (0, 0), (4, 5), 1.0)
    assert not mask[0:4].any()


def test_more_classes_than_a_byte_tells_are_refused() -> None:
    with pytest.raises(SlideError, match="have 256 classes, a mask supports 255"):
        RegionMask([], class_list(map(str, range(255))), (0, 0), (4, 5), 1.0)
