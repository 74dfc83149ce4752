"""Feature files: written whole, read back, and refused where they are no such files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.feature_file import FeatureFile, list_features, write_features


def features_of(tiles: int, width: int = 5, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(tiles).standard_normal((tiles, width)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_come_back_as_they_were_written(tmp_path: Path, dtype):
    features, coords = features_of(7, dtype=dtype), np.arange(14).reshape(7, 2)
    path = tmp_path / "h5" / "slide 1.h5"
    file = write_features(path, features, coords, {"patch_size": 256}, {"encoder": "net"})
    assert (file.slide, file.tiles, file.width, file.dtype) == ("slide 1", 7, 5, dtype)
    assert file.attributes["patch_size"] == 256
    np.testing.assert_array_equal(file.read(), features)
    np.testing.assert_array_equal(file.read(2, 4), features[2:4])
    np.testing.assert_array_equal(file.coords(), coords)
    assert [one.name for one in path.parent.iterdir()] == ["slide 1.h5"]  # nothing temporary


def test_features_with_a_leading_dim_of_one_are_read(tmp_path: Path):
    features = features_of(3)
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["features"] = features[None]
    file = FeatureFile.open(tmp_path / "a.h5")
    assert (file.tiles, file.width, file.has_coords) == (3, 5, False)
    np.testing.assert_array_equal(file.read(1), features[1:])
    with pytest.raises(ValueError, match="tile coordinates are unknown"):
        file.coords()


def test_a_slide_without_tiles_has_no_rows(tmp_path: Path):
    file = write_features(tmp_path / "a.h5", features_of(0), np.zeros((0, 2), np.int64))
    assert file.tiles == 0
    assert file.read().shape == (0, 5)


@pytest.mark.parametrize(
    ("features", "coords", "message"),
    [
        (np.zeros((2, 3, 4)), None, "shape"),
        (np.zeros((2, 3), int), None, "floats"),
        (np.zeros((2, 3)), np.zeros((3, 2), int), "expected"),
    ],
)
def test_what_is_no_table_of_features_is_not_written(tmp_path: Path, features, coords, message):
    with pytest.raises(ValueError, match=message):
        write_features(tmp_path / "a.h5", features, coords)
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused_by_name(tmp_path: Path):
    (tmp_path / "text.h5").write_text("no HDF5")
    with h5py.File(tmp_path / "coords.h5", "w") as h5:
        h5["coords"] = np.zeros((2, 2), int)
    with h5py.File(tmp_path / "apart.h5", "w") as h5:
        h5["features"], h5["coords"] = np.zeros((3, 2)), np.zeros((2, 2), int)
    for name in ("text", "coords", "apart", "missing"):
        with pytest.raises(ValueError, match=f"{name}.h5 has no readable features"):
            FeatureFile.open(tmp_path / f"{name}.h5")


def test_folders_are_listed_by_slide(tmp_path: Path):
    for name in ("b", "a"):
        write_features(tmp_path / "out" / "h5" / f"{name}.h5", features_of(2), None)
    write_features(tmp_path / "c.h5", features_of(2), None)
    found = list_features([tmp_path / "c.h5", tmp_path / "out"])
    assert [one.slide for one in found] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="have the same slide name"):
        list_features([tmp_path / "out", tmp_path / "out" / "h5" / "a.h5"])
    write_features(tmp_path / "d.h5", features_of(2, width=6), None)
    with pytest.raises(ValueError, match="must come from one encoder"):
        list_features([tmp_path / "out", tmp_path / "d.h5"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no feature files"):
        list_features([tmp_path / "empty"])
