"""Slides as bags of tiles: an image source of signals of different lengths.

A bag of N tiles with D values each, features or pixels, is a signal of N positions and D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.data.image_source import Box, Pixels, Size, check_box
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
