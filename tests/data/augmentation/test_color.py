from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
from skimage.color import hed_from_rgb

from spatialdl.data.augmentation import color
from spatialdl.data.augmentation.color import DARKEST, recolour
from spatialdl.data.augmentation.drawing import Draw

RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.uniform(0.3, 0.7, (5, 6, 3))


def test_without_changes_pixels_are_left_alone():
    assert recolour(FLOATS, Draw()) is FLOATS


def test_brightness_and_contrast():
    assert recolour(FLOATS, Draw(brightness=1.2)) == pytest.approx(1.2 * FLOATS)
    contrast = recolour(FLOATS[..., :1], Draw(contrast=1.3))
    assert contrast == pytest.approx(0.5 + 1.3 * (FLOATS[..., :1] - 0.5))
    assert recolour(FLOATS, Draw(brightness=2.0)).max() == 1


def test_saturation_keeps_grey():
    luma = FLOATS @ [0.299, 0.587, 0.114]
    found = recolour(FLOATS, Draw(saturation=0.0))
    assert found == pytest.approx(np.repeat(luma[..., None], 3, -1))
    stronger = recolour(FLOATS, Draw(saturation=1.4))
    assert stronger == pytest.approx(luma[..., None] + 1.4 * (FLOATS - luma[..., None]))


def test_hue_turns_colours_and_keeps_grey_and_luma():
    grey = np.full((2, 2, 3), 0.4)
    assert recolour(grey, Draw(hue=0.3)) == pytest.approx(grey, abs=2e-3)
    red = np.array([[[0.6, 0.4, 0.4]]])
    hues = sorted(
        colorsys.rgb_to_hsv(*recolour(red, Draw(hue=hue))[0, 0])[0] for hue in (-1 / 3, 1 / 3)
    )
    assert hues == pytest.approx([1 / 3, 2 / 3], abs=0.06)
    found = recolour(red, Draw(hue=1 / 3))[0, 0]
    luma = [0.299, 0.587, 0.114]
    assert found @ luma == pytest.approx(red[0, 0] @ luma, abs=2e-3)
    back = recolour(recolour(red, Draw(hue=0.2)), Draw(hue=-0.2))
    assert back == pytest.approx(red)


def test_stain_jitter_is_that_of_ruifrok_s_unmixing():
    factors, added = (1.04, 0.97, 1.02), (0.01, -0.02, 0.03)
    found = recolour(FLOATS, Draw(stain=(factors, added)))
    amounts = -np.log10(FLOATS) @ hed_from_rgb
    stains = np.linalg.inv(hed_from_rgb)
    lengths = np.linalg.norm(stains, axis=1)  # ours are of length 1
    expected = 10 ** -((amounts * factors + added / lengths) @ stains)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("dtype", "white"), [("uint8", 255), ("uint16", 65535), ("float32", 1)])
def test_every_type_keeps_its_range(dtype, white):
    pixels = (FLOATS * white).astype(dtype)
    drawn = Draw(brightness=1.1, hue=0.1, stain=((1.1, 0.9, 1.0), (0.02, 0.0, 0.0)))
    found = recolour(pixels, drawn)
    assert found.dtype == pixels.dtype
    expected = recolour(pixels / white, drawn)
    assert found / white == pytest.approx(expected, abs=0.51 / white if white > 1 else 1e-6)
    bright = recolour(np.full((2, 2, 3), white, dtype), Draw(brightness=1.5))
    assert (bright == white).all()


def test_black_stays_finite_and_white_without_added_stain_white():
    drawn = Draw(stain=((1.2, 1.2, 1.2), (0.0, 0.0, 0.0)))
    assert (recolour(np.full((1, 1, 3), 255, np.uint8), drawn) == 255).all()
    assert recolour(np.zeros((1, 1, 3)), drawn)[0, 0] == pytest.approx(
        [10 ** (1.2 * math.log10(DARKEST))] * 3
    )


def test_a_pixel_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    drawn = Draw(hue=0.1, saturation=1.3, stain=((1.1, 0.9, 1.0), (0.02, 0.0, 0.0)))
    pixels = RANDOM.integers(0, 256, (37, 41, 3), np.uint8)
    whole = recolour(pixels, drawn)
    monkeypatch.setattr(color, "_ROWS_BYTES", 1)
    assert (recolour(pixels, drawn) == whole).all()
    assert (recolour(pixels[::-1, 5:11], drawn) == whole[::-1, 5:11]).all()
