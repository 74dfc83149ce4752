from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import SlideError
from spatialdl.features.maps import writing
from spatialdl.features.maps.writing import FoundMap, save_map
from spatialdl.features.results import MAPS, ResultFolders
from spatialdl.predicting.pieces import MapPiece
from tests.features.maps.networks import region_of


def found_map(folder, values):
    region = region_of(folder / "a.tif", (4 * values.shape[1], 4 * values.shape[2]))
    (folder / "maps").mkdir(exist_ok=True)
    pieces = [MapPiece((0, 0), values[:, :, :3]), MapPiece((0, 3), values[:, :, 3:])]
    return FoundMap(region, tuple(values.shape[1:]), len(values), pieces)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_map_in_pieces_is_written_in_bands(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(writing, "_CHUNK_BYTES", 5 * 4 * 9)
    monkeypatch.setattr(writing, "_BAND_BYTES", 5 * 4 * 13 * 7)
    values = torch.randn(5, 23, 13, dtype=torch.float64)
    found = found_map(tmp_path, values).stored(dtype, SingleProcess())
    save_map(ResultFolders(tmp_path, MAPS), found, {"stride": (4, 4)}, None, SingleProcess())
    with h5py.File(tmp_path / "maps" / "a.h5") as file:
        features = file["features"]
        np.testing.assert_array_equal(features[:], values.to(getattr(torch, dtype)).numpy())
        assert features.chunks == (5, 3, 3) if dtype == "float32" else (5, 4, 4)
        assert features.attrs["stride"].tolist() == [4, 4]
    assert (tmp_path / "maps" / "a.png").is_file()


def test_features_that_are_not_finite_are_not_written(tmp_path):
    values = torch.zeros(2, 5, 5)
    values[0, 1, 4] = 1e6
    found = found_map(tmp_path, values)
    with pytest.raises(SlideError, match=r"1 of 25 cells .* in float16; use --dtype float32"):
        found.stored("float16", SingleProcess())
    values[1, 1, 4] = torch.nan
    with pytest.raises(SlideError, match=r"1 of 25 cells .* not finite; use --precision"):
        found.stored("float32", SingleProcess())


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    found = found_map(tmp_path, torch.zeros(2, 5, 5))
    (tmp_path / "maps").rmdir()
    with pytest.raises(OSError, match="maps"):
        save_map(ResultFolders(tmp_path, MAPS), found, {}, None, SingleProcess())
