"""Slides as bags of tiles: an image source of signals of different lengths.

A bag of N tiles with D values each, features or pixels, is a signal of N positions and D channels.
A tile of C channels, h rows and w columns is a row of C * h * w values, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import NO_LABEL
from spatialdl.data.image_source import Box, Pixels, Size, check_box
from spatialdl.data.shards import ShardDataset
from spatialdl.data.tables import LABEL, SPLIT, SlideTable, TableRow
from spatialdl.data.views import Views

_DRAW = 0x7117  # separates the random draw of tiles from the order of the samples


class Bag(Protocol):
    """The tiles of one slide, such as `FeatureFile` and `TileBag`."""

    @property
    def slide(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def tiles(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]: ...


class PlacedBag(Bag, Protocol):
    """A bag whose tiles have coordinates in the slide.

    Attributes:
        attributes: metadata of the coordinates, such as `patch_size`.
    """

    @property
    def attributes(self) -> Mapping[str, Any]: ...
    def coords(self) -> npt.NDArray[np.int64]: ...


class BagSample(NamedTuple):
    """Metadata of a bag, named as for tiles; a whole slide has no coordinates."""

    slide: str
    split: str | None
    x: int | None = None
    y: int | None = None


class BagSource:
    """Bags of one split; an `ImageSource`.

    Args:
        files: feature files, or other bags, one per slide, all of one width.
        labels: int64 (N,), or float64 (N, targets).
        classes: names of the classes or targets.
        splits: split of each slide.

    Raises:
        ValueError: a slide has no tiles, or there are no slides.
    """

    has_masks = False

    def __init__(
        self,
        files: Sequence[Bag],
        labels: npt.NDArray[Any],
        classes: Sequence[str],
        splits: Sequence[str | None] | None = None,
    ) -> None:
        if not files:
            raise ValueError("no bags: a data set needs at least one slide")
        empty = [file.slide for file in files if file.tiles == 0]
        if empty:
            raise ValueError(f"slides without tiles: {', '.join(empty[:3])}")
        self.files, self.labels, self._classes = list(files), labels, list(classes)
        self._splits = [None] * len(self.files) if splits is None else list(splits)

    @property
    def channels(self) -> int:
        """Values per tile."""
        return self.files[0].width

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes or targets."""
        return self._classes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type to which all features can be cast without loss."""
        return np.result_type(*{file.dtype for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def sample(self, sample: int) -> BagSample:
        """Slide and split of a bag."""
        return BagSample(self.files[sample].slide, self._splits[sample])

    @property
    def tile(self) -> tuple[int, ...] | None:
        """(C, h, w) of a tile of pixels; None for features."""
        return getattr(self.files[0], "tile", None)

    def image_size(self, sample: int) -> Size:
        """(Tiles,) of a bag."""
        return (self.files[sample].tiles,)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """Read the tiles of a box, (tiles, width).

        Raises:
            ValueError: the file is damaged, or a feature is not finite.
        """
        file = self.files[sample]
        start, stop = box or (0, file.tiles)
        check_box((start, stop), (file.tiles,), f"the slide {file.slide}")
        features = file.read(start, stop)
        if not np.isfinite(features).all():
            raise ValueError(f"{file.path} has NaN or Inf features: extract them again")
        return features

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        raise ValueError("bags have no masks")


@dataclass(frozen=True)
class BagViews(Views):
    """Bags as the network sees them: all tiles, or a sample drawn anew each epoch.

    Attributes:
        max_tiles: maximum tiles of a bag; None takes all.
    """

    max_tiles: int | None = None

    @property
    def varies(self) -> bool:
        """True: bags differ in length."""
        return True

    def size_of(self, sample: int) -> Size:
        (tiles,) = self.source.image_size(sample)
        return (tiles if self.max_tiles is None else min(tiles, self.max_tiles),)

    def read(self, epoch: int, sample: int, box: Box) -> Pixels:
        """Tiles of a box of a view, (tiles, width).

        Raises:
            ValueError: the box is not inside.
        """
        size = self.size_of(sample)
        check_box(box, size, "a view")
        if size == self.source.image_size(sample):
            return self.source.read(sample, box)
        start, stop = box
        chosen = self._drawn(epoch, sample)[start:stop]
        if not len(chosen):
            return self.source.read(sample, (0, 0))
        first = int(chosen[0])
        return self.source.read(sample, (first, int(chosen[-1]) + 1))[chosen - first]

    def _drawn(self, epoch: int, sample: int) -> npt.NDArray[np.int64]:
        """Sorted indices of the tiles of a bag that an epoch uses."""
        (tiles,), (wanted,) = self.source.image_size(sample), self.size_of(sample)
        rng = np.random.default_rng([self.seed, epoch, sample, _DRAW])
        return np.sort(rng.choice(tiles, wanted, replace=False))


class TileBag:
    """All tiles of one slide; see `data.bags.Bag`.

    Args:
        slide: name of the slide.
        dataset: data set of the tiles.
        samples: indices of the slide's samples, in order.

    Attributes:
        path: the folder of the data set.
        tile: (C, h, w) of a tile.
        tiles, width: number of tiles, and values per tile.
        dtype: type of the pixels.
    """

    def __init__(self, slide: str, dataset: ShardDataset, samples: Sequence[int]) -> None:
        self.slide, self.samples, self._dataset = slide, list(samples), dataset
        rows, columns = dataset.image_size(self.samples[0])
        self.path, self.dtype = dataset.path, dataset.dtype
        self.tile = (dataset.channels, rows, columns)
        self.tiles, self.width = len(self.samples), prod(self.tile)

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


def open_tile_bags(path: Path, key: str = "data.tiles") -> tuple[list[TileBag], ShardDataset]:
    """Open a data set of tiles; returns its slides, sorted by name, and the data set.

    Args:
        path: its folder.
        key: configuration key of the path, for messages.

    Raises:
        ValueError: it has no tiles, or they have no slide or non-integer pixels.
        ShardError: it is missing or damaged.
    """
    dataset = ShardDataset(path)
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


def labels_of_tiles(bags: Sequence[TileBag], dataset: ShardDataset) -> SlideTable:
    """The common label and split of each slide's tiles, as a table of slides.

    Raises:
        ValueError: tiles of one slide have different ones.
    """
    rows = []
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
        where = f"{bag.path}, slide {bag.slide}"
        rows.append(TableRow(bag.slide, {}, where, (cell,), splits.pop()))
    columns = (LABEL, SPLIT) if any(row.split for row in rows) else (LABEL,)
    return SlideTable(bags[0].path, "slide", columns, tuple(rows), (LABEL,))
