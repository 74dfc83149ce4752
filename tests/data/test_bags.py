"""Bags: slides as features or pixels of their tiles, in files of features or shards of tiles."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.bags import BagSource, BagViews
from spatialdl.data.batches import Batch, Batching, BatchReader, PartBox
from spatialdl.data.feature_file import FeatureFile, list_features, write_features
from spatialdl.data.tile_bags import labels_of_tiles, open_tile_bags
from tests.bags import LENGTHS, TILE, write_tile_bags


def features_of(tiles: int, width: int = 5, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(tiles).standard_normal((tiles, width)).astype(dtype)


def bags(folder: Path, lengths=(5, 1, 9)) -> BagSource:
    files = [
        write_features(folder / f"s{n}.h5", features_of(tiles, 3, "float32"), None)
        for n, tiles in enumerate(lengths)
    ]
    return BagSource(files, np.arange(len(files)), ["a", "b", "c"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_come_back_as_they_were_written(tmp_path: Path, dtype: str) -> None:
    features, coords = features_of(7, dtype=dtype), np.arange(14).reshape(7, 2)
    path = tmp_path / "h5" / "slide 1.h5"
    file = write_features(path, features, coords, {"patch_size": 256}, {"encoder": "net"})
    assert (file.slide, file.tiles, file.width, file.dtype) == ("slide 1", 7, 5, dtype)
    assert file.attributes["patch_size"] == 256
    np.testing.assert_array_equal(file.read(), features)
    np.testing.assert_array_equal(file.read(2, 4), features[2:4])
    np.testing.assert_array_equal(file.coords(), coords)
    assert [one.name for one in path.parent.iterdir()] == ["slide 1.h5"]  # nothing temporary
    with h5py.File(tmp_path / "leading.h5", "w") as h5:
        h5["features"] = features[None]
    file = FeatureFile.open(tmp_path / "leading.h5")
    assert (file.tiles, file.width, file.has_coords) == (7, 5, False)
    np.testing.assert_array_equal(file.read(1), features[1:])
    with pytest.raises(ValueError, match="tile coordinates are unknown"):
        file.coords()
    file = write_features(tmp_path / "none.h5", features_of(0), np.zeros((0, 2), np.int64))
    assert (file.tiles, file.read().shape) == (0, (0, 5))


def test_what_is_no_table_of_features_is_refused(tmp_path: Path) -> None:
    for features, coords, message in [
        (np.zeros((2, 3, 4)), None, "shape"),
        (np.zeros((2, 3), int), None, "floats"),
        (np.zeros((2, 3)), np.zeros((3, 2), int), "expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_features(tmp_path / "a.h5", features, coords)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.h5").write_text("no HDF5")
    with h5py.File(tmp_path / "coords.h5", "w") as h5:
        h5["coords"] = np.zeros((2, 2), int)
    with h5py.File(tmp_path / "apart.h5", "w") as h5:
        h5["features"], h5["coords"] = np.zeros((3, 2)), np.zeros((2, 2), int)
    for name in ("text", "coords", "apart", "missing"):
        with pytest.raises(ValueError, match=f"{name}.h5 has no readable features"):
            FeatureFile.open(tmp_path / f"{name}.h5")


def test_folders_are_listed_by_slide(tmp_path: Path) -> None:
    for name in ("out/h5/b", "out/h5/a", "c"):
        write_features(tmp_path / f"{name}.h5", features_of(2), None)
    write_features(tmp_path / "d.h5", features_of(2, width=6), None)
    out = tmp_path / "out"
    assert [one.slide for one in list_features([tmp_path / "c.h5", out])] == ["a", "b", "c"]
    (tmp_path / "empty").mkdir()
    for paths, message in [
        ([out, out / "h5" / "a.h5"], "have the same slide name"),
        ([out, tmp_path / "d.h5"], "must come from one encoder"),
        ([tmp_path / "empty"], "no feature files"),
    ]:
        with pytest.raises(ValueError, match=message):
            list_features(paths)


def test_a_rank_reads_its_part_of_each_bag(tmp_path: Path) -> None:
    source = bags(tmp_path)
    assert [source.image_size(n) for n in range(3)] == [(5,), (1,), (9,)]
    assert source.channels == 3
    assert source.read(0, (2, 4)).tolist() == source.read(0)[2:4].tolist()
    assert source.read(1, (1, 1)).shape == (0, 3)
    with pytest.raises(ValueError, match="not inside the slide s1 of 1"):
        source.read(1, (0, 2))
    views = BagViews(source, (9,))
    parts = []
    for part in range(2):
        boxes = [PartBox((2,), part)] * 3
        reader = BatchReader(views, Batching(3, 1, 0, boxes, [None] * 3))
        parts.append(reader.read(Batch(0, np.array([2, 0, 1]))))
    for number, sample in enumerate((2, 0, 1)):
        both = [slices[number].tiles[0].numpy() for slices in parts]
        assert np.concatenate(both).tolist() == source.read(sample).tolist()
        assert parts[0][number].size == source.image_size(sample)
        assert parts[0][number].place == number
    assert [len(one.tiles[0]) for one in parts[0]] == [4, 2, 0]  # none of a bag of one tile


def test_some_tiles_are_drawn_anew_each_epoch(tmp_path: Path) -> None:
    source = bags(tmp_path)
    views = BagViews(source, (9,), seed=3, max_tiles=4)
    assert (views.size_of(2), views.size_of(1)) == ((4,), (1,))
    drawn = [views.read(epoch, 2, (0, 4)).tolist() for epoch in range(4)]
    rows = source.read(2).tolist()
    for one in drawn:
        places = [rows.index(row) for row in one]
        assert places == sorted(set(places))
    assert len({str(one) for one in drawn}) > 1
    assert views.read(1, 2, (1, 3)).tolist() == drawn[1][1:3]
    assert views.read(1, 2, (2, 2)).shape == (0, 3)


def test_what_is_no_bag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without tiles: s1"):
        bags(tmp_path, (2, 0))
    with pytest.raises(ValueError, match="at least one slide"):
        BagSource([], np.zeros(0), [])
    broken = write_features(tmp_path / "n.h5", np.array([[1.0, np.nan]]), None)
    with pytest.raises(ValueError, match=r"n\.h5 has NaN or Inf features"):
        BagSource([broken], np.zeros(1), ["a"]).read(0)


def test_a_bag_of_pixels_has_the_tiles_of_its_slide_in_order(tmp_path: Path) -> None:
    folder = write_tile_bags(tmp_path) / "tiles"
    found, classes = open_tile_bags(folder)
    assert [bag.tiles for bag in found] == list(LENGTHS)
    dataset, bag = ShardDataset(folder), found[2]
    own = [n for n in range(len(dataset)) if dataset.sample(n).slide == "s2"]
    expected = np.stack([dataset.read(n).transpose(2, 0, 1) for n in own])
    assert (bag.tile, bag.width) == (TILE, expected[0].size)
    np.testing.assert_array_equal(bag.read().reshape(expected.shape), expected)
    np.testing.assert_array_equal(bag.read(4, 9), bag.read()[4:9])
    assert bag.read(3, 3).shape == (0, bag.width)
    assert bag.coords()[:3].tolist() == [[0, 0], [8, 0], [16, 0]]
    table = labels_of_tiles(found, classes)
    assert table.has_split
    assert [row.cells for row in table.rows.values()][:4] == [("a",), ("b",), ("c",), ("a",)]
    assert [row.split for row in table.rows.values()].count("val") == 3


@pytest.mark.parametrize(
    ("tiles", "dtype", "said"),
    [
        (
            [{"slide": "s", "label": 0}, {"slide": "s", "label": 1}],
            "uint8",
            r"s .* different label",
        ),
        ([{"slide": "s"}, {}], "uint8", r"1 of 2 tiles .* have no slide name"),
        ([{"slide": "s"}], "float32", "has float32 pixels"),
    ],
)
def test_tiles_that_make_no_bags_are_refused(tmp_path: Path, tiles, dtype: str, said: str) -> None:
    with ShardWriter(tmp_path / "own", classes=["a", "b"]) as writer:
        for known in tiles:
            writer.add(np.zeros((4, 4, 3), dtype), **known)
    with pytest.raises(ValueError, match=said):
        labels_of_tiles(*open_tile_bags(tmp_path / "own"))
