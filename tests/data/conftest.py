from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data import ShardWriter

RANDOM = np.random.default_rng(0)


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


@pytest.fixture
def h5(tmp_path: Path) -> Iterator[h5py.File]:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        yield file


def picture(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    """Smooth colours with some noise."""
    slope = np.add.outer(np.arange(rows) * 2, np.arange(cols))[..., None] // 2 % 200
    return (slope + RANDOM.integers(0, 40, (rows, cols, channels))).astype(np.uint8)


def noise(rows: int, cols: int, channels: int = 3) -> np.ndarray:
    return RANDOM.integers(0, 256, (rows, cols, channels), np.uint8)


def flip(path: Path, at: int | None = None) -> None:
    """Flip a bit, in the middle of the file unless told where."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)
