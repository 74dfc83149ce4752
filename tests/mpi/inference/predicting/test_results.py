"""Rank 0 writes a map distributed over ranks; iteration is collective."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.inference.predicting.inputs import Input, SlideImages
from spatialdl.inference.predicting.maps import MapClasses, MapFolder, save_maps
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.inference.predicting.running import SlideOutput
from spatialdl.layout.layout import even_bounds

WORLD = MpiCommunicator(MPI.COMM_WORLD)
SIZE, EXTENT, PLACE = (700, 41), (1500, 130), (30, 14)  # three bands of 512 rows, at half of it


@pytest.mark.parametrize("dim", [0, 1])
def test_a_map_in_pieces_is_that_of_one_process(dim, tmp_path):
    run_dir = Path(WORLD.bcast(tmp_path))
    images = SlideImages(run_dir / "a.tiff", 0.25, [PLACE], SIZE, 2.0)
    span = 2.0 * SIZE[0], 2.0 * SIZE[1]
    given = Input("a", images, SIZE, [PLACE], span, EXTENT, 0.25, None, True)
    values = torch.rand(3, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    values[2] *= 0
    values[2, 300:600] = 2
    values /= values.sum(0)
    bounds = even_bounds(SIZE[dim], WORLD.size)
    first, last = bounds[WORLD.rank], bounds[WORLD.rank + 1]
    own = values.narrow(1 + dim, first, last - first)
    pieces = [MapPiece((first, 0) if dim == 0 else (0, first), own)]
    where, classes = MapFolder(run_dir, "a"), MapClasses("segmentation", "abc", [2, 0])
    save_maps(where, given, SlideOutput(pieces=pieces), classes, WORLD)
    names = where.files
    assert WORLD.gather(names, 0) is None or len(names) == 4
    if WORLD.rank:
        assert names == []
        return
    for number, name in ((0, "a"), (2, "c")):
        expected = np.zeros((750, 65), np.uint8)
        expected[7:707, 15:56] = 1 + np.rint(254 * values[number].numpy())
        assert (tifffile.imread(run_dir / f"a-{name}.tif", level=0) == expected).all()
    features = json.loads((run_dir / "a.geojson").read_text())["features"]
    largest = max(features, key=lambda one: np.ptp(one["geometry"]["coordinates"][0], 0).prod())
    ring = np.array(largest["geometry"]["coordinates"][0])
    assert largest["properties"]["classification"]["name"] == "c"
    assert np.allclose(ring.min(0), [30, 14 + 600], atol=4)
    assert np.allclose(ring.max(0), [30 + 82, 14 + 1200], atol=4)
