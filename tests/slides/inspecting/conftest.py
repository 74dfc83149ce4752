"""A data set that the tests look into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data.writer import ShardWriter


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """Seven tiles of two slides and two classes, in three shards."""
    path = tmp_path / "set"
    rng = np.random.default_rng(0)
    made = {"tile_size": 16, "mag": None, "labels": "a.csv"}
    with ShardWriter(path, ["no", "yes"], mpp=0.5, shard_size=2400, made_with=made) as writer:
        for k in range(7):
            image = rng.integers(0, 256, (16, 16, 3), np.uint8)
            label, split = (k % 2, "train") if k < 5 else (None, "val")
            writer.add(image, label, split, slide=f"s{k // 4}", xy=(16 * k, 0))
    return path
