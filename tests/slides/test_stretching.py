from __future__ import annotations

import numpy as np

from spatialdl.slides.stretching import stretched


def dark() -> np.ndarray:
    """A ground of noise, and one bright cell in a thousand."""
    image = np.random.default_rng(0).integers(0, 4, (200, 200, 3), np.uint8)
    image[50:56, 60:66] = (10, 20, 80)
    return image


def test_a_dark_picture_is_made_bright_in_its_own_colours() -> None:
    image = dark()
    image[100:150] = (10, 20, 80)
    found = stretched(image)
    assert found[120, 0].tolist() == [32, 64, 255]
    assert found[:50].max() < 15


def test_few_cells_are_bright_if_they_are_what_is_shown() -> None:
    image = dark()
    shown = image.max(-1) > 50
    assert stretched(image, shown)[52, 62, 2] == 255
    assert stretched(image, np.zeros_like(shown)).max() == 255  # of noise by 16 at most
    assert stretched(image)[:40].max() <= 48


def test_bright_pictures_and_those_of_one_colour_are_left() -> None:
    random = np.random.default_rng(0)
    for image in (
        random.integers(0, 256, (50, 50, 3), np.uint8),
        random.integers(200, 256, (50, 50, 3), np.uint8),
        np.zeros((9, 9, 3), np.uint8),
        np.full((9, 9, 3), 7, np.uint8),
    ):
        assert np.abs(stretched(image).astype(int) - image).max() <= 3
