from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.bags import BagSource, BagViews
from spatialdl.data.batches import Batch, Batching, BatchReader, PartBox
from spatialdl.data.feature_file import write_features


def bags(folder, lengths=(5, 1, 9)):
    rng = np.random.default_rng(0)
    files = [
        write_features(folder / f"s{n}.h5", rng.random((tiles, 3), np.float32), None)
        for n, tiles in enumerate(lengths)
    ]
    return BagSource(files, np.arange(len(files)), ["a", "b", "c"])


def test_bags_are_signals_of_several_lengths(tmp_path) -> None:
    source = bags(tmp_path)
    assert [source.image_size(n) for n in range(3)] == [(5,), (1,), (9,)]
    assert source.channels == 3
    assert source.read(0, (2, 4)).tolist() == source.read(0)[2:4].tolist()
    assert source.read(1, (1, 1)).shape == (0, 3)
    with pytest.raises(ValueError, match="not inside the slide s1 of 1"):
        source.read(1, (0, 2))


def test_a_rank_reads_its_part_of_each_bag(tmp_path) -> None:
    source = bags(tmp_path)
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


def test_some_tiles_are_drawn_anew_each_epoch(tmp_path) -> None:
    source = bags(tmp_path)
    views = BagViews(source, (9,), seed=3, max_tiles=4)
    assert views.size_of(2) == (4,)
    assert views.size_of(1) == (1,)
    drawn = [views.read(epoch, 2, (0, 4)).tolist() for epoch in range(4)]
    rows = source.read(2).tolist()
    for one in drawn:
        places = [rows.index(row) for row in one]
        assert places == sorted(set(places))
    assert len({str(one) for one in drawn}) > 1
    assert views.read(1, 2, (1, 3)).tolist() == drawn[1][1:3]
    assert views.read(1, 2, (2, 2)).shape == (0, 3)


def test_what_is_no_bag_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="without tiles: s1"):
        bags(tmp_path, (2, 0))
    with pytest.raises(ValueError, match="at least one slide"):
        BagSource([], np.zeros(0), [])
    broken = np.array([[1.0, np.nan]])
    source = BagSource([write_features(tmp_path / "n.h5", broken, None)], np.zeros(1), ["a"])
    with pytest.raises(ValueError, match=r"n\.h5 has NaN or Inf features"):
        source.read(0)
