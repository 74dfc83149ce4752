"""A batch as one rank reads it: its box of each sample of its replica.

A batch is divided into contiguous micro-batches, and each of them into contiguous slices of the
data replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.data.image_source import Box, Size
from spatialdl.data.views import Views
from spatialdl.layout.layout import Layout, even_bounds


@dataclass(frozen=True)
class Slice:
    """This rank's part of a micro-batch.

    Attributes:
        labels: int64 (N,) or float64 (N, targets) of the samples of this replica.
        share: fraction of the batch's samples that are in this slice.
        tiles: (N, [d,] h, w, C), of the images' type, this rank's box of each; None if the rank
            needs no images.
        masks: uint8 (N, [d,] h, w), this rank's box of each mask; None if it needs no masks.
        size: of the whole image, if images differ in size and a slice has at most one.
        place: index of that image in its batch.
        epoch, samples: identify the samples, for tiles or masks that are read in parts.
    """

    labels: Tensor
    share: float
    tiles: Tensor | None
    masks: Tensor | None = None
    size: Size | None = None
    place: int = 0
    epoch: int = 0
    samples: tuple[int, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Slice:
        """A copy with `function` applied to every tensor."""
        tiles, masks = (None if x is None else function(x) for x in (self.tiles, self.masks))
        return replace(self, labels=function(self.labels), tiles=tiles, masks=masks)

    def tensors(self) -> list[Tensor]:
        """All tensors of the slice that are not None."""
        return [x for x in (self.labels, self.tiles, self.masks) if x is not None]


@dataclass(frozen=True)
class PartBox:
    """A rank's box of images that differ in size: one part of a grid.

    Attributes:
        grid: parts of each image along its dims.
        part: index of the part, row-major.
    """

    grid: tuple[int, ...]
    part: int

    def of(self, size: Size) -> Box:
        """The box of an image of this size; may be empty."""
        box = Layout.even(1, size, self.grid).boxes[self.part]
        return tuple(bound for interval in box.spatial for bound in interval)


@dataclass(frozen=True)
class Batching:
    """How batches are divided, and this rank's part.

    Attributes:
        size: samples of a global batch.
        replicas: number of data replicas, over which a micro-batch is divided.
        replica: index of this rank's replica.
        boxes: per micro-batch, this rank's box of an image; None if it needs no images. If images
            differ in size, a `PartBox`, and a slice has at most one image.
        mask_boxes: the same for masks.
        labels: per micro-batch, whether this rank needs labels, for which data sets of a user make
            the whole sample; None: for all.
        in_parts: which of ``images`` and ``masks`` are not read here, but later in parts.
    """

    size: int
    replicas: int
    replica: int
    boxes: Sequence[Box | PartBox | None]
    mask_boxes: Sequence[Box | None]
    labels: Sequence[bool] | None = None
    in_parts: tuple[str, ...] = ()

    def own(self, samples: int) -> list[slice]:
        """This replica's samples of a batch of `samples`, per micro-batch."""
        found = []
        for start, stop in pairwise(even_bounds(samples, len(self.boxes))):
            cuts = even_bounds(stop - start, self.replicas)
            found.append(slice(start + cuts[self.replica], start + cuts[self.replica + 1]))
        return found


class Batch(NamedTuple):
    """Samples to read, in order, and their epoch."""

    epoch: int
    samples: npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchReader:
    """Reads this rank's slices of a batch, in any process."""

    views: Views
    batching: Batching

    def read(self, batch: Batch) -> list[Slice]:
        """One slice per micro-batch.

        Raises:
            Exception: any error of the source, with a note that names the sample.
        """
        cut, slices = self.batching, []
        wanted = cut.labels or [True] * len(cut.boxes)
        nothing: list[None] = [None] * len(cut.boxes)
        boxes = nothing if "images" in cut.in_parts else cut.boxes
        mask_boxes = nothing if "masks" in cut.in_parts else cut.mask_boxes
        parts = zip(cut.own(len(batch.samples)), boxes, mask_boxes, wanted, strict=True)
        for part, image_box, mask_box, labels in parts:
            own = batch.samples[part].tolist()
            size, box = self._own_box(own, image_box)
            # A bag is large and is read for this slice alone.
            copied = size is None
            found = self._read(batch.epoch, own, box, mask_box, labels=labels, copied=copied)
            share = len(own) / len(batch.samples)
            own_slice = Slice(found[0], share, *found[1:], size, part.start)
            slices.append(replace(own_slice, epoch=batch.epoch, samples=tuple(own)))
        return slices

    def _own_box(
        self, samples: Sequence[int], box: Box | PartBox | None
    ) -> tuple[Size | None, Box | None]:
        """(Size, box) of this rank in the images of a slice; size is None if all are equal."""
        if not isinstance(box, PartBox):
            return None, box
        if not samples:
            return None, None
        [sample] = samples
        size = self.views.size_of(sample)
        return size, box.of(size)

    def _read(
        self,
        epoch: int,
        samples: Sequence[int],
        box: Box | None,
        mask_box: Box | None,
        *,
        labels: bool,
        copied: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Labels, tiles and masks, sample by sample: a user's data set makes them together."""
        empty = self.views.no_labels
        count = len(samples)
        found = _Stack(count), _Stack(count, copied), _Stack(count)
        for number, sample in enumerate(samples):
            try:
                if labels:
                    found[0].put(number, self.views.label(epoch, sample))
                if box is not None:
                    found[1].put(number, self.views.read(epoch, sample, box))
                if mask_box is not None:
                    found[2].put(number, self.views.read_mask(epoch, sample, mask_box))
            except Exception as error:
                error.add_note(f"(sample {sample}, epoch {epoch})")
                raise
        own, tiles, masks = (stack.tensor() for stack in found)
        if own is None:
            own = torch.from_numpy(np.zeros((len(samples), *empty.shape[1:]), empty.dtype))
        return own, tiles, masks


class _Stack:
    """Equal arrays of `count` samples, stacked; a single array need not be copied."""

    def __init__(self, count: int, copied: bool = True) -> None:
        self._count, self._copied = count, copied
        self._stacked: npt.NDArray[Any] | None = None

    def put(self, number: int, array: npt.NDArray[Any]) -> None:
        """Store an array at an index; the first sets the shape and type."""
        if not self._copied:
            self._stacked = array[None]
            return
        if self._stacked is None:
            self._stacked = np.empty((self._count, *array.shape), array.dtype)
        self._stacked[number] = array

    def tensor(self) -> Tensor | None:
        """The stacked arrays, or None if there are none."""
        return None if self._stacked is None else torch.from_numpy(self._stacked)
