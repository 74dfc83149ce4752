"""Slides as bags of tile pixels, from a data set folder of tiles.

A tile of C channels, h rows and w columns is a row of C * h * w values, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.bag_labels import BagLabels, SlideRow
from spatialdl.data.format import NO_LABEL
from spatialdl.data.raw_reading import Io
from spatialdl.data.shards import ShardDataset


class TileBag:
    """All tiles of one slide; see `data.bags.Bag`.

    Args:
        slide: name of the slide.
        dataset: data set of the tiles.
        samples: indices of the slide's samples, in order.

    Attributes:
        tile: (C, h, w) of a tile.
    """

    def __init__(self, slide: str, dataset: ShardDataset, samples: Sequence[int]) -> None:
        self.slide, self.samples, self._dataset = slide, list(samples), dataset
        rows, columns = dataset.image_size(self.samples[0])
        self.tile = (dataset.channels, rows, columns)

    @property
    def path(self) -> Path:
        """The folder of the data set."""
        return self._dataset.path

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return len(self.samples)

    @property
    def width(self) -> int:
        """Values per tile."""
        return prod(self.tile)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels."""
        return self._dataset.dtype

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Empty: unlike for `FeatureFile`, the tile size follows from the coordinates."""
        return {}

    def coords(self) -> npt.NDArray[np.int64]:
        """(tiles, 2): level-0 x and y of each tile's top left corner."""
        found = (self._dataset.sample(number) for number in self.samples)
        return np.array([(one.x, one.y) for one in found], np.int64)

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Tiles [start, stop), (tiles, width).

        Raises:
            ShardError: a shard is missing or damaged.
        """
        wanted = self.samples[start : self.tiles if stop is None else stop]
        found = np.empty((len(wanted), *self.tile), self.dtype)
        for tile, sample in zip(found, wanted, strict=True):
            tile[...] = self._dataset.read(sample).transpose(2, 0, 1)
        return found.reshape(len(wanted), self.width)


def open_tile_bags(
    path: Path, io: Io = "auto", key: str = "data.tiles"
) -> tuple[list[TileBag], ShardDataset]:
    """Open a data set of tiles; returns its slides, sorted by name, and the data set.

    Args:
        path: its folder.
        io: see `ShardDataset`.
        key: configuration key of the path, for messages.

    Raises:
        ValueError: it has no tiles, or they have no slide or non-integer pixels.
        ShardError: it is missing or damaged.
    """
    dataset = ShardDataset(path, io=io)
    if dataset.kind != "tiles":
        raise ValueError(
            f"{key}={path} is a data set of {dataset.kind}, not of tiles of one size: write "
            "one with spatialdl-tile without --whole"
        )
    if dataset.dtype.kind != "u":
        raise ValueError(f"{key}={path} has {dataset.dtype} pixels: use uint8 or uint16")
    of: dict[str, list[int]] = {}
    for number in range(len(dataset)):
        of.setdefault(dataset.sample(number).slide, []).append(number)
    if not of:
        raise ValueError(f"{key}={path} has no tiles: nothing to train on")
    if "" in of:
        raise ValueError(
            f"{len(of[''])} of {len(dataset)} tiles of {key}={path} have no slide name: write "
            "them with spatialdl-tile, or ShardWriter.add(..., slide=NAME)"
        )
    return [TileBag(slide, dataset, of[slide]) for slide in sorted(of)], dataset


def labels_of_tiles(bags: Sequence[TileBag], dataset: ShardDataset) -> BagLabels:
    """The common label and split of each slide's tiles, as a table of slides.

    Raises:
        ValueError: tiles of one slide have different ones.
    """
    rows = {}
    for bag in bags:
        splits = {dataset.sample(n).split for n in bag.samples}
        labels = {int(dataset.labels[n]) for n in bag.samples}
        if len(labels) > 1 or len(splits) > 1:
            what = "labels" if len(labels) > 1 else "splits"
            raise ValueError(
                f"tiles of the slide {bag.slide} in {bag.path} have different {what}: give a table "
                "of slides with data.labels=FILE.csv"
            )
        label = labels.pop()
        cell = "" if label == NO_LABEL else dataset.classes[label]
        rows[bag.slide] = SlideRow((cell,), splits.pop(), None, f"{bag.path}, slide {bag.slide}")
    return BagLabels(bags[0].path, ("label",), rows, any(row.split for row in rows.values()))
