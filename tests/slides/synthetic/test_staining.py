from __future__ import annotations

import numpy as np
import pytest

from spatialdl.slides.synthetic.staining import (
    SPRITE,
    colour_table,
    cut,
    multiply,
    nucleus_sprites,
    rgb,
    stamp,
    textures,
)


def test_more_stain_is_darker_and_none_is_glass() -> None:
    colours = rgb(colour_table(np.random.default_rng(0))).reshape(256, 256, 3).astype(int)
    assert colours[0, 0].min() > 235
    assert (np.diff(colours, axis=0) <= 0).all()
    assert (np.diff(colours, axis=1) <= 0).all()
    red, green, blue = colours[160, 60]  # a nucleus
    assert green < red < blue
    red, green, blue = colours[0, 120]  # stroma
    assert green < blue < red


def test_a_texture_repeats_without_end() -> None:
    texture, _ = textures(0)
    period = len(texture)
    assert (cut(texture, 3 * period + 5, 7, 20, 30) == texture[5:25, 7:37]).all()
    around = cut(texture, period - 2, period - 3, 4, 2 * period)
    assert (around[2:, 3 : 3 + period] == texture[:2]).all()


def test_multiply_is_in_units_of_128_and_does_not_wrap() -> None:
    values = np.array([[0, 100, 200]] * 70, np.uint8)
    multiply(values, np.full((70, 3), 192, np.uint8))
    assert values.tolist() == [[0, 150, 255]] * 70


@pytest.mark.parametrize(
    ("row", "col"), [(5, 5), (-20, -3), (30, 35), (-SPRITE, 0), (0, 40), (-99, 0)]
)
def test_a_stamp_is_cut_off_at_the_edges(row: int, col: int) -> None:
    sprite = nucleus_sprites()[0][3]
    image = np.zeros((40, 40), np.uint8)
    large = np.zeros((240, 240), np.uint8)
    stamp(image, sprite, row, col)
    stamp(large, sprite, row + 100, col + 100)
    assert (image == large[100:140, 100:140]).all()
