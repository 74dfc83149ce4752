from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter1d

from spatialdl.data.augmentation import blur as module
from spatialdl.data.augmentation.blur import blur, radius_of, with_margin

RANDOM = np.random.default_rng(0)


def whole(pixels, sigma):
    size = pixels.shape[:2]
    return blur(pixels, (0, size[0], 0, size[1]), size, sigma)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.7])
def test_it_is_scipy_s_gaussian_with_the_edge_going_on(sigma):
    pixels = RANDOM.random((17, 9, 2))
    expected = pixels
    for axis in (0, 1):
        expected = gaussian_filter1d(expected, sigma, axis, mode="nearest", radius=radius_of(sigma))
    assert whole(pixels, sigma) == pytest.approx(expected, abs=1e-12)


def test_no_blur_and_no_pixels():
    pixels = RANDOM.random((4, 5, 3))
    assert whole(pixels, 0.0) is pixels
    assert whole(pixels[:0], 1.0).shape == (0, 5, 3)


def test_bytes_are_rounded_and_flat_images_stay(monkeypatch):
    pixels = RANDOM.integers(0, 256, (15, 12, 3), np.uint8)
    found = whole(pixels, 1.5)
    assert found.dtype == np.uint8
    assert np.abs(found - whole(pixels / 255, 1.5) * 255).max() <= 0.51
    flat = np.full((6, 7, 1), 255, np.uint8)
    assert (whole(flat, 4.0) == flat).all()
    monkeypatch.setattr(module, "_ROWS_BYTES", 1)
    assert (whole(pixels, 1.5) == found).all()


@given(st.data())
def test_a_box_is_that_of_the_whole(data):
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
