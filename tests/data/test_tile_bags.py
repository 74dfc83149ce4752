"""Slides as bags of the pixels of their tiles, out of a data set of tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.tile_bags import labels_of_tiles, open_tile_bags
from tests.bags import LENGTHS, TILE, write_tile_bags


def test_a_bag_has_the_tiles_of_its_slide_in_order(tmp_path: Path) -> None:
    folder = write_tile_bags(tmp_path) / "tiles"
    bags, _ = open_tile_bags(folder)
    assert [bag.tiles for bag in bags] == list(LENGTHS)
    dataset = ShardDataset(folder)
    own = [n for n in range(len(dataset)) if dataset.sample(n).slide == "s2"]
    expected = np.stack([dataset.read(n).transpose(2, 0, 1) for n in own])
    assert bags[2].tile == TILE
    assert bags[2].width == expected[0].size
    np.testing.assert_array_equal(bags[2].read().reshape(expected.shape), expected)
    np.testing.assert_array_equal(bags[2].read(4, 9), bags[2].read()[4:9])
    assert bags[2].read(3, 3).shape == (0, bags[2].width)
    assert bags[2].coords()[:3].tolist() == [[0, 0], [8, 0], [16, 0]]


def test_labels_and_splits_of_tiles_are_those_of_slides(tmp_path: Path) -> None:
    table = labels_of_tiles(*open_tile_bags(write_tile_bags(tmp_path) / "tiles"))
    assert table.has_split
    assert [row.cells for row in table.rows.values()][:4] == [("a",), ("b",), ("c",), ("a",)]
    assert [row.split for row in table.rows.values()].count("val") == 3


def written(folder: Path, *tiles: dict[str, object], dtype: str = "uint8") -> Path:
    with ShardWriter(folder / "own", classes=["a", "b"]) as writer:
        for known in tiles:
            writer.add(np.zeros((4, 4, 3), dtype), **known)  # type: ignore[arg-type]
    return folder / "own"


def test_tiles_of_one_slide_with_several_labels_are_refused(tmp_path: Path) -> None:
    own = written(tmp_path, {"slide": "s", "label": 0}, {"slide": "s", "label": 1})
    with pytest.raises(ValueError, match=r"slide s .* different labels.*data.labels=FILE.csv"):
        labels_of_tiles(*open_tile_bags(own))


def test_tiles_of_no_slide_and_floats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 of 2 tiles .* have no slide name"):
        open_tile_bags(written(tmp_path, {"slide": "s"}, {}))
    with pytest.raises(ValueError, match="has float32 pixels"):
        open_tile_bags(written(tmp_path / "floats", {"slide": "s"}, dtype="float32"))
