"""Memory that a pipeline holds while it runs its schedule; not its numbers."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import GEMS, SCHEDULES, make_schedule
from spatialdl.pipeline.simulate import StageSeconds, simulate
from spatialdl.pipeline.stage_runtime import Microbatch

MICROBATCHES = 8


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


@pytest.mark.parametrize("name", SCHEDULES + GEMS)
def test_activations_are_held_of_as_many_micro_batches_as_simulated(
    name: str, world: MPI.Intracomm
) -> None:
    """What was sent forward once stayed until the end of the step."""
    interleave = 3 if name == "interleaved" else 1
    stages = world.size * interleave
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(stages)))
    placement = Placement(1, ((1, 1),) * stages, interleave, name in GEMS)
    names = [str(stage) for stage in range(1, stages)]
    schedule = make_schedule(name, placement, MICROBATCHES)
    pipeline = PipelineRuntime(
        *(model, placement, schedule, world, mean, (3, 6, 5)), PipelineOptions(cut=names)
    )
    outputs: list[StorageWeakRef] = []
    held: list[int] = []

    def count(stage: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))
        held.append(sum(not ref.expired() for ref in outputs))

    for stage in pipeline.stages.values():
        for layer in stage.children():
            layer.register_forward_hook(count)
    microbatches = [
        Microbatch(1, 1 / MICROBATCHES, torch.rand(1, 3, 6, 5), torch.rand(1, 3, 6, 5))
        for _ in range(MICROBATCHES)
    ]
    pipeline.train_step(microbatches, 0)
    expected = simulate(schedule.train, StageSeconds.even(stages))
    assert max(held) == expected.peak_held[world.rank]
    assert all(ref.expired() for ref in outputs)
