"""Small data sets of bags, of lengths that no number of ranks divides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch import nn

from spatialdl.data import ShardWriter
from spatialdl.data.feature_file import write_features
from tests.composing import composed

LENGTHS = (5, 1, 17, 2, 8, 3, 31, 4, 11)
WIDTH = 6
TABLE = "slide_id,label,split,er,pr,time,event"


def write_bags(folder: Path, lengths: Sequence[int] = LENGTHS, val: int = 3) -> Path:
    """Features of slides s0, s1 ... and `labels.csv`; the last ones are to validate on."""
    rng = np.random.default_rng(0)
    rows = [TABLE]
    for number, tiles in enumerate(lengths):
        features = rng.normal(size=(tiles, WIDTH)) + (number % 3)
        places = np.stack([np.arange(tiles) % 4, np.arange(tiles) // 4], 1) * 256
        write_features(folder / f"s{number}.h5", features, places, {"patch_size": 256})
        split = "val" if number >= len(lengths) - val else "train"
        unknown = "" if number % 4 == 1 else number % 2
        time = f"{1 + number % 5 + number / 10},{int(number % 3 > 0)}"
        rows.append(f"s{number}.svs,{'abc'[number % 3]},{split},{number % 2},{unknown},{time}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def bag_config(folder: Path, *words: str) -> DictConfig:
    """A training run on such bags."""
    return composed(
        *("train", "data=bags", "model=abmil", "optimizer=adamw", f"data.features={folder}"),
        *(f"data.labels={folder / 'labels.csv'}", "trainer.precision=float64"),
        *("trainer.max_epochs=3", *words),
    )


SMALL = {
    "abmil": ("model=abmil", "model.width=8", "model.hidden=4"),
    "clam": ("model=clam", "model.width=8", "model.hidden=4", "model.instances=3"),
    "mean": ("model=bag_pooling", "model.width=8", "model.dropout=0.5"),
    "max": ("model=bag_pooling", "model.width=8", "model.pool=max"),
    "transmil": ("model=transmil", "model.width=8", "model.heads=2", "model.landmarks=4"),
    "transformer": ("model=bag_transformer", "model.width=12", "model.heads=3"),
}


# --- bags of pixels

TILE = (2, 7, 6)


def write_tile_bags(
    folder: Path, lengths: Sequence[int] = LENGTHS, val: int = 3, dtype: str = "uint8"
) -> Path:
    """A data set of tiles of such slides, which lie in turns, and `labels.csv`."""
    rng = np.random.default_rng(1)
    rows = [TABLE]
    with ShardWriter(folder / "tiles", classes=["a", "b", "c"]) as writer:
        for turn in range(max(lengths)):
            for number, tiles in enumerate(lengths):
                if turn < tiles:
                    image = rng.integers(0, 200, (*TILE[1:], TILE[0])) + 20 * (number % 3)
                    split = "val" if number >= len(lengths) - val else "train"
                    known: dict[str, Any] = {"label": number % 3, "split": split}
                    writer.add(image.astype(dtype), xy=(turn * 8, 0), slide=f"s{number}", **known)
    for number in range(len(lengths)):
        split = "val" if number >= len(lengths) - val else "train"
        time = f"{1 + number % 5 + number / 10},{int(number % 3 > 0)}"
        rows.append(f"s{number}.svs,{'abc'[number % 3]},{split},{number % 2},1,{time}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def random_encoder(in_channels: int = 3, num_classes: int = 5) -> nn.Module:
    """Draws in training: whole channels, and numbers of features."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, num_classes, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
    )


def tile_config(folder: Path, *words: str) -> DictConfig:
    """A training run on such bags of pixels."""
    return composed(
        *("train", "data=tile_bags", "model=end_to_end", "optimizer=adamw"),
        *(f"data.tiles={folder / 'tiles'}", "model.encoder.num_classes=5"),
        "model.encoder._target_=tests.bags.random_encoder",
        *("trainer.precision=float64", "trainer.max_epochs=3", *words),
    )
