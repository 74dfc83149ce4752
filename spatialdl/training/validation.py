"""What the validation samples come to, over all ranks and micro-batches, each counted once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.data.shards import ShardDataset
from spatialdl.data.targets import sample_numbers
from spatialdl.layout import even_bounds
from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.training.metrics import Scores, undefined
from spatialdl.training.predictions import Predictions
from spatialdl.training.segmentation import Segmentation
from spatialdl.training.settings import Sources
from spatialdl.training.tasks import SampleTask, Task

log = logging.getLogger("spatialdl.trainer")


class Validation:
    """Metrics of all validation samples, the same in every layout.

    Outputs for whole images are gathered on rank 0, put in the order of the samples, and there all
    metrics are taken in float64. Of maps each rank counts its own pixels.

    Args:
        batch_size: samples of a batch; batches come in the order of the samples.
        world: all ranks.
    """

    def __init__(
        self, pipeline: Pipeline, task: Task, sources: Sources, batch_size: int, world: Communicator
    ) -> None:
        self._pipeline, self._task, self._sources = pipeline, task, sources
        self._batch_size, self._world = batch_size, world
        self._predictions: Predictions | None = None
        self._numbers: list[int] | None = None
        self._warned = False

    def run(self, batches: Iterable[Sequence[Microbatch]]) -> Scores:
        """Evaluate all samples; every rank must call it, and gets the metrics."""
        if isinstance(self._task, Segmentation):
            found = self._of_maps(self._task, batches)
        else:
            found = self._of_images(self._task, batches)
        return found if math.isfinite(found["loss"]) else undefined(found)

    def write(self, folder: Path) -> None:
        """The tables of the last predictions, on rank 0; there are none of maps."""
        if self._predictions is not None:
            self._predictions.write(folder)

    def _of_maps(self, task: Segmentation, batches: Iterable[Sequence[Microbatch]]) -> Scores:
        sums = torch.zeros(task.tallied, dtype=torch.float64)
        for parts in batches:
            for number, output in self._pipeline.evaluate(parts).items():
                target, mesh = parts[number].target, self._pipeline.last(number)
                if target is not None and mesh is not None:
                    sums += task.tally(output, target, mesh.part)
        return task.metrics(self._world.all_reduce(sums).tolist())

    def _of_images(self, task: SampleTask, batches: Iterable[Sequence[Microbatch]]) -> Scores:
        own = list(self._own_outputs(task, batches))
        everybody = self._world.gather(own)
        found: Scores = {}
        if everybody is not None:
            found = self._score(task, [piece for one in everybody for piece in one])
        agreed: Scores = self._world.bcast(found)
        return agreed

    def _own_outputs(
        self, task: SampleTask, batches: Iterable[Sequence[Microbatch]]
    ) -> Iterator[tuple[range, Tensor]]:
        """Samples, and their outputs in float64, that count on this rank."""
        source = self._sources.validation
        assert source is not None
        for batch, parts in enumerate(batches):
            start = batch * self._batch_size
            stop = min(start + self._batch_size, len(source))
            slices = self._slices(start, stop, len(parts))
            for number, output in self._pipeline.evaluate(parts).items():
                mesh, target = self._pipeline.last(number), parts[number].target
                if mesh is None or target is None:
                    continue
                own = self._pipeline.own_outputs(number, parts[number].samples)
                task.loss(output, target[own.start : own.stop])  # refuses outputs that do not fit
                if mesh.batch > 1 or mesh.part == 0:
                    yield slices[number][own.start : own.stop], output.double().cpu()

    def _slices(self, start: int, stop: int, microbatches: int) -> list[range]:
        """The samples of a batch that this replica has, by micro-batch; see `data.loader`."""
        replicas, replica = self._pipeline.placement.data, self._pipeline.replica
        found = []
        for first, end in pairwise(even_bounds(stop - start, microbatches)):
            cuts = even_bounds(end - first, replicas)
            found.append(range(start + first + cuts[replica], start + first + cuts[replica + 1]))
        return found

    def _score(self, task: SampleTask, pieces: Sequence[tuple[range, Tensor]]) -> Scores:
        source = self._sources.validation
        assert source is not None
        order = torch.tensor([sample for samples, _ in pieces for sample in samples])
        if not torch.equal(order.sort().values, torch.arange(len(source))):
            raise RuntimeError(
                f"validation met {len(order)} outputs for {len(source)} samples: this is a bug"
            )
        outputs = torch.cat([output for _, output in pieces])[order.argsort()]
        if isinstance(source, ShardDataset) and self._numbers is None:
            self._numbers = sample_numbers(source.path, source)
        names = self._sources.names
        self._predictions = Predictions(task, outputs, source, names, self._numbers)
        found = self._predictions.scores()
        self._tell_missing(found, names)
        return found

    def _tell_missing(self, found: Mapping[str, Any], names: Sequence[str]) -> None:
        """Once, which classes have no AUROC."""
        areas = found.get("auroc_per_class", [])
        missing = [number for number, area in enumerate(areas) if area is None]
        if missing and not self._warned:
            self._warned = True
            named = ", ".join(names[n] if n < len(names) else str(n) for n in missing)
            log.warning(
                "no AUROC for %s: the validation samples need some of the class and some of "
                "others; the mean leaves it out",
                named,
            )


_SHARES = ("accuracy", "balanced_accuracy", "auroc", "mean_dice", "mean_iou", "slide_accuracy")
_NUMBERS = ("mae", "rmse", "r2")


def told(found: Mapping[str, Any]) -> str:
    """Metrics as a line of the log has them."""
    parts = [f"loss {found['loss']:.4f}"]
    for name in (*_SHARES, *_NUMBERS):
        value = found.get(name)
        if value is not None:
            text = f"{100 * value:.1f} %" if name in _SHARES else f"{value:.4g}"
            parts.append(f"{name.replace('_', ' ')} {text}")
    return f"{', '.join(parts)} of {found['samples']} samples"
