from __future__ import annotations

import json

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data.feature_file import write_features
from spatialdl.predicting.bag_maps import BagPlaces, save_bag_maps, shares_below, tile_span

PLACES = np.array([[0, 0], [256, 0], [0, 256]], np.int64)


@pytest.mark.parametrize(
    ("attributes", "span"),
    [
        ({"patch_size_level0": 512, "patch_size": 256}, 512),  # TRIDENT
        ({"patch_size": 256, "patch_level": 1, "downsample": (4.0, 4.0)}, 1024),  # CLAM
        ({"patch_size": 300, "patch_level": 0}, 300),
        ({}, 256),  # side by side
        ({"patch_size": "wide", "patch_size_level0": float("nan")}, 256),
    ],
)
def test_how_large_tiles_are(attributes, span) -> None:
    assert tile_span(attributes, PLACES) == span


def test_nothing_tells_how_large_a_single_tile_is(tmp_path) -> None:
    file = write_features(tmp_path / "a.h5", np.zeros((1, 2)), PLACES[:1])
    with pytest.raises(ValueError, match="does not record the size of its tiles"):
        BagPlaces.of(file, None)


def test_shares_of_tiles_with_less_attention() -> None:
    assert shares_below(np.array([0.1, 0.7, 0.2])).tolist() == [0, 1, 0.5]
    assert shares_below(np.array([0.5, 0.5, 0.9])).tolist() == [0.25, 0.25, 1]
    assert shares_below(np.array([0.5])).tolist() == [1]


def test_a_heat_map_is_where_the_tiles_are(tmp_path) -> None:
    file = write_features(tmp_path / "a.h5", np.zeros((3, 2)), PLACES)
    places = BagPlaces.of(file, None)
    assert places.extent == (512, 512)
    attention = np.array([0.1, 0.7, 0.2])
    files = save_bag_maps(tmp_path, "a", attention, places, None, "attention")
    assert sorted(files) == ["a-attention.png", "a-attention.tif", "a.geojson"]
    pixels = tifffile.imread(tmp_path / "a-attention.tif")
    half = len(pixels) // 2
    assert (pixels[:half, :half] == 1).all()
    assert (pixels[:half, half:] == 255).all()
    assert (pixels[half:, :half] == 128).all()
    assert (pixels[half:, half:] == 0).all()  # no tile
    found = json.loads((tmp_path / "a.geojson").read_text())["features"]
    assert found[1]["geometry"]["coordinates"][0][0] == [256, 0]
    assert found[1]["properties"]["measurements"] == {"attention": 0.7, "attention share": 1.0}
    marked = ["classification" in one["properties"] for one in found]
    assert marked == [False, True, False]
    with Image.open(tmp_path / "a-attention.png") as picture:
        assert min(picture.size) > 200
