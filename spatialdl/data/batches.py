"""A batch as one rank reads it: of every sample of its replica its own box, and nothing else.

A batch is cut into contiguous micro-batches, each of them into contiguous slices of the data
replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.data.image_source import Box, Pixels, Size
from spatialdl.data.views import Views
from spatialdl.parallel.layout import Layout, even_bounds


@dataclass(frozen=True)
class Slice:
    """This rank's part of a micro-batch.

    Attributes:
        labels: int64 (N,) or float64 (N, targets) of the samples of this replica.
        share: of the whole batch's samples that are in this slice.
        tiles: (N, [d,] h, w, C), of the images' type, this rank's box of each; None where no images
            are wanted.
        masks: uint8 (N, [d,] h, w), this rank's box of each mask; None where no masks are wanted.
        size: of the whole image, where images differ in size, and a slice has one or none.
        place: of that image in its batch.
    """

    labels: Tensor
    share: float
    tiles: Tensor | None
    masks: Tensor | None = None
    size: Size | None = None
    place: int = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> Slice:
        """The same with every tensor as `function` gives it."""
        tiles, masks = (None if x is None else function(x) for x in (self.tiles, self.masks))
        return replace(self, labels=function(self.labels), tiles=tiles, masks=masks)

    def tensors(self) -> list[Tensor]:
        """All that are there."""
        return [x for x in (self.labels, self.tiles, self.masks) if x is not None]


@dataclass(frozen=True)
class PartBox:
    """A rank's box of images that differ in size: a part of a grid, whatever they are.

    Attributes:
        grid: over which images are split.
        part: of it, row-major.
    """

    grid: tuple[int, ...]
    part: int

    def of(self, size: Size) -> Box:
        """The box of an image of a size; may be empty."""
        box = Layout.even(1, size, self.grid).boxes[self.part]
        return tuple(bound for interval in box.spatial for bound in interval)


@dataclass(frozen=True)
class Batching:
    """How batches are cut, and which part is this rank's.

    Attributes:
        size: samples of a global batch.
        replicas: data replicas, into which a micro-batch is cut.
        replica: this rank's.
        boxes: for each micro-batch of a batch this rank's box of an image; None where it needs no
            images. Where images differ in size, a `PartBox`, and a slice is one image or none.
        mask_boxes: the same of masks.
    """

    size: int
    replicas: int
    replica: int
    boxes: Sequence[Box | PartBox | None]
    mask_boxes: Sequence[Box | None]

    def own(self, samples: int) -> list[slice]:
        """Which of so many samples of a batch are this replica's, for each micro-batch."""
        found = []
        for start, stop in pairwise(even_bounds(samples, len(self.boxes))):
            cuts = even_bounds(stop - start, self.replicas)
            found.append(slice(start + cuts[self.replica], start + cuts[self.replica + 1]))
        return found


class Batch(NamedTuple):
    """Which samples to read, in order, as they are in an epoch."""

    epoch: int
    samples: npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchReader:
    """Reads this rank's slices of a batch, in whatever process."""

    views: Views
    batching: Batching

    def read(self, batch: Batch) -> list[Slice]:
        """One slice a micro-batch.

        Raises:
            Exception: what the source raises, with a note that names the sample.
        """
        cut, slices = self.batching, []
        parts = zip(cut.own(len(batch.samples)), cut.boxes, cut.mask_boxes, strict=True)
        for part, given, mask_box in parts:
            own = batch.samples[part]
            size, box = self._own_box(own, given)
            slices.append(
                Slice(
                    torch.from_numpy(self.views.labels[own]),
                    len(own) / len(batch.samples),
                    _stack(self.views.read, batch.epoch, own, box, copied=size is None),
                    _stack(self.views.read_mask, batch.epoch, own, mask_box),
                    size,
                    part.start,
                )
            )
        return slices

    def _own_box(
        self, samples: npt.NDArray[np.int64], given: Box | PartBox | None
    ) -> tuple[Size | None, Box | None]:
        """This rank's box of the images of a slice; before it their size, where images differ."""
        if not isinstance(given, PartBox):
            return None, given
        if not len(samples):
            return None, None
        [sample] = samples.tolist()
        size = self.views.size_of(sample)
        return size, given.of(size)


def _stack(
    read: Callable[[int, int, Box], Pixels],
    epoch: int,
    samples: npt.NDArray[np.int64],
    box: Box | None,
    *,
    copied: bool = True,
) -> Tensor | None:
    if box is None or not len(samples):
        return None
    stacked: Pixels | None = None
    for number, sample in enumerate(samples.tolist()):
        try:
            pixels = read(epoch, sample, box)
        except Exception as error:
            error.add_note(f"(sample {sample}, epoch {epoch})")
            raise
        if not copied:  # the only one, and nobody else's
            return torch.from_numpy(pixels[None])
        if stacked is None:
            stacked = np.empty((len(samples), *pixels.shape), pixels.dtype)
        stacked[number] = pixels
    return torch.from_numpy(stacked)
