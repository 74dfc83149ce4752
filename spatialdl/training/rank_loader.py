"""Loader of this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm import waiting
from spatialdl.comm.mesh import Mesh
from spatialdl.data.batches import Batching, PartBox, Slice
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.image_source import Box
from spatialdl.data.loader import Loader, bag_to_input, to_input
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.views import Views
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.split import from_local
from spatialdl.training.optimization.precision import channels_last as in_channels_last
from spatialdl.training.tasks.losses import check_pixels


class RankLoader:
    """Batches of a data set for this rank's stages.

    Args:
        data: group ``data`` of the configuration.
        views: the images.
        pipeline: determines the boxes that this rank needs.
        batch_size: samples per step, over all ranks.
        masks: whether the targets are masks.
        classes: number of classes in masks; None accepts any.
        normalisation: normalisation of the network's input.
        dtype: dtype of the network's input.
        channels_last: whether the input has the channels-last memory format.
        seed: seed of the order; None keeps the order of the data set.
        one_batch: whether every epoch is the first batch of the first epoch.
        masks_in_parts: whether masks are read per virtual tile, as images are.

    Attributes:
        loader: reads the samples.
    """

    def __init__(
        self,
        data: DictConfig,
        views: Views,
        pipeline: PipelineRuntime,
        *,
        batch_size: int,
        masks: bool,
        classes: int | None = None,
        normalisation: Normalisation,
        dtype: torch.dtype,
        channels_last: bool = False,
        seed: int | None = None,
        one_batch: bool = False,
        masks_in_parts: bool = False,
    ) -> None:
        self._pipeline, self._size, self._views = pipeline, views.size, views
        self._masks_in_parts = masks and masks_in_parts
        self._dtype, self._device = dtype, pipeline.device
        self._normalisation, self._classes = normalisation, classes
        self._channels_last = channels_last
        numbers = range(pipeline.schedule.microbatches)
        first = [pipeline.first(number) for number in numbers]
        last = [pipeline.last(number) for number in numbers]
        self.loader = Loader(
            views,
            Batching(
                size=batch_size,
                replicas=pipeline.placement.data,
                replica=pipeline.replica,
                boxes=[_own_box(views, mesh) if mesh else None for mesh in first],
                mask_boxes=[mesh.box(views.size) if mesh and masks else None for mesh in last],
                labels=[mesh is not None and not masks for mesh in last],
                in_parts=self._in_parts(),
            ),
            seed,
            workers=data.workers,
            device=self._device,
            one_batch=one_batch,
        )

    def _in_parts(self) -> tuple[str, ...]:
        """What is read per virtual tile; a user's data set returns whole samples anyway."""
        if not self._pipeline.placement.stream:
            return ()
        if isinstance(self._views.source, DatasetSource):
            return ()
        return ("images", "masks") if self._masks_in_parts else ("images",)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self.loader)

    def samples(self, batch: int) -> int:
        """Samples in a batch of an epoch, over all ranks; the last batch may be smaller."""
        return self.loader.samples(batch)

    def own(self, batch: int) -> list[range]:
        """Positions in the epoch of this replica's samples of a batch, per micro-batch."""
        cut = self.loader.batching
        start = batch * cut.size
        return [
            range(start + part.start, start + part.stop) for part in cut.own(self.samples(batch))
        ]

    def batches(self, epoch: int = 0, first: int = 0) -> Iterator[list[Slice]]:
        """Batches of an epoch, from batch `first` on."""
        return waiting.each("the next batch of data", self.loader.batches(epoch, first))

    def microbatches(self, batch: list[Slice]) -> list[Microbatch]:
        """Convert a batch to the micro-batches of the pipeline."""
        microbatches = []
        for number, part in enumerate(batch):
            first, last = self._pipeline.first(number), self._pipeline.last(number)
            one = Microbatch(len(part.labels), part.share, size=part.size, place=part.place)
            streams = bool(self._pipeline.placement.stream)
            if first is not None and one.samples and streams:
                one.images = self._region(part, first, masks=False)
            elif part.tiles is not None:
                one.tile = self._input(part)
            if last is not None and one.samples and streams and self._masks_in_parts:
                one.masks = self._region(part, last, masks=True)
            elif last is not None and one.samples:
                one.target = self._target(part, last)
            microbatches.append(one)
        return microbatches

    def _region(self, part: Slice, mesh: Mesh, masks: bool) -> TileRegion:
        """This rank's box, read one virtual tile at a time."""
        box = mesh.box(self._size)
        extents = tuple(stop - start for start, stop in pairwise(box))[::2]
        samples, views = part.samples, self._views
        channels = () if masks else (views.source.channels,)
        whole = part.masks if masks else part.tiles

        def read(where: Any) -> Tensor:
            slices = where[-len(extents) :]
            if whole is not None:
                stored = whole[(slice(None), *slices)]
            else:
                each = zip(box[::2], slices, strict=True)
                wanted = tuple(n for at, own in each for n in (at + own.start, at + own.stop))
                read_one = views.read_mask if masks else views.read
                arrays = [read_one(part.epoch, sample, wanted) for sample in samples]
                stored = torch.from_numpy(np.stack(arrays))
            if masks:
                return self._mask(stored)
            return self._pixels(stored)

        dtype = torch.int64 if masks else self._dtype
        return TileRegion((len(samples), *channels, *extents), dtype, self._size, read)

    def close(self) -> None:
        """Stop the worker processes."""
        self.loader.close()

    def _input(self, part: Slice) -> Tensor:
        assert part.tiles is not None
        if part.size is None:
            return self._pixels(part.tiles)
        return bag_to_input(part.tiles, self._dtype, self._device, self._normalisation)

    def _pixels(self, stored: Tensor) -> Tensor:
        tile = to_input(stored, self._dtype, self._device, self._normalisation)
        return in_channels_last(tile) if self._channels_last else tile.contiguous()

    def _mask(self, stored: Tensor) -> Tensor:
        if self._classes is not None:
            check_pixels(stored, self._classes)  # on the CPU, to avoid waiting for the device
        return stored.to(self._device, torch.int64)

    def _target(self, part: Slice, mesh: Mesh) -> Tensor:
        """Labels (N,) or (N, targets), or this rank's box of masks (N, H, W)."""
        if part.masks is None:
            return part.labels.to(self._device)
        mask = self._mask(part.masks)
        return mask if mesh.parts == 1 else from_local(mask, mesh, self._size)


def _own_box(views: Views, mesh: Mesh) -> Box | PartBox:
    return PartBox(mesh.grid, mesh.part) if views.varies else mesh.box(views.size)
