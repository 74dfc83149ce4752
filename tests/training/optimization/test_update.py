from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_module
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.optimization.update import Update


def made(mixed: torch.dtype | None, *overrides: str) -> tuple[PipelineRuntime, Update]:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", ["scheduler=cosine", *overrides])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    placement = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", placement, 1)
    pipeline = PipelineRuntime(
        *(model, placement, schedule, SingleProcess(), F.cross_entropy, (3, 8, 8)),
        PipelineOptions(mixed=mixed),
    )
    return pipeline, Update(config, pipeline, batch=2, steps=4, steps_per_epoch=4)


def backward(pipeline: PipelineRuntime, update: Update, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(0)
    images = factor * torch.randn(2, 3, 8, 8, generator=draw)
    pipeline.train_step([Microbatch(2, 1.0, images, torch.tensor([0, 2]))], 0, update.scale)


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_only_float16_is_scaled(mixed):
    pipeline, update = made(mixed)
    assert (update.scaler, update.scale, update.log_values) == (None, 1.0, {})
    backward(pipeline, update)
    update.step()
    assert not update.skipped


def test_gradients_are_those_of_the_loss_itself():
    pipeline, update = made(torch.float16)
    plain, _ = made(None)
    backward(pipeline, update)
    scaled = [parameter.grad.clone() for parameter in pipeline.parameters()]
    update.step()
    backward(plain, made(None)[1])
    for large, own, exact in zip(scaled, pipeline.parameters(), plain.parameters(), strict=True):
        assert torch.equal(large / 65536, own.grad)
        torch.testing.assert_close(own.grad, exact.grad, rtol=1e-2, atol=1e-3)


def test_where_gradients_overflow_nothing_moves_but_the_scale():
    pipeline, update = made(torch.float16, "trainer.ema=0.5", "trainer.clip_norm=1")
    backward(pipeline, update)
    update.step()
    kept = [parameter.detach().clone() for parameter in pipeline.parameters()]
    averages = {name: value.clone() for name, value in update.average.state_dict().items()}
    rate = update.optimizer.param_groups[0]["lr"]
    backward(pipeline, update, factor=1e5)  # not in float16
    update.step()
    assert update.skipped
    assert update.log_values == {"loss_scale": 65536, "skipped": 1}
    assert update.scale == 32768
    assert all(map(torch.equal, kept, pipeline.parameters()))
    assert all(torch.equal(v, averages[name]) for name, v in update.average.state_dict().items())
    assert update.optimizer.param_groups[0]["lr"] == rate
    backward(pipeline, update)
    update.step()
    assert update.log_values == {"loss_scale": 32768, "skipped": 0}
    assert not any(map(torch.equal, kept, pipeline.parameters()))


def test_without_an_average_the_network_is_as_it_is():
    pipeline, update = made(None)
    before = [parameter.detach().clone() for parameter in pipeline.parameters()]
    with update.averaged():
        assert all(map(torch.equal, before, pipeline.parameters()))
