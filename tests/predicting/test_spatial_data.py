"""SpatialData stores read back by the library: elements and coordinate systems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting import spatial_data
from spatialdl.predicting.checks import check_config
from spatialdl.predicting.inputs import Input, SlideImages
from spatialdl.predicting.pieces import MapPiece
from spatialdl.predicting.results import Maps
from spatialdl.predicting.running import SlideOutput
from tests.composing import composed
from tests.predicting.runs import known_network, write_slide

EXTENT, SPAN, MPP = (203, 187), (64.0, 64.0), 0.25
PLACES = [(0, 0), (64, 0), (96, 64), (16, 128)]
VALUES = np.array([[0.903, 0.097], [0.6, 0.4], [0.251, 0.749], [0.4475, 0.5525]])


def tiles_of(slide: Path, mpp: float | None = MPP) -> Input:
    images = SlideImages(slide, mpp, PLACES, (32, 32), 2.0)
    return Input("a", images, (32, 32), PLACES, SPAN, EXTENT, mpp, slide)


def stored(
    folder: Path, given: Input, outcome: SlideOutput, shown: Any = (0, 1), **more: Any
) -> Any:
    """The written store, opened."""
    spatialdata = pytest.importorskip("spatialdata", reason="pip install 'spatialdl[spatialdata]'")
    trained = known_network(("no", "yes"), **more)
    names = Maps(folder, given, trained, shown, SingleProcess(), store=True).save(outcome)
    assert all((folder / name).is_file() for name in names)
    assert not [*folder.glob(".*.tmp")]
    return spatialdata.read_zarr(folder / "a.zarr")


def in_system(element: Any, system: str) -> Any:
    from spatialdata import transform

    return transform(element, to_coordinate_system=system)


def test_tiles_lie_at_their_places_in_pixels_and_micrometres(tmp_path: Path) -> None:
    slide = write_slide(tmp_path / "a.tiff", *EXTENT)
    store = stored(tmp_path, tiles_of(slide), SlideOutput(torch.from_numpy(VALUES), range(4)))
    features = json.loads((tmp_path / "a.geojson").read_text())["features"]
    for system, factor in (("global", 1.0), ("microns", MPP)):
        boxes = in_system(store.shapes["tiles"], system).geometry.bounds.to_numpy()
        x, y = np.array(PLACES).T
        right, bottom = np.minimum(x + 64, EXTENT[1]), np.minimum(y + 64, EXTENT[0])
        assert np.allclose(boxes, factor * np.stack([x, y, right, bottom], 1), atol=1e-9)
    assert len(features) == 4
    table = store.tables["predictions"]
    assert np.array_equal(table.X, VALUES)
    assert [*table.var_names] == ["no", "yes"]
    assert [*table.obs["class"]] == ["no", "no", "yes", "yes"] == [*store.shapes["tiles"]["class"]]
    assert store.attrs["slide"] == "a"


def test_maps_and_picture_lie_on_the_slide(tmp_path: Path) -> None:
    slide = write_slide(tmp_path / "a.tiff", *EXTENT)
    store = stored(tmp_path, tiles_of(slide), SlideOutput(torch.from_numpy(VALUES), range(4)))
    found = store.images["probability"]
    assert [*found.coords["c"].values] == ["no", "yes"]
    # the probability of each place, looked up by its coordinates on the slide
    placed = in_system(found, "global")
    classes = in_system(store.labels["classes"], "global")
    for (x, y), row in zip(PLACES, VALUES, strict=True):
        at = {"x": x + 30.5, "y": y + 30.5, "method": "nearest"}
        assert np.allclose(placed.sel(**at).values, row, atol=1e-6)
        assert int(classes.sel(**at)) == 1 + row.argmax()
    at = {"x": 32.5, "y": 100.5, "method": "nearest"}  # no tile
    assert np.isnan(placed.sel(**at).values).all()
    assert int(classes.sel(**at)) == 0
    assert store.images["slide"].shape == (3, *EXTENT)
    from spatialdata import get_extent

    for name in ("slide", "probability"):
        for system, factor in (("global", 1.0), ("microns", MPP)):
            limits = get_extent(store.images[name], coordinate_system=system)
            for axis, length in zip("yx", EXTENT, strict=True):
                assert limits[axis][0] == 0
                assert limits[axis][1] == pytest.approx(factor * length, abs=factor * 8)


def test_regions_of_a_map(tmp_path: Path) -> None:
    slide = write_slide(tmp_path / "a.tiff", *EXTENT)
    size, scale = (40, 50), 2.0
    images = SlideImages(slide, None, [(30, 14)], size, scale)
    given = Input("a", images, size, [(30, 14)], (80.0, 100.0), EXTENT, None, slide, True)
    yes = torch.full(size, 0.1)
    yes[:, 20:] = 0.9
    outcome = SlideOutput(pieces=[MapPiece((0, 0), torch.stack([1 - yes, yes]).double())])
    store = stored(tmp_path, given, outcome, [1], task="segmentation")
    (region,) = store.shapes["regions"].geometry
    assert np.allclose(region.bounds, [30 + 40, 14, 30 + 100, 14 + 80], atol=2)
    table = store.tables["predictions"]
    assert np.allclose(table.X, [[np.nan, 0.9]], atol=1e-6, equal_nan=True)
    assert [*table.obs["class"]] == ["yes"]
    assert store.coordinate_systems == ["global"]  # of a slide without a resolution
    again = replace(outcome)  # a store that is there is replaced, and may have no region
    none = replace(again, pieces=[MapPiece((0, 0), torch.full((2, *size), 0.5).double())])
    store = stored(tmp_path, given, none, [1], task="segmentation")
    assert not store.shapes
    assert set(store.images) == {"slide", "probability"}


def test_the_library_is_asked_for_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spatial_data, "find_spec", lambda name: None)
    (tmp_path / "checkpoint.json").touch()
    words = f"ckpt_path={tmp_path} slides={tmp_path}"
    check_config(composed("predict", words))
    with pytest.raises(
        ValueError, match=r"needs spatialdata: pip install 'spatialdl\[spatialdata\]'"
    ):
        check_config(composed("predict", f"{words} spatialdata=true"))
