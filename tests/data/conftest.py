from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spatialdl.data import ShardWriter


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """Six shards of two tiles; the last one holds those to validate on."""
    folder = tmp_path_factory.mktemp("written") / "set"
    tiles = np.random.default_rng(0).integers(0, 256, (12, 90, 70, 3), np.uint8)
    with ShardWriter(folder, ("a", "b"), shard_size=2 * 90 * 70 * 3) as writer:
        for number, tile in enumerate(tiles):
            split = "train" if number < 10 else "val"
            writer.add(tile, number % 2, split, slide=f"slide-{number // 4}")
    return folder
