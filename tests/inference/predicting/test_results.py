"""Files of one slide from given values; for several ranks see tests/mpi/predicting."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import torch

from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import SlideError
from spatialdl.inference.predicting import checks, maps
from spatialdl.inference.predicting.bags import BagPlaces, save_bag_maps
from spatialdl.inference.predicting.checks import check_config
from spatialdl.inference.predicting.inputs import Input, SlideImages
from spatialdl.inference.predicting.maps import MapClasses, MapFolder, save_maps
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.inference.predicting.polygons import region_features, save_geojson, tile_features
from spatialdl.inference.predicting.running import SlideOutput
from spatialdl.slides.finding.annotations import read_annotations
from spatialdl.slides.reading.reader import Slide
from tests.composing import composed
from tests.inference.predicting.runs import write_slide
from tests.slides.tiled_tiffs import write_scn

EXTENT, SPAN = (203, 187), (64.0, 64.0)
PLACES = [(0, 0), (64, 0), (96, 64), (16, 128)]
VALUES = np.array([[0.903, 0.097], [0.6, 0.4], [0.251, 0.749], [0.4475, 0.5525]])


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch) -> None:
    """Pictures are drawn in the first test only, as that takes long."""
    if "values_at_their_places" not in request.node.name:
        monkeypatch.setattr(maps, "save_overlay", lambda path, *_: path.touch())


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_slide(tmp_path / "a.tiff", *EXTENT)


def tiles_of(slide: Path | None, size: tuple[int, int] = (32, 32)) -> Input:
    """Tiles of 32 x 32 at half the resolution of level 0, which has 0.25 micrometres."""
    images = SlideImages(slide or Path("a.tiff"), 0.25, PLACES, (32, 32), 2.0)
    return Input("a", images, size, PLACES, SPAN, EXTENT, 0.25, slide)


def saved(
    folder: Path,
    given: Input,
    outcome: SlideOutput,
    shown: Sequence[int] = (0, 1),
    task: str = "classification",
    classes: Sequence[str] = ("no", "yes"),
    **more: Any,
) -> list[str]:
    where = MapFolder(folder, "a")
    found = MapClasses(task, classes, shown)
    save_maps(where, given, outcome, found, SingleProcess(), **more)
    return where.files


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


def test_maps_count_from_where_qupath_does(tmp_path):
    """It shows the scanned part of a slide; maps and polygons lay beside it by its offset."""
    size, start = (640, 512), np.array((96, 128))
    pixels = np.random.default_rng(0).integers(0, 255, (192, 256, 3), np.uint8)
    slide = write_scn(tmp_path / "a.scn", pixels, size, (96, 128))
    places = [(96, 128), (160, 128), (224, 192), (160, 256)]
    images = SlideImages(slide, 0.5, places, (32, 32), 2.0)
    given = Input("a", images, (32, 32), places, SPAN, size, 0.5, slide)
    saved(tmp_path, given, SlideOutput(torch.from_numpy(VALUES), range(4)))
    expected = np.zeros((24, 32), np.uint8)
    for (x, y), (_, value) in zip((np.array(places) - start) // 8, VALUES, strict=True):
        expected[y : y + 8, x : x + 8] = 1 + round(254 * value)
    assert (grey(tmp_path / "a-yes.tif")[0] == expected).all()
    corners = [one["geometry"]["coordinates"][0][0] for one in features(tmp_path / "a.geojson")]
    assert corners == (np.array(places) - start).tolist()

    values = torch.zeros(2, 320, 256, dtype=torch.float64)
    values[0], values[1, 96:128, 80:112] = 0.5, 1  # at (160, 192), 64 x 64 of level 0
    whole = Input("a", images, (320, 256), [(0, 0)], size, size, 0.5, slide, True)
    saved(tmp_path, whole, SlideOutput(pieces=[MapPiece((0, 0), values)]), task="segmentation")
    image = grey(tmp_path / "a-yes.tif")[0]
    assert image.shape == (96, 128)
    assert (image[32:64, 32:64] == 255).all()
    assert (image == 255).sum() == 32 * 32
    with Slide(slide) as opened:
        rings = [one.moved(opened.scanned[:2]) for one in read_annotations(tmp_path / "a.geojson")]
        bag = BagPlaces(np.array(places), 64.0, size)
        save_bag_maps(MapFolder(tmp_path, "b"), VALUES[:, 0], bag, opened, "attention")
    yes = next(one.outline for one in rings if one.label == "yes")
    assert np.allclose((yes.min(0), yes.max(0)), ((160, 192), (224, 256)), atol=3)
    of_bag = [one["geometry"]["coordinates"][0][0] for one in features(tmp_path / "b.geojson")]
    assert of_bag == corners
    assert grey(tmp_path / "b-attention.tif")[0].shape == (24, 32)


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


def test_there_are_no_maps_where_nobody_knows_how_large_tiles_are(tmp_path):
    images = SlideImages(Path("a.tiff"), None, PLACES, (32, 32), 2.0)
    given = Input("a", images, (32, 32), PLACES, None, None, None)
    assert saved(tmp_path, given, SlideOutput(torch.from_numpy(VALUES), range(4))) == []
    assert list(tmp_path.iterdir()) == []


def test_activation_that_is_nowhere_above_0_is_black(slide, tmp_path):
    outcome = SlideOutput(
        torch.from_numpy(VALUES), range(4), activation=np.full((4, 2, 2, 2), -1.0)
    )
    saved(tmp_path, tiles_of(slide), outcome)
    assert set(grey(tmp_path / "a-yes-activation.tif")[0].flat) == {0, 1}
    assert len(features(tmp_path / "a.geojson")) == 4


def region(slide: Path, mpp: float | None = 0.25) -> tuple[Input, torch.Tensor]:
    """(2, rows, columns) of a region at (30, 14): "yes" on its right, "no" on its left."""
    size, scale = (40, 50), 2.0
    images = SlideImages(slide, mpp, [(30, 14)], size, scale)
    span = size[0] * scale, size[1] * scale
    given = Input("a", images, size, [(30, 14)], span, EXTENT, mpp, slide, True)
    yes = torch.full(size, 0.1)
    yes[:, 20:] = 0.9
    return given, torch.stack([1 - yes, yes]).double()


@pytest.mark.parametrize("longest", [1600, 52])  # small maps with pixels of 2 x 2
def test_maps_of_pixels_lie_where_the_region_does(longest, slide, tmp_path, monkeypatch):
    monkeypatch.setattr("spatialdl.inference.predicting.maps.LONGEST", longest)
    given, values = region(slide)
    outcome = SlideOutput(
        pieces=[MapPiece((0, 0), values[:, :13]), MapPiece((13, 0), values[:, 13:])]
    )
    names = saved(tmp_path, given, outcome, [1], "segmentation")
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
    names = saved(
        tmp_path, tiles_of(None), SlideOutput(values, range(4)), range(7), classes=classes
    )
    files = [name for name in names if name.endswith(".tif")]
    assert len({name.casefold() for name in files}) == len(classes)
    found = {told["class"]: image.max() for image, told in map(grey, map(tmp_path.joinpath, files))}
    expected = {name: 1 + round(254 * number / 17) for number, name in enumerate(classes)}
    assert found == expected


# --- SpatialData stores, read back by the library: elements and coordinate systems


def stored(folder: Path, given: Input, outcome: SlideOutput, *more: Any) -> Any:
    """The written store, opened."""
    spatialdata = pytest.importorskip("spatialdata", reason="pip install 'spatialdl[spatialdata]'")
    names = saved(folder, given, outcome, *more, store=True)
    assert all((folder / name).is_file() for name in names)
    assert not [*folder.glob(".*.tmp")]
    return spatialdata.read_zarr(folder / "a.zarr")


def in_system(element: Any, system: str) -> Any:
    from spatialdata import transform

    return transform(element, to_coordinate_system=system)


def test_tiles_maps_and_picture_lie_at_their_places_in_pixels_and_micrometres(
    slide: Path, tmp_path: Path
) -> None:
    store = stored(tmp_path, tiles_of(slide), SlideOutput(torch.from_numpy(VALUES), range(4)))
    features = json.loads((tmp_path / "a.geojson").read_text())["features"]
    for system, factor in (("global", 1.0), ("microns", 0.25)):
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
        for system, factor in (("global", 1.0), ("microns", 0.25)):
            limits = get_extent(store.images[name], coordinate_system=system)
            for axis, length in zip("yx", EXTENT, strict=True):
                assert limits[axis][0] == 0
                assert limits[axis][1] == pytest.approx(factor * length, abs=factor * 8)


def test_regions_of_a_map(slide: Path, tmp_path: Path) -> None:
    given, values = region(slide, None)
    outcome = SlideOutput(pieces=[MapPiece((0, 0), values)])
    store = stored(tmp_path, given, outcome, [1], "segmentation")
    (one,) = store.shapes["regions"].geometry
    assert np.allclose(one.bounds, [30 + 40, 14, 30 + 100, 14 + 80], atol=2)
    table = store.tables["predictions"]
    assert np.allclose(table.X, [[np.nan, 0.9]], atol=1e-6, equal_nan=True)
    assert [*table.obs["class"]] == ["yes"]
    assert store.coordinate_systems == ["global"]  # of a slide without a resolution
    # a store that is there is replaced, and may have no region
    none = SlideOutput(pieces=[MapPiece((0, 0), torch.full((2, 40, 50), 0.5).double())])
    store = stored(tmp_path, given, none, [1], "segmentation")
    assert not store.shapes
    assert set(store.images) == {"slide", "probability"}


def test_the_library_is_asked_for_before_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (tmp_path / "checkpoint.json").touch()
    words = f"ckpt_path={tmp_path} slides={tmp_path}"
    check_config(composed("predict", *words.split()))
    with pytest.raises(
        ValueError, match=r"needs spatialdata: pip install 'spatialdl\[spatialdata\]'"
    ):
        check_config(composed("predict", *f"{words} spatialdata=true".split()))


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


@pytest.mark.parametrize("ending", ["geojson", "geojson.gz"])
def test_what_fails_leaves_no_file(ending, tmp_path):
    def broken():
        yield {"type": "Feature"}
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        save_geojson(tmp_path / f"a.{ending}", broken())
    assert not list(tmp_path.iterdir())
    save_geojson(tmp_path / f"a.{ending}", [{"type": "Feature"}])
    opened = gzip.open if ending.endswith("gz") else open
    with opened(tmp_path / f"a.{ending}") as file:
        assert json.load(file)["features"] == [{"type": "Feature"}]
