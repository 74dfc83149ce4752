"""What a pipeline holds while it runs its schedule; that the numbers are right, others prove."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spatialdl.mesh import Placement
from spatialdl.pipeline.runtime import Microbatch, Pipeline
from spatialdl.pipeline.schedule import SCHEDULES
from spatialdl.pipeline.simulate import Costs, simulate

MICROBATCHES = 9


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_held_of_as_many_micro_batches_as_simulated(
    schedule: str, world: MPI.Intracomm
) -> None:
    """What was sent forward once stayed until the end of the step."""
    stages = world.size
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(stages)))
    placement = Placement(1, ((1, 1),) * stages)
    names = [str(stage) for stage in range(1, stages)]
    pipeline = Pipeline(model, placement, world, mean, (3, 6, 5), names, schedule)
    outputs: list[StorageWeakRef] = []
    held: list[int] = []

    def count(stage: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(StorageWeakRef(output.untyped_storage()))
        held.append(sum(not ref.expired() for ref in outputs))

    pipeline.stage.register_forward_hook(count)
    microbatches = [
        Microbatch(1, 1 / MICROBATCHES, torch.rand(1, 3, 6, 5), torch.rand(1, 3, 6, 5))
        for _ in range(MICROBATCHES)
    ]
    pipeline.train_step(microbatches, 0)
    expected = simulate(SCHEDULES[schedule](stages, MICROBATCHES), Costs.even(stages))
    assert max(held) == expected.peak_held[pipeline.position.stage]
    assert all(ref.expired() for ref in outputs)
