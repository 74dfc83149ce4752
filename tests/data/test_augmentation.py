"""Augmentation: settings, what is drawn, and the changes of colour and sharpness."""

from __future__ import annotations

import colorsys
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter1d
from skimage.color import hed_from_rgb

from spatialdl.data.augmentation import blur as blurring
from spatialdl.data.augmentation import color
from spatialdl.data.augmentation.blur import blur, radius_of, with_margin
from spatialdl.data.augmentation.color import DARKEST, recolour
from spatialdl.data.augmentation.drawing import Draw, draw
from spatialdl.data.augmentation.settings import Augmentation

RANDOM = np.random.default_rng(0)
ALL = Augmentation("random", 0.5, True, 0.2, 0.3, 0.4, 0.1, 0.05, 2.0)
FLOATS = RANDOM.uniform(0.3, 0.7, (5, 6, 3))
LUMA = [0.299, 0.587, 0.114]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"flop": 0.5}, "data.augment.flop is unknown: there are crop, flip, rotate"),
        ({"crop": "corner"}, "data.augment.crop=corner is unknown: take centre or random"),
        ({"rotate": 90}, "data.augment.rotate=90 must be true or false"),
        ({"flip": 1.5}, "data.augment.flip=1.5 is out of range: use a number from 0 .* to 1$"),
        ({"flip": True}, "data.augment.flip=True is out of range"),
        ({"hue": 0.51}, "data.augment.hue=0.51 is out of range: .* to 0.5$"),
        ({"blur": -1}, "data.augment.blur=-1 is out of range: .* to 16$"),
        ({"stain": float("nan")}, "data.augment.stain=nan is out of range"),
        ({"contrast": "much"}, "data.augment.contrast=much is out of range"),
        ({"saturation": None}, "data.augment.saturation=None is out of range"),
    ],
)
def test_settings_that_are_unknown_or_out_of_range_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Augmentation.from_config(given)


def test_settings_as_they_come_change_nothing_and_colours_need_three_channels():
    assert Augmentation.from_config(None) == Augmentation.from_config({}) == Augmentation()
    assert draw(Augmentation(), 0, 0, 0) == Draw()
    assert recolour(FLOATS, Draw()) is FLOATS
    Augmentation(brightness=1, contrast=1, blur=2).check_channels(5)
    Augmentation(hue=0.1, stain=0.1).check_channels(3)
    with pytest.raises(ValueError, match=r"data.augment.hue, data.augment.stain require images of"):
        Augmentation(hue=0.1, stain=0.1).check_channels(4)


def test_a_draw_follows_from_seed_epoch_and_sample():
    keys = list(itertools.product((0, 1), repeat=3))
    draws = [draw(ALL, *key) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [draw(ALL, *key) for key in keys] == draws
    # no continuation of the stream with the same seed that orders the samples
    ours = draw(replace(ALL, flip=0.0), 3, 4, 0).crop
    for other in ([3, 4, 0], [3, 4]):
        assert ours != tuple(np.random.default_rng(other).random(2))
    # one setting leaves what is drawn for others
    without = draw(replace(ALL, hue=0, stain=0), 0, 0, 5)
    assert without == replace(draw(ALL, 0, 0, 5), hue=0.0, stain=None)


def test_draws_fill_their_ranges():
    draws = [draw(ALL, 0, epoch, sample) for epoch in range(10) for sample in range(100)]
    for values, low, high in [
        ([d.crop[0] for d in draws], 0, 1),
        ([d.crop[1] for d in draws], 0, 1),
        ([d.brightness for d in draws], 0.8, 1.2),
        ([d.contrast for d in draws], 0.7, 1.3),
        ([d.saturation for d in draws], 0.6, 1.4),
        ([d.hue for d in draws], -0.1, 0.1),
        ([d.sigma for d in draws], 0, 2),
        *(([d.stain[0][channel] for d in draws], 0.95, 1.05) for channel in range(3)),
        *(([d.stain[1][channel] for d in draws], -0.05, 0.05) for channel in range(3)),
    ]:
        margin = 0.02 * (high - low)
        assert low <= min(values) < low + margin
        assert high >= max(values) > high - margin
        assert np.mean(values) == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    assert np.bincount([d.turns for d in draws]).tolist() == pytest.approx([250] * 4, abs=60)
    for count in (
        sum(d.flip_rows for d in draws),
        sum(d.flip_cols for d in draws),
        sum(d.flip_rows == d.flip_cols for d in draws),
    ):
        assert count == pytest.approx(500, abs=80)


def test_brightness_contrast_and_saturation():
    assert recolour(FLOATS, Draw(brightness=1.2)) == pytest.approx(1.2 * FLOATS)
    assert recolour(FLOATS, Draw(brightness=2.0)).max() == 1
    contrast = recolour(FLOATS[..., :1], Draw(contrast=1.3))
    assert contrast == pytest.approx(0.5 + 1.3 * (FLOATS[..., :1] - 0.5))
    luma = (FLOATS @ LUMA)[..., None]
    for saturation in (0.0, 1.4):
        found = recolour(FLOATS, Draw(saturation=saturation))
        assert found == pytest.approx(luma + saturation * (FLOATS - luma))


def test_hue_turns_colours_and_keeps_grey_and_luma():
    grey = np.full((2, 2, 3), 0.4)
    assert recolour(grey, Draw(hue=0.3)) == pytest.approx(grey, abs=2e-3)
    red = np.array([[[0.6, 0.4, 0.4]]])
    hues = sorted(
        colorsys.rgb_to_hsv(*recolour(red, Draw(hue=hue))[0, 0])[0] for hue in (-1 / 3, 1 / 3)
    )
    assert hues == pytest.approx([1 / 3, 2 / 3], abs=0.06)
    found = recolour(red, Draw(hue=1 / 3))[0, 0]
    assert found @ LUMA == pytest.approx(red[0, 0] @ LUMA, abs=2e-3)
    assert recolour(recolour(red, Draw(hue=0.2)), Draw(hue=-0.2)) == pytest.approx(red)


def test_stain_jitter_is_that_of_ruifrok_s_unmixing():
    factors, added = (1.04, 0.97, 1.02), (0.01, -0.02, 0.03)
    found = recolour(FLOATS, Draw(stain=(factors, added)))
    amounts = -np.log10(FLOATS) @ hed_from_rgb
    stains = np.linalg.inv(hed_from_rgb)
    lengths = np.linalg.norm(stains, axis=1)  # ours are of length 1
    expected = 10 ** -((amounts * factors + added / lengths) @ stains)
    assert found == pytest.approx(expected)
    # black stays finite, and white without added stain white
    drawn = Draw(stain=((1.2, 1.2, 1.2), (0.0, 0.0, 0.0)))
    assert (recolour(np.full((1, 1, 3), 255, np.uint8), drawn) == 255).all()
    black = recolour(np.zeros((1, 1, 3)), drawn)[0, 0]
    assert black == pytest.approx([10 ** (1.2 * math.log10(DARKEST))] * 3)


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


def test_a_pixel_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    drawn = Draw(hue=0.1, saturation=1.3, stain=((1.1, 0.9, 1.0), (0.02, 0.0, 0.0)))
    pixels = RANDOM.integers(0, 256, (37, 41, 3), np.uint8)
    colours, blurred = recolour(pixels, drawn), whole(pixels, 1.5)
    for module in (color, blurring):
        monkeypatch.setattr(module, "_ROWS_BYTES", 1)
    assert (recolour(pixels, drawn) == colours).all()
    assert (recolour(pixels[::-1, 5:11], drawn) == colours[::-1, 5:11]).all()
    assert (whole(pixels, 1.5) == blurred).all()


def whole(pixels, sigma):
    size = pixels.shape[:2]
    return blur(pixels, (0, size[0], 0, size[1]), size, sigma)


@pytest.mark.parametrize("sigma", [0.3, 2.7])
def test_blur_is_scipy_s_gaussian_with_the_edge_going_on(sigma):
    pixels = RANDOM.random((17, 9, 2))
    expected = pixels
    for axis in (0, 1):
        expected = gaussian_filter1d(expected, sigma, axis, mode="nearest", radius=radius_of(sigma))
    assert whole(pixels, sigma) == pytest.approx(expected, abs=1e-12)


def test_of_blur_bytes_are_rounded_and_flat_images_stay():
    pixels = RANDOM.integers(0, 256, (15, 12, 3), np.uint8)
    found = whole(pixels, 1.5)
    assert found.dtype == np.uint8
    assert np.abs(found - whole(pixels / 255, 1.5) * 255).max() <= 0.51
    flat = np.full((6, 7, 1), 255, np.uint8)
    assert (whole(flat, 4.0) == flat).all()
    assert whole(pixels, 0.0) is pixels
    assert whole(pixels[:0], 1.0).shape == (0, 12, 3)


@given(st.data())
def test_a_blurred_box_is_that_of_the_whole(data):
    rows, cols = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24))
    row = sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2)))
    col = sorted(data.draw(st.tuples(*[st.integers(0, cols)] * 2)))
    sigma = data.draw(st.floats(0, 6))
    pixels = RANDOM.random((rows, cols, 3)).astype(np.float32)
    box = (*row, *col)
    row0, row1, col0, col1 = with_margin(box, (rows, cols), sigma)
    found = blur(pixels[row0:row1, col0:col1], box, (rows, cols), sigma)
    expected = whole(pixels, sigma)[row[0] : row[1], col[0] : col[1]]
    assert found.shape == expected.shape
    assert (found == expected).all()
