from __future__ import annotations

import pytest

from spatialdl.data.format import Manifest
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.data.staging.samples import of_splits, samples_in

SHARDS = [ShardInfo(f"shard-{n:05d}.h5", 9, "0" * 64, 2) for n in range(3)]


def region(number: int, split: str, *shards: int) -> RegionSample:
    bands = tuple(RegionBand(shard, 4 * n, 4) for n, shard in enumerate(shards))
    height = 4 * len(shards)
    return RegionSample(
        f"{number:06d}", height, 9, None, True, bands, None, split, f"s{number}", 0, 0
    )


STRIPED = Manifest("regions", [], 3, shards=SHARDS)
STRIPED.samples = [region(0, "train", 0, 1), region(1, "val", 2, 1), region(2, "train", 1, 0)]


def test_samples_of_a_shard_are_named(dataset):
    assert samples_in(dataset.manifest, 1) == "samples 2, 3 (of slide-0)"
    assert samples_in(dataset.manifest, 3) == "samples 6, 7 (of slide-1)"
    assert samples_in(STRIPED, 2) == "sample 1 (of s1)"
    assert samples_in(STRIPED, 1) == "samples 0, 1, 2 (of s0, s1, s2)"
    many = Manifest("regions", [], 3, shards=SHARDS)
    many.samples = [region(n, "train", 0) for n in range(5)]
    assert samples_in(many, 0) == "samples 0, 1, 2 and 2 more (of s0, s1, s2, ...)"
    assert samples_in(many, 1) == "no samples"


def test_splits_take_their_shards_with_them(dataset):
    val = of_splits(dataset.manifest, ["val"])
    assert val.shards == dataset.manifest.shards[5:]
    assert [(sample.shard, sample.index) for sample in val.samples] == [(0, 0), (0, 1)]
    assert of_splits(dataset.manifest, ["val", "train"]) == dataset.manifest
    striped = of_splits(STRIPED, ["val"])
    assert striped.shards == SHARDS[1:]
    assert [band.shard for band in striped.samples[0].bands] == [1, 0]
    with pytest.raises(ValueError, match="has no split 'test'; its splits: train, val"):
        of_splits(STRIPED, ["test"])
