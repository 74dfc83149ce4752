from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from spatialdl.errors import SlideError
from spatialdl.predicting.geojson import region_features, save_geojson, tile_features
from spatialdl.slides.finding.annotations import read_annotations


def test_regions_of_geojson_are_read_back(tmp_path):
    means = np.zeros((2, 20, 30))
    means[0] = 0.4
    means[1] = 0.1
    means[1, 4:14, 6:20] = 0.9
    means[1, 7:10, 9:13] = 0.1  # a hole
    means[:, :, 25:] = np.nan
    save_geojson(tmp_path / "a.geojson", region_features(means, 8.0, ["no", "yes"], [1]))
    (region,) = read_annotations(tmp_path / "a.geojson")
    assert region.label == "yes"
    assert len(region.holes) == 1
    low, high = np.asarray(region.outline).min(0), np.asarray(region.outline).max(0)
    assert np.allclose(low, [6 * 8, 4 * 8], atol=4.1)
    assert np.allclose(high, [20 * 8, 14 * 8], atol=4.1)


def test_a_tile_of_several_classes_has_all_of_them(tmp_path):
    places, values = (
        np.array([[4, 8], [12, 8], [20, 8]]),
        np.array([[0.9, 0.7], [0.1, 0.6], [0, 0]]),
    )
    found = tile_features(places, (8.0, 8.0), (15, 99), values, ["a", "b"], one_class=False)
    save_geojson(tmp_path / "a.geojson", found)
    features = json.loads((tmp_path / "a.geojson").read_text())["features"]
    told = [one["properties"].get("classification", {}).get("name") for one in features]
    assert told == ["a: b", "b", None]
    assert features[1]["geometry"]["coordinates"][0][2] == [20, 15]  # not beyond the slide
    with pytest.raises(
        SlideError, match="only 3 points, lines or detections"
    ):  # tiles limit nothing
        read_annotations(tmp_path / "a.geojson")


def test_a_compressed_file_has_the_same_features(tmp_path):
    places = np.arange(2000).reshape(1000, 2)
    values = np.random.default_rng(0).random((1000, 2))
    for name in ("a.geojson", "a.geojson.gz", "b.geojson.gz"):
        found = tile_features(places, (5, 5), (9000, 9000), values, ["no", "yes"], one_class=True)
        save_geojson(tmp_path / name, found)
    packed = (tmp_path / "a.geojson.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.geojson").read_bytes()
    assert len(packed) < (tmp_path / "a.geojson").stat().st_size / 4


def test_what_fails_leaves_no_file(tmp_path):
    def broken():
        yield {"type": "Feature"}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        save_geojson(tmp_path / "a.geojson.gz", broken())
    assert not list(tmp_path.iterdir())
