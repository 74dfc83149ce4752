"""Files of one slide from given values; for several ranks see tests/mpi/predicting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting.inputs import Input, SlideImages
from spatialdl.predicting.pieces import MapPiece
from spatialdl.predicting.results import Maps, _thumbnail
from spatialdl.predicting.running import SlideOutput
from tests.predicting.runs import known_network, write_slide

EXTENT, SPAN = (203, 187), (64.0, 64.0)
PLACES = [(0, 0), (64, 0), (96, 64), (16, 128)]
VALUES = np.array([[0.903, 0.097], [0.6, 0.4], [0.251, 0.749], [0.4475, 0.5525]])


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_slide(tmp_path / "a.tiff", *EXTENT)


def tiles_of(slide: Path | None, size: tuple[int, int] = (32, 32)) -> Input:
    """Tiles of 32 x 32 at half the resolution of level 0, which has 0.25 micrometres."""
    images = SlideImages(slide or Path("a.tiff"), 0.25, PLACES, (32, 32), 2.0)
    return Input("a", images, size, PLACES, SPAN, EXTENT, 0.25, slide)


def saved(folder: Path, given: Input, outcome: SlideOutput, **more: Any) -> list[str]:
    trained = known_network(more.pop("classes", ("no", "yes")), **more)
    return Maps(folder, given, trained, range(len(trained.classes)), SingleProcess()).save(outcome)


def grey(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        return page.asarray(), json.loads(page.tags["ImageDescription"].value)


def features(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["features"]


def test_maps_of_tiles_have_their_values_at_their_places(slide, tmp_path):
    kept = [0, 2, 3]  # the tile at (64, 0) could not be read
    outcome = SlideOutput(torch.from_numpy(VALUES[kept]), kept)
    names = saved(tmp_path, tiles_of(slide), outcome)
    assert sorted(names) == ["a-heatmap.png", "a-no.tif", "a-yes.tif", "a.geojson"]
    for number, name in enumerate(("no", "yes")):
        image, told = grey(tmp_path / f"a-{name}.tif")
        expected = np.zeros((26, 24), np.uint8)  # a pixel is 8 of level 0
        for tile in kept:
            x, y = (place // 8 for place in PLACES[tile])
            expected[y : y + 8, x : x + 8] = 1 + round(254 * VALUES[tile, number])
        assert (image == expected).all()
        assert told["class"] == name
        assert (told["not_examined"], told["value_at_1"], told["value_at_255"]) == (0, 0, 1)
        with openslide.OpenSlide(tmp_path / f"a-{name}.tif") as found:
            assert float(found.properties["openslide.mpp-x"]) == pytest.approx(0.25 * 8)
    corners = [one["geometry"]["coordinates"][0][0] for one in features(tmp_path / "a.geojson")]
    assert corners == [list(PLACES[tile]) for tile in kept]


def test_maps_of_activation_lie_in_what_the_network_sees(tmp_path):
    """It covers the centre of a tile; values below 0 become 0."""
    kept, rng = [0, 2, 3], np.random.default_rng(0)
    values = rng.uniform(-3, 6, (4, 2, 8, 4)).astype(np.float32)
    values[1] = 100  # of the tile that could not be read: there was white in its place
    outcome = SlideOutput(torch.from_numpy(VALUES[kept]), kept, activation=values)
    names = saved(tmp_path, tiles_of(None, size=(16, 8)), outcome)
    assert {"a-no-activation.tif", "a-yes-activation.tif", "a-activation.png"} < set(names)
    most = float(values[kept].max())
    for number, name in enumerate(("no", "yes")):
        image, told = grey(tmp_path / f"a-{name}-activation.tif")
        assert (told["value_at_1"], told["value_at_255"]) == (0, pytest.approx(most))
        expected = np.zeros((51, 47), np.uint8)  # a pixel is 4 of level 0
        for tile in kept:  # 32 rows and 16 columns of level 0 in the middle of 64 x 64
            x, y = (PLACES[tile][0] + 24) // 4, (PLACES[tile][1] + 16) // 4
            shares = (values[tile, number].astype(float) / most).clip(0)
            expected[y : y + 8, x : x + 4] = 1 + np.rint(254 * shares)
        assert (image == expected).all()


def test_geojson_tells_where_activation_is_strong(slide, tmp_path):
    values = np.zeros((4, 2, 4, 4), np.float32)
    values[2, 1, :2, 2:] = [[8, 6], [8, 6]]  # in a tile at (96, 64), whose places are of 16
    values[0, 0] = 3.9  # below half of the most
    outcome = SlideOutput(torch.from_numpy(VALUES), range(4), activation=values)
    saved(tmp_path, tiles_of(slide), outcome)
    *tiles, region = features(tmp_path / "a.geojson")
    assert [one["properties"]["objectType"] for one in tiles] == ["tile"] * 4
    assert region["properties"]["objectType"] == "annotation"
    assert region["properties"]["classification"]["name"] == "yes"
    assert region["properties"]["measurements"] == {"activation yes": 7.0}
    corners = np.asarray(region["geometry"]["coordinates"][0])
    assert np.allclose(corners.min(0), [96 + 32, 64], atol=4.1)
    assert np.allclose(corners.max(0), [96 + 64, 64 + 32], atol=4.1)


def test_activation_that_is_nowhere_above_0_is_black(slide, tmp_path):
    outcome = SlideOutput(
        torch.from_numpy(VALUES), range(4), activation=np.full((4, 2, 2, 2), -1.0)
    )
    saved(tmp_path, tiles_of(slide), outcome)
    assert set(grey(tmp_path / "a-yes-activation.tif")[0].flat) == {0, 1}
    assert len(features(tmp_path / "a.geojson")) == 4


def test_a_probability_of_0_is_not_a_place_that_was_not_examined(tmp_path):
    outcome = SlideOutput(torch.tensor([[0.0, 1.0]] * 4, dtype=torch.float64), range(4))
    saved(tmp_path, tiles_of(None), outcome)
    no, yes = (grey(tmp_path / f"a-{name}.tif")[0] for name in ("no", "yes"))
    examined = np.zeros(no.shape, bool)
    for x, y in PLACES:
        examined[y // 8 : y // 8 + 8, x // 8 : x // 8 + 8] = True
    assert (no == examined).all()
    assert (yes == np.where(examined, 255, 0)).all()


def region(slide: Path) -> tuple[Input, torch.Tensor]:
    """(2, rows, columns) of a region at (30, 14): "yes" on its right, "no" on its left."""
    size, scale = (40, 50), 2.0
    images = SlideImages(slide, 0.25, [(30, 14)], size, scale)
    span = size[0] * scale, size[1] * scale
    given = Input("a", images, size, [(30, 14)], span, EXTENT, 0.25, slide, True)
    yes = torch.full(size, 0.1)
    yes[:, 20:] = 0.9
    return given, torch.stack([1 - yes, yes]).double()


@pytest.mark.parametrize("longest", [1600, 52])  # small maps with pixels of 2 x 2
def test_maps_of_pixels_lie_where_the_region_does(longest, slide, tmp_path, monkeypatch):
    monkeypatch.setattr("spatialdl.predicting.results.LONGEST", longest)
    given, values = region(slide)
    outcome = SlideOutput(
        pieces=[MapPiece((0, 0), values[:, :13]), MapPiece((13, 0), values[:, 13:])]
    )
    trained = known_network(("no", "yes"), "segmentation")
    names = Maps(tmp_path, given, trained, [1], SingleProcess()).save(outcome)
    assert sorted(names) == ["a-heatmap.png", "a-yes.tif", "a.geojson"]
    image, _ = grey(tmp_path / "a-yes.tif")
    expected = np.zeros((102, 94), np.uint8)
    expected[7:47, 15:65] = 1 + np.rint(254 * values[1].numpy())
    assert (image == expected).all()
    (found,) = features(tmp_path / "a.geojson")  # "no" is not drawn, but no part of "yes"
    ring = np.array(found["geometry"]["coordinates"][0])
    step = 2 if longest == 1600 else 4
    assert np.allclose(ring.min(0), [30 + 2 * 20, 14], atol=step)
    assert np.allclose(ring.max(0), [30 + 2 * 50, 14 + 2 * 40], atol=step)
    assert found["properties"]["classification"]["name"] == "yes"


def test_classes_have_files_of_their_own_whatever_they_are_called(tmp_path):
    classes = ("a", "A", "a_0", "b/c", "b c", "x" * 50 + "1", "x" * 50 + "2")
    values = torch.arange(7.0).div(17).repeat(4, 1).double()
    names = saved(tmp_path, tiles_of(None), SlideOutput(values, range(4)), classes=classes)
    files = [name for name in names if name.endswith(".tif")]
    assert len({name.casefold() for name in files}) == len(classes)
    found = {told["class"]: image.max() for image, told in map(grey, map(tmp_path.joinpath, files))}
    expected = {name: 1 + round(254 * number / 17) for number, name in enumerate(classes)}
    assert found == expected


def test_there_are_no_maps_where_nobody_knows_how_large_tiles_are(tmp_path):
    images = SlideImages(Path("a.tiff"), None, PLACES, (32, 32), 2.0)
    given = Input("a", images, (32, 32), PLACES, None, None, None)
    assert saved(tmp_path, given, SlideOutput(torch.from_numpy(VALUES), range(4))) == []
    assert list(tmp_path.iterdir()) == []


def test_the_picture_of_a_dark_slide_is_stretched(tmp_path):
    image = np.zeros((*EXTENT, 3), np.uint8)
    image[50:150, 50:150, 2] = 60
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    found = _thumbnail(tiles_of(tmp_path / "a.tiff"))
    assert found.image[100, 100].tolist() == [0, 0, 255]
    assert found.image[20, 20].max() == 0
