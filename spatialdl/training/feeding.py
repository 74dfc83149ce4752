"""A data set as this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm import waiting
from spatialdl.comm.mesh import Mesh
from spatialdl.data.batches import Batching, PartBox, Slice
from spatialdl.data.image_source import Box
from spatialdl.data.loader import Loader, bag_to_input, to_input
from spatialdl.data.normalisation import Normalisation
from spatialdl.data.views import Views
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.spatial.split import from_local
from spatialdl.training.tasks.losses import check_pixels


class Feed:
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
    """

    def __init__(
        self,
        data: DictConfig,
        views: Views,
        pipeline: Pipeline,
        *,
        batch_size: int,
        masks: bool,
        classes: int | None = None,
        normalisation: Normalisation,
        dtype: torch.dtype,
        channels_last: bool = False,
        seed: int | None = None,
        one_batch: bool = False,
    ) -> None:
        self._pipeline, self._size = pipeline, views.size
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
            ),
            seed,
            workers=data.workers,
            prefetch=data.prefetch,
            device=self._device,
            one_batch=one_batch,
        )

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
            samples, mesh = len(part.labels), self._pipeline.last(number)
            tile = target = None
            if part.tiles is not None:
                tile = self._input(part)
            if mesh is not None and samples:
                target = self._target(part, mesh)
            microbatches.append(
                Microbatch(samples, part.share, tile, target, part.size, part.place)
            )
        return microbatches

    def close(self) -> None:
        """End the processes that read."""
        self.loader.close()

    def _input(self, part: Slice) -> Tensor:
        assert part.tiles is not None
        if part.size is None:
            tile = to_input(part.tiles, self._dtype, self._device, self._normalisation)
            return tile.contiguous(memory_format=self._format)
        return bag_to_input(part.tiles, self._dtype, self._device, self._normalisation)

    def _target(self, part: Slice, mesh: Mesh) -> Tensor:
        """Labels (N,) or (N, targets); or masks (N, H, W), each rank of the grid holds its box."""
        if part.masks is None:
            return part.labels.to(self._device)
        if self._classes is not None:
            check_pixels(part.masks, self._classes)  # here, where no device is waited for
        mask = part.masks.to(self._device, torch.int64)
        return mask if mesh.parts == 1 else from_local(mask, mesh, self._size)


def _own_box(views: Views, mesh: Mesh) -> Box | PartBox:
    return PartBox(mesh.grid, mesh.part) if views.varies else mesh.box(views.size)
