"""Validation metrics over all ranks and micro-batches, each sample counted once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.shards import ShardDataset
from spatialdl.data.targets import sample_numbers
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.spatial.split import from_local
from spatialdl.spatial.tensor import SpatialTensor, from_tile
from spatialdl.training.rank_loader import RankLoader
from spatialdl.training.settings import Sources
from spatialdl.training.tasks.metrics import Scores, undefined
from spatialdl.training.tasks.own_metrics import MapMetrics, OwnMetrics
from spatialdl.training.tasks.predictions import Predictions
from spatialdl.training.tasks.segmentation import Segmentation
from spatialdl.training.tasks.task import SampleTask, Task

log = logging.getLogger("spatialdl.trainer")


Own = Tensor | list[tuple[range, Tensor, Tensor]]
"""This rank's results: sums over maps, or samples with their outputs and targets."""


class Evaluated(NamedTuple):
    """Network outputs on this rank.

    Attributes:
        samples: numbers of the samples, in the order of the loader.
        output: (N, ...), outputs of these samples.
        target: (N, ...), targets of these samples.
        mesh: the ranks that split the outputs, or the mesh of a single virtual tile.
    """

    samples: range
    output: Tensor
    target: Tensor
    mesh: Mesh

    @property
    def counts(self) -> bool:
        """Whether this is the first rank that has these outputs."""
        return self.mesh.counts

    @property
    def has_tile(self) -> bool:
        """Whether this is the first rank that has this tile of a split output."""
        return self.mesh.channels == 0


def evaluated(
    pipeline: PipelineRuntime, loader: RankLoader, batches: Iterable[Sequence[Microbatch]]
) -> Iterator[Evaluated]:
    """Yield the outputs of a loader's batches from the first on; all ranks must consume all."""
    for batch, parts in enumerate(batches):
        slices = loader.own(batch)
        for number, mesh, output in pipeline.evaluate_tiles(parts):
            target = parts[number].target
            if target is None:
                continue
            own = pipeline.own_outputs(number, parts[number].samples)
            some = slice(own.start, own.stop)
            yield Evaluated(slices[number][some], output, target[some], mesh)


class Validation:
    """Metrics of all validation samples, the same in every layout.

    Outputs for whole images are gathered on rank 0 and sorted by sample; all metrics are computed
    there in float64. For maps, each rank counts its own pixels.

    Args:
        pipeline: the network on its ranks.
        task: loss and metrics.
        sources: data of the run, with validation samples.
        loader: loader of the validation samples, in their order.
        world: all ranks.
        metrics: metrics of the user.
    """

    def __init__(
        self,
        pipeline: PipelineRuntime,
        task: Task,
        sources: Sources,
        loader: RankLoader,
        world: Communicator,
        metrics: OwnMetrics | None = None,
    ) -> None:
        assert sources.validation is not None
        self._pipeline, self._task, self._source = pipeline, task, sources.validation
        self._names, self._loader, self._world = sources.names, loader, world
        self._predictions: Predictions | None = None
        self._numbers: list[int] | None = None
        self._warned = False
        self._own_metrics, self._map_metrics = metrics, MapMetrics({})

    def own(self, batches: Iterable[Sequence[Microbatch]]) -> Own:
        """Evaluate the loader's batches, from the first on, and return this rank's results."""
        if isinstance(self._task, Segmentation):
            return self._own_tally(self._task, batches)
        return list(self._own_outputs(self._task, batches))

    def scores(self, own: Own) -> Scores:
        """Compute the metrics from `own` of all ranks; collective, returned on every rank."""
        if isinstance(own, Tensor) and isinstance(self._task, Segmentation):
            metrics = self._task.metrics(self._world.all_reduce(own).tolist())
            metrics |= self._map_metrics.scores(self._world)
        else:
            gathered = self._world.gather(own)
            metrics = {} if gathered is None else self._score([p for one in gathered for p in one])
            metrics = self._world.bcast(metrics)
        return metrics if math.isfinite(metrics["loss"]) else undefined(metrics)

    def write(self, folder: Path) -> None:
        """Write the tables of the last predictions on rank 0; maps have none."""
        if self._predictions is None:
            return
        try:
            self._predictions.write(folder)
        except OSError as error:  # a full disk must not abort the run
            log.warning("cannot write predictions: %s", error)

    def _own_tally(self, task: Segmentation, batches: Iterable[Sequence[Microbatch]]) -> Tensor:
        sums = torch.zeros(task.tallied, dtype=torch.float64)
        if self._own_metrics is not None:
            self._map_metrics = self._own_metrics.of_maps(self._pipeline.device)
        for parts in batches:
            for number, mesh, output in self._maps(parts):
                target = self._target(parts[number], number, mesh, output)
                if target is not None and mesh.channels == 0:
                    sums += task.tally(output, target, mesh.part)
                    self._map_metrics.update(output, target, mesh.part)
        return sums

    def _maps(self, parts: Sequence[Microbatch]) -> Iterator[tuple[int, Mesh, Tensor]]:
        """Yield the output map of each micro-batch, by virtual tile if masks are read so."""
        if any(one.masks is not None for one in parts):
            yield from self._pipeline.evaluate_tiles(parts)
            return
        for number, output in self._pipeline.evaluate(parts).items():
            mesh = self._pipeline.last(number)
            if mesh is not None:
                yield number, mesh, output

    def _target(self, part: Microbatch, number: int, mesh: Mesh, output: Tensor) -> Tensor | None:
        """Masks split like their map; for a virtual tile, the masks of its pixels."""
        if part.masks is None:
            return part.target
        own = self._pipeline.last(number)
        assert own is not None
        size = part.masks.size
        if not isinstance(output, SpatialTensor):  # a whole map, from all virtual tiles
            whole = part.masks[(..., *(slice(0, n) for n in part.masks.shape[1:]))]
            return whole if own.parts == 1 else from_local(whole, own, size)
        fits = tuple(output.shape[2:]) == tuple(size)
        layout = output.spatial_layout if fits else mesh.layout(1, size)
        starts = zip(mesh.own_box(layout).spatial, own.box(size)[::2], strict=True)
        slices = (slice(start - at, stop - at) for (start, stop), at in starts)
        return from_tile(part.masks[(..., *slices)], layout, mesh)

    def _own_outputs(
        self, task: SampleTask, batches: Iterable[Sequence[Microbatch]]
    ) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Yield samples, outputs in float64 and targets that this rank counts."""
        for one in evaluated(self._pipeline, self._loader, batches):
            task.loss(one.output, one.target)  # raises if output and target do not match
            if one.counts:
                yield one.samples, one.output.double().cpu(), one.target.cpu()

    def _score(self, pieces: Sequence[tuple[range, Tensor, Tensor]]) -> Scores:
        assert not isinstance(self._task, Segmentation)
        source, names = self._source, self._names
        order = torch.tensor([sample for samples, *_ in pieces for sample in samples])
        if not torch.equal(order.sort().values, torch.arange(len(source))):
            raise RuntimeError(
                f"validation got {len(order)} outputs for {len(source)} samples: this is a bug"
            )
        outputs = torch.cat([output for _, output, _ in pieces])[order.argsort()]
        if isinstance(source, DatasetSource):  # reading the labels would make all samples again
            source.labels = torch.cat([target for *_, target in pieces])[order.argsort()].numpy()
        if isinstance(source, ShardDataset) and self._numbers is None:
            self._numbers = sample_numbers(source)
        self._predictions = Predictions(self._task, outputs, source, names, self._numbers)
        own = None if self._own_metrics is None else self._own_metrics.of_samples
        metrics = self._predictions.scores(own)
        self._warn_undefined(metrics, names)
        return metrics

    def _warn_undefined(self, metrics: Mapping[str, Any], names: Sequence[str]) -> None:
        """Warn once about classes without an AUROC."""
        areas = metrics.get("auroc_per_class", [])
        missing = [number for number, area in enumerate(areas) if area is None]
        if missing and not self._warned:
            self._warned = True
            named = ", ".join(names[n] if n < len(names) else str(n) for n in missing)
            log.warning(
                "no AUROC for %s: needs validation samples both of the class and of other classes; "
                "not included in the mean",
                named,
            )
