from __future__ import annotations

import numpy as np
from PIL import Image

from spatialdl.features.maps.picture import as_colours, save_picture
from tests.features.maps.networks import region_of


def test_components_are_stretched_and_missing_ones_are_grey():
    values = np.linspace(-3, 5, 101, dtype=np.float32)[None, None].repeat(2, 0)
    values[1] = 7  # of one value
    colours = as_colours(values)
    assert colours.shape == (1, 101, 3)
    assert colours[0, 0, 0] == colours[0, 1, 0] == 0
    assert colours[0, 50].tolist() == [128, 127, 127]
    assert colours[0, 100, 0] == colours[0, 99, 0] == 255


def test_a_region_is_drawn_beside_its_map(tmp_path):
    region = region_of(tmp_path / "a.tif", (60, 200))
    colours = np.zeros((15, 50, 3), np.uint8)
    colours[..., 0] = 200
    save_picture(tmp_path / "a.png", region, colours, np.array([0.7, 0.2]), 0.5)
    with Image.open(tmp_path / "a.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    red = (pixels == (200, 0, 0)).all(-1)
    rows, columns = (np.flatnonzero(red.any(axis)) for axis in (1, 0))
    assert np.ptp(columns) / np.ptp(rows) > 3
    assert columns[0] > pixels.shape[1] / 2 - 5  # on the right
    region.images.path.write_bytes(b"damaged")  # the map is drawn all the same
    save_picture(tmp_path / "b.png", region, colours, np.array([0.7]), 0.5)
    assert (tmp_path / "b.png").is_file()
