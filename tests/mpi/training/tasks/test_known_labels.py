"""Unknown labels reduce the weight of samples, also if ranks split a micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.tasks.task import MultiLabel
from tests.mpi.training.small import small

SIZE, SAMPLES = (21, 17), 5


def drawn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model, images = small(3, 3).double(), torch.randn(SAMPLES, 3, *SIZE, dtype=torch.float64)
    target = torch.tensor([[1, 0, 1], [0, torch.nan, 1], [1, 1, torch.nan], [0, 0, 0], [1, 0, 0]])
    target[0, :2] = torch.nan
    return model, images, target.double()


@pytest.mark.world(3)
def test_parts_of_a_micro_batch_count_by_their_known_labels_in_float64(world: Communicator) -> None:
    model, images, target = drawn()
    known = ~target.isnan()
    loss = nn.functional.binary_cross_entropy_with_logits(model(images)[known], target[known])
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    task, placement = MultiLabel(), Placement(1, ((1, 1),) * 2, batch=(1, 2))
    pipeline = PipelineRuntime(
        *(drawn()[0], placement, make_schedule("gpipe", placement, 1), world, task.loss),
        (3, *SIZE),
        PipelineOptions(sample_weights=task.weights),
    )
    batch = Microbatch(
        SAMPLES, 1.0, images if pipeline.first(0) else None, target if pipeline.last(0) else None
    )
    total = world.allreduce(pipeline.train_step([batch], 0))
    assert total == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)
