"""Batches for one rank: of every sample its own box, and nothing else.

The order of the samples follows from (seed, epoch); all ranks know it without asking. A batch is
cut into contiguous micro-batches, each of them into contiguous slices of the data replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.layout import even_bounds

Box = tuple[int, int, int, int]
"""(row0, row1, col0, col1) of an image, half-open."""

CENTRE, SPREAD = 0.5, 0.25
"""Pixels, scaled to [0, 1], are normalised with these."""


class ImageSource(Protocol):
    """What a data set must offer: `ShardDataset` and `SyntheticDataset` do.

    Attributes:
        labels: int64 (N,), classes; or float64 (N, targets), NaN where nobody knows one.
    """

    labels: npt.NDArray[Any]

    @property
    def has_masks(self) -> bool: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def image_size(self, sample: int) -> tuple[int, int]: ...
    def read(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]: ...
    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Slice:
    """This rank's part of a micro-batch.

    Attributes:
        labels: (N,) or (N, targets) of the samples of this replica.
        share: of the whole batch's samples that are in this slice.
        tiles: uint8 (N, h, w, C), this rank's box of each; None where no images are wanted.
        masks: uint8 (N, h, w), this rank's box of each mask; None where no masks are wanted.
    """

    labels: npt.NDArray[Any]
    share: float
    tiles: npt.NDArray[np.uint8] | None
    masks: npt.NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Batching:
    """How batches are cut, and which part is this rank's.

    Attributes:
        size: samples of a global batch.
        replicas: data replicas, into which a micro-batch is cut.
        replica: this rank's.
        boxes: for each micro-batch of a batch this rank's box of an image; None where it needs no
            images.
        mask_boxes: the same of masks.
    """

    size: int
    replicas: int
    replica: int
    boxes: Sequence[Box | None]
    mask_boxes: Sequence[Box | None]


def sample_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The samples of an epoch, shuffled."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


class Loader:
    """Reads batches, one ahead of the training."""

    def __init__(self, source: ImageSource, batching: Batching) -> None:
        self.source, self.batching = source, batching

    def __len__(self) -> int:
        """Batches an epoch; the last may be smaller."""
        return (len(self.source) + self.batching.size - 1) // self.batching.size

    def batches(self, order: npt.NDArray[np.int64]) -> Iterator[list[Slice]]:
        """This rank's slices of all batches over `order`, one a micro-batch."""
        starts = range(0, len(order), self.batching.size)
        if not starts:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
            pending: Future[list[Slice]] | None = None
            for start in starts:
                following = reader.submit(self._read, order[start : start + self.batching.size])
                if pending is not None:
                    yield pending.result()
                pending = following
            if pending is not None:
                yield pending.result()

    def _read(self, batch: npt.NDArray[np.int64]) -> list[Slice]:
        cut = self.batching
        slices = []
        bounds = pairwise(even_bounds(len(batch), len(cut.boxes)))
        for (start, stop), box, mask_box in zip(bounds, cut.boxes, cut.mask_boxes, strict=True):
            cuts = even_bounds(stop - start, cut.replicas)
            own = batch[start + cuts[cut.replica] : start + cuts[cut.replica + 1]]
            tiles = masks = None
            if box is not None and len(own):
                tiles = np.stack([self.source.read(int(n), box) for n in own])
            if mask_box is not None and len(own):
                masks = np.stack([self.source.read_mask(int(n), mask_box) for n in own])
            slices.append(Slice(self.source.labels[own], len(own) / len(batch), tiles, masks))
        return slices


def to_input(tiles: npt.NDArray[np.uint8], dtype: torch.dtype, device: torch.device) -> Tensor:
    """uint8 (N, h, w, C) as a normalised (N, C, h, w) of `dtype`."""
    pixels = torch.from_numpy(tiles).to(device).permute(0, 3, 1, 2).to(dtype)
    return pixels.div_(255).sub_(CENTRE).div_(SPREAD).contiguous()
