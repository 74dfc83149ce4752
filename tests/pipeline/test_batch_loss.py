from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.batch_loss import Width, check_forwards_first
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import gpipe, make_schedule, one_f_one_b
from spatialdl.pipeline.stage_runtime import Microbatch


def pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """No sum over samples; those of NaN are none."""
    there = ~target[:, 0].isnan()
    both = there[:, None] & there
    times = target.nan_to_num()[:, 0]
    products = (output[:, None, 0] * times - output[:, 0] * times[:, None]).exp()
    return products.where(both, 0.0).sum() / both.sum()


def pipeline(mixed: torch.dtype | None = None) -> PipelineRuntime:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1)).double()
    placement = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", placement, 4)
    options = PipelineOptions(batch_loss=Width(1, 1), mixed=mixed)
    return PipelineRuntime(model, placement, schedule, SingleProcess(), pairs, (1, 2, 3), options)


def batch(count: int) -> list[Microbatch]:
    """A batch in four micro-batches."""
    torch.manual_seed(1)
    found = []
    for number in range(4):
        tile, target = torch.rand(1, 1, 2, 3).double(), torch.rand(1, 1).double()
        there = (1, 1 / count, tile, target) if number < count else (0, 0.0)
        found.append(Microbatch(*there))
    return found


@pytest.mark.parametrize("count", [4, 3])
def test_gradients_are_those_of_the_whole_batch(count) -> None:
    ours = pipeline()
    loss = ours.train_step(batch(count), 0)
    some = batch(count)[:count]
    model = pipeline().stages[0]
    output = model(torch.cat([one.tile for one in some]))
    expected = pairs(output, torch.cat([one.target for one in some]))
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-14)
    for own, wanted in zip(ours.parameters(), model.parameters(), strict=True):
        assert wanted.grad.ne(0).all()
        torch.testing.assert_close(own.grad, wanted.grad, rtol=0, atol=1e-13)


def test_an_output_of_another_shape_is_refused() -> None:
    ours = pipeline()
    ours.stages[0].append(nn.Linear(1, 2).double())
    with pytest.raises(ValueError, match=r"returns \(1, 2\) for a sample.*\(1, 1\)"):
        ours.train_step(batch(4), 0)


def test_backwards_before_the_last_forward_are_refused() -> None:
    check_forwards_first(gpipe(1, 3))
    with pytest.raises(ValueError, match="needs all forwards"):
        check_forwards_first(one_f_one_b(1, 3))
