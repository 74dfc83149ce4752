"""Slides as bags of tiles: an image source whose images are signals of several lengths.

A bag of N tiles with D numbers each, features or pixels, is a signal of N positions and D channels.
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

_DRAW = 0x7117  # keeps the draw of tiles apart from the order of the samples


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
    """One whose tiles lie somewhere in the slide.

    Attributes:
        attributes: what is known of the positions, such as `patch_size`.
    """

    @property
    def attributes(self) -> Mapping[str, Any]: ...
    def coords(self) -> npt.NDArray[np.int64]: ...


class BagSample(NamedTuple):
    """What is known of a bag, under the names of tiles: the whole slide has no place in itself."""

    slide: str
    split: str | None
    x: int | None = None
    y: int | None = None


class BagSource:
    """Bags of one split; see `ImageSource`.

    Args:
        files: of features, or other bags, one a slide, all of one width.
        labels: int64 (N,), or float64 (N, targets).
        classes: names of the classes or targets.
        splits: of each slide.

    Raises:
        ValueError: a slide has no tiles, or there is none.
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
            raise ValueError("there are no bags: a data set needs at least one slide")
        empty = [file.slide for file in files if file.tiles == 0]
        if empty:
            raise ValueError(f"slides without tiles are no bags: {', '.join(empty[:3])}")
        self.files, self.labels, self._classes = list(files), labels, list(classes)
        self._splits = [None] * len(self.files) if splits is None else list(splits)

    @property
    def channels(self) -> int:
        """Numbers of a tile."""
        return self.files[0].width

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes or targets."""
        return self._classes

    @property
    def dtype(self) -> np.dtype[Any]:
        """To which all features can be cast without loss."""
        return np.result_type(*{file.dtype for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def sample(self, sample: int) -> BagSample:
        """Slide and split of a bag."""
        return BagSample(self.files[sample].slide, self._splits[sample])

    @property
    def tile(self) -> tuple[int, ...] | None:
        """(C, h, w) of bags of pixels."""
        return getattr(self.files[0], "tile", None)

    def image_size(self, sample: int) -> Size:
        """Tiles of a bag."""
        return (self.files[sample].tiles,)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """(tiles, width): those of a box, of which only these are read.

        Raises:
            ValueError: the file is damaged, or a feature is no finite number.
        """
        file = self.files[sample]
        start, stop = box or (0, file.tiles)
        check_box((start, stop), (file.tiles,), f"the slide {file.slide}")
        features = file.read(start, stop)
        if not np.isfinite(features).all():
            raise ValueError(f"{file.path} has features that are NaN or Inf: make it anew")
        return features

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        raise ValueError("bags have no masks")


@dataclass(frozen=True)
class BagViews(Views):
    """Bags as the network sees them: all their tiles, or some, drawn anew each epoch.

    Attributes:
        max_tiles: of a bag; None takes all.
    """

    max_tiles: int | None = None

    @property
    def varies(self) -> bool:
        """Bags differ in length."""
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
        """Which tiles of a bag an epoch sees, in their order."""
        (tiles,), (wanted,) = self.source.image_size(sample), self.size_of(sample)
        rng = np.random.default_rng([self.seed, epoch, sample, _DRAW])
        return np.sort(rng.choice(tiles, wanted, replace=False))
