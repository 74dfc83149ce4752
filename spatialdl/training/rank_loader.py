"""A data set as this rank's micro-batches."""

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
from spatialdl.training.tasks.losses import check_pixels


class RankLoader:
    """Batches of a data set for this rank's stages.

    Attributes:
        loader: reads them.

    Args:
        data: settings of a run's data.
        views: the images.
        pipeline: says which boxes this rank needs.
        batch_size: samples that a step takes, over all ranks.
        masks: whether masks are the targets.
        classes: that masks may have; None for any.
        normalisation: of the images that the network gets.
        dtype: of these images.
        channels_last: whether these lie so in memory.
        seed: of the order; None takes samples as they come.
        one_batch: whether every epoch is the first batch of the first one.
        masks_in_parts: where ranks have virtual tiles, whether masks are read for each of them, as
            images are.
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
        self._format = torch.channels_last if channels_last else torch.contiguous_format
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
            prefetch=data.prefetch,
            device=self._device,
            one_batch=one_batch,
        )

    def _in_parts(self) -> tuple[str, ...]:
        """What is not in memory as a whole; a data set of a user's makes whole samples anyway."""
        if not self._pipeline.placement.stream:
            return ()
        if isinstance(self._views.source, DatasetSource):
            return ()
        return ("images", "masks") if self._masks_in_parts else ("images",)

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.loader)

    def samples(self, batch: int) -> int:
        """How many a batch of an epoch holds, over all ranks; the last may be smaller."""
        return self.loader.samples(batch)

    def own(self, batch: int) -> list[range]:
        """Where in an epoch this replica's samples of a batch lie, for each micro-batch."""
        cut = self.loader.batching
        start = batch * cut.size
        return [
            range(start + part.start, start + part.stop) for part in cut.own(self.samples(batch))
        ]

    def batches(self, epoch: int = 0, first: int = 0) -> Iterator[list[Slice]]:
        """What is left of an epoch from batch `first` on."""
        return waiting.each("the next batch of data", self.loader.batches(epoch, first))

    def microbatches(self, batch: list[Slice]) -> list[Microbatch]:
        """A batch as the pipeline takes it."""
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
        """This rank's box, read for one virtual tile at a time."""
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
                found = [read_one(part.epoch, sample, wanted) for sample in samples]
                stored = torch.from_numpy(np.stack(found))
            if masks:
                return self._mask(stored)
            return self._pixels(stored)

        dtype = torch.int64 if masks else self._dtype
        return TileRegion((len(samples), *channels, *extents), dtype, self._size, read)

    def close(self) -> None:
        """End the processes that read."""
        self.loader.close()

    def _input(self, part: Slice) -> Tensor:
        assert part.tiles is not None
        if part.size is None:
            return self._pixels(part.tiles)
        return bag_to_input(part.tiles, self._dtype, self._device, self._normalisation)

    def _pixels(self, stored: Tensor) -> Tensor:
        tile = to_input(stored, self._dtype, self._device, self._normalisation)
        return tile.contiguous(memory_format=self._format)

    def _mask(self, stored: Tensor) -> Tensor:
        if self._classes is not None:
            check_pixels(stored, self._classes)  # here, where no device is waited for
        return stored.to(self._device, torch.int64)

    def _target(self, part: Slice, mesh: Mesh) -> Tensor:
        """Labels (N,) or (N, targets); or masks (N, H, W), each rank of the grid holds its box."""
        if part.masks is None:
            return part.labels.to(self._device)
        mask = self._mask(part.masks)
        return mask if mesh.parts == 1 else from_local(mask, mesh, self._size)


def _own_box(views: Views, mesh: Mesh) -> Box | PartBox:
    return PartBox(mesh.grid, mesh.part) if views.varies else mesh.box(views.size)
