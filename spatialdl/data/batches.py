"""A batch as one rank reads it: of every sample of its replica its own box, and nothing else.

A batch is cut into contiguous micro-batches, each of them into contiguous slices of the data
replicas.
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
        epoch, samples: which they are, to be read in parts where tiles or masks are.
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
        labels: for each micro-batch whether this rank needs labels, of which data sets of a user's
            make the whole sample; None: of all.
        in_parts: which of ``images`` and ``masks`` are not read here, but in parts when they are
            needed.
    """

    size: int
    replicas: int
    replica: int
    boxes: Sequence[Box | PartBox | None]
    mask_boxes: Sequence[Box | None]
    labels: Sequence[bool] | None = None
    in_parts: tuple[str, ...] = ()

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
        wanted = cut.labels or [True] * len(cut.boxes)
        nothing: list[None] = [None] * len(cut.boxes)
        boxes = nothing if "images" in cut.in_parts else cut.boxes
        mask_boxes = nothing if "masks" in cut.in_parts else cut.mask_boxes
        parts = zip(cut.own(len(batch.samples)), boxes, mask_boxes, wanted, strict=True)
        for part, given, mask_box, labels in parts:
            own = batch.samples[part].tolist()
            size, box = self._own_box(own, given)
            # a bag is large, and read for this slice alone
            copied = size is None
            found = self._read(batch.epoch, own, box, mask_box, labels=labels, copied=copied)
            share = len(own) / len(batch.samples)
            one = Slice(found[0], share, *found[1:], size, part.start)
            slices.append(replace(one, epoch=batch.epoch, samples=tuple(own)))
        return slices

    def _own_box(
        self, samples: Sequence[int], given: Box | PartBox | None
    ) -> tuple[Size | None, Box | None]:
        """This rank's box of the images of a slice; before it their size, where images differ."""
        if not isinstance(given, PartBox):
            return None, given
        if not samples:
            return None, None
        [sample] = samples
        size = self.views.size_of(sample)
        return size, given.of(size)

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
        """Labels, tiles and masks, sample by sample: a data set of a user's makes them together."""
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
        own, tiles, masks = (one.tensor() for one in found)
        if own is None:
            own = torch.from_numpy(np.zeros((len(samples), *empty.shape[1:]), empty.dtype))
        return own, tiles, masks


class _Stack:
    """Equal arrays of so many samples as one; the only one need not be copied."""

    def __init__(self, count: int, copied: bool = True) -> None:
        self._count, self._copied = count, copied
        self._stacked: npt.NDArray[Any] | None = None

    def put(self, number: int, one: npt.NDArray[Any]) -> None:
        """Have it at a place; the first says of which shape and type all are."""
        if not self._copied:
            self._stacked = one[None]
            return
        if self._stacked is None:
            self._stacked = np.empty((self._count, *one.shape), one.dtype)
        self._stacked[number] = one

    def tensor(self) -> Tensor | None:
        """None if there was nothing."""
        return None if self._stacked is None else torch.from_numpy(self._stacked)
