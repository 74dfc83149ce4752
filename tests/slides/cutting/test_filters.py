from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from spatialdl.slides.cutting.filters import (
    FILTERS,
    black_part,
    blur,
    parse_filters,
    pen_part,
    refused_by,
    white_part,
)
from spatialdl.slides.cutting.tiling import cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide

ALL = {name: most for name, (_, most) in FILTERS.items()}
PINK, GLASS, VIOLET, BROWN = (200, 120, 170), (244, 243, 245), (90, 60, 140), (120, 80, 50)


def plain(colour: tuple[int, int, int]) -> np.ndarray:
    return np.full((64, 64, 3), colour, np.uint8)


def tissue(side: int = 64) -> np.ndarray:
    """Sharp dots of nuclei in pink."""
    dots = np.random.default_rng(0).random((side, side, 1)) < 0.1
    return np.where(ndimage.binary_dilation(dots, np.ones((2, 2, 1))), VIOLET, PINK).astype(
        np.uint8
    )


def half(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.concatenate([one[:32], other[32:]])


def test_parts_of_a_tile() -> None:
    assert black_part(half(plain((0, 20, 25)), plain(PINK))) == 0.5
    assert black_part(plain((0, 0, 26))) == 0
    assert white_part(half(plain((220, 255, 230)), plain(PINK))) == 0.5
    assert white_part(plain((219, 255, 255))) == 0


@pytest.mark.parametrize(
    ("colour", "part"),
    [
        *(((30, 60, 180), 1), ((60, 90, 200), 1), ((20, 120, 60), 1), ((0, 160, 150), 1)),
        *(((40, 40, 45), 1), ((5, 5, 5), 1), ((20, 4, 10), 1)),
        *((PINK, 0), (GLASS, 0), (VIOLET, 0), (BROWN, 0), ((140, 150, 190), 0), ((170, 20, 30), 0)),
    ],
)
def test_ink_is_told_from_stains(colour: tuple[int, int, int], part: float) -> None:
    assert pen_part(plain(colour)) == part
    assert pen_part(half(plain(colour), tissue())) == pytest.approx(part / 2, abs=0.05)


def test_blur_is_that_of_the_focus_not_of_the_contrast() -> None:
    sharp = tissue(200)
    soft = ndimage.gaussian_filter(sharp.astype(float), (5, 5, 0)).astype(np.uint8)
    pale = (200 + sharp * 0.2).astype(np.uint8)
    assert blur(sharp) < blur(pale) + 0.01 < 0.4
    assert blur(soft) > 0.6
    assert blur(plain(PINK)) == 1
    assert blur(sharp[:2, :2]) == 1


def test_the_filter_that_refuses_is_named() -> None:
    assert refused_by(tissue(), ALL) is None
    assert refused_by(plain(PINK), ALL) == "blur"
    assert refused_by(plain(GLASS), ALL) == "white"
    assert refused_by(plain((30, 60, 180)), ALL) == "pen"
    assert refused_by(plain((0, 0, 0)), ALL) == "black"
    assert refused_by(plain((0, 0, 0)), {}) is None
    assert refused_by(half(plain((0, 0, 0)), tissue()), {"black": 0.6}) is None
    assert refused_by(half(plain((0, 0, 0)), tissue()), {"black": 0.4}) == "black"


def test_filters_are_read() -> None:
    assert parse_filters("blur") == {"blur": FILTERS["blur"].most}
    assert parse_filters(" pen = 0.2, white,black=1") == {"pen": 0.2, "white": 0.9, "black": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown filter '', expected one of black, white, pen, blur"),
        ("blur,", "unknown filter ''"),
        ("red", "unknown filter 'red'"),
        ("pen,blur,pen=1", "filter pen is repeated"),
        ("pen=", "filter pen has '', expected a number between 0 and 1"),
        ("pen=x", "has 'x'"),
        ("pen=nan", "has 'nan'"),
        ("pen=1.1", "has '1.1'"),
    ],
)
def test_filters_that_are_wrong_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_filters(text)


def test_good_tiles_of_real_slides_pass(real: Path) -> None:
    for name, mpp in [("CMU-1-Small-Region.svs", None), ("tcga-cr-7395-01a-01-ts1.svs", 0.25)]:
        with Slide(real / name, mpp) as slide:
            for tile in list(cut_tiles(slide, plan_tiles(slide, 256, 0.5)))[::4]:
                assert tile.image is not None
                assert refused_by(tile.image, ALL) is None
                smooth = ndimage.gaussian_filter(tile.image, (4, 4, 0))
                assert refused_by(smooth, ALL) == "blur"
