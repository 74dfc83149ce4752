"""What the validation samples come to, over all ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spatialdl.pipeline.placed import Microbatch
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.training.tasks import Task


def tally(pipeline: Pipeline, task: Task, batches: Iterable[Sequence[Microbatch]]) -> Tensor:
    """This rank's part of the sums that `Task.metrics` takes; each sample counts once."""
    sums = torch.zeros(task.tallied, dtype=torch.float64)
    for parts in batches:
        for number, output in pipeline.evaluate(parts).items():
            target, mesh = parts[number].target, pipeline.last(number)
            if target is None or mesh is None:
                continue
            if mesh.batch > 1:
                own = pipeline.own_outputs(number, parts[number].samples)
                sums += task.tally(output, target[own.start : own.stop], part=0)
            else:
                sums += task.tally(output, target, mesh.part)
    return sums


def told(found: Mapping[str, Any]) -> str:
    """Metrics as a line of the log has them."""
    shares = ", ".join(
        f"{name.replace('_', ' ')} {100 * found[name]:.1f} %"
        for name in ("accuracy", "mean_dice", "mean_iou")
        if name in found
    )
    return f"loss {found['loss']:.4f}, {shares} of {found['samples']} samples"
