"""Updates of one process: scaled gradients, precision and averages of weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training import checks
from spatialdl.training.optimization.precision import (
    PRECISIONS,
    LossScaler,
    precision_of,
    set_arithmetic,
)
from spatialdl.training.optimization.update import Update, WeightAverage
from tests.composing import composed


def made(mixed: torch.dtype | None, *words: str) -> tuple[PipelineRuntime, Update]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    placement = Placement(1, ((1, 1),))
    schedule = make_schedule("gpipe", placement, 1)
    pipeline = PipelineRuntime(
        *(model, placement, schedule, SingleProcess(), F.cross_entropy, (3, 8, 8)),
        PipelineOptions(mixed=mixed),
    )
    config = composed("train", "scheduler=cosine", *words)
    return pipeline, Update(config, pipeline, steps=4)


def backward(pipeline: PipelineRuntime, update: Update, factor: float = 1.0) -> None:
    images = factor * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pipeline.train_step([Microbatch(2, 1.0, images, torch.tensor([0, 2]))], 0, update.scale)


def copied(values: object) -> list[torch.Tensor]:
    return [value.detach().clone() for value in values]


def test_where_gradients_overflow_nothing_moves_but_the_scale():
    pipeline, update = made(torch.float16, "trainer.ema=0.5", "trainer.clip_norm=1")
    backward(pipeline, update)
    update.step()
    kept, averages = copied(pipeline.parameters()), copied(update.average.state_dict().values())
    rate = update.optimizer.param_groups[0]["lr"]
    backward(pipeline, update, factor=1e5)  # not in float16
    update.step()
    assert update.skipped
    assert update.log_values == {"loss_scale": 65536, "skipped": 1}
    assert update.scale == 32768
    assert all(map(torch.equal, kept, pipeline.parameters()))
    assert all(map(torch.equal, averages, update.average.state_dict().values()))
    assert update.optimizer.param_groups[0]["lr"] == rate
    backward(pipeline, update)
    update.step()
    assert update.log_values == {"loss_scale": 32768, "skipped": 0}
    assert not any(map(torch.equal, kept, pipeline.parameters()))


# --- averages


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def average_of(model: nn.Module, decay: float = 0.9) -> WeightAverage:
    return WeightAverage(dict(model.named_parameters()), decay)


def change(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.cos(parameter + step))


def test_the_average_is_that_of_pytorch():
    model = network()
    ours = average_of(model)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first time it copies
    for step in range(5):
        change(model, step)
        ours.update()
        theirs.update_parameters(model)
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ours.state_dict()[name], value.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_s_own_weights_come_back_bit_for_bit(fails):
    model = network()
    average = average_of(model)
    change(model, 0)
    average.update()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in average.state_dict().items()}
    try:
        with average.swapped():
            for name, value in model.named_parameters():
                assert torch.equal(value, averages[name])
                assert not torch.equal(value, before[name])
            if fails:  # as a validation may
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(v, averages[name]) for name, v in average.state_dict().items())


# --- precision


def test_the_command_knows_all_precisions_and_weights_are_never_of_half_precision():
    assert tuple(PRECISIONS) == checks.PRECISIONS
    for name, found in PRECISIONS.items():
        assert precision_of(name, torch.device("cpu")) == found
        assert found.dtype == (torch.float64 if name == "float64" else torch.float32)


def test_an_old_gpu_is_told_to_take_fp16(monkeypatch):
    emulates = lambda including_emulation: including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulates)
    tesla = SimpleNamespace(name="Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: tesla)
    with pytest.raises(ValueError, match=r"Tesla T4, which has no torch.bfloat16: use fp16-mixed"):
        precision_of("bf16-mixed", torch.device("cuda", 0))
    assert precision_of("fp16-mixed", torch.device("cuda", 0)).mixed is torch.float16


@pytest.fixture
def as_before(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    yield
    set_arithmetic(tf32=False, deterministic=False)
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("chosen", [True, False])
def test_arithmetic_is_as_it_is_asked_for(chosen, as_before):
    set_arithmetic(tf32=chosen, deterministic=chosen, cudnn_benchmark=not chosen)
    assert torch.backends.cuda.matmul.allow_tf32 is chosen
    cudnn = torch.backends.cudnn
    assert (cudnn.allow_tf32, cudnn.benchmark) == (chosen, not chosen)
    assert torch.are_deterministic_algorithms_enabled() is chosen
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    if chosen:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert cudnn.deterministic
        set_arithmetic(tf32=False, deterministic=False)
        assert not torch.are_deterministic_algorithms_enabled()


def test_the_scale_is_that_of_pytorch_and_goes_on_where_it_was():
    ours = LossScaler(scale=2.0**5, interval=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**5, growth_interval=4)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in "....x.....xx....":
        assert ours.scale == theirs.get_scale()
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((1,), torch.inf if step == "x" else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=step != "x")
        state, ours = ours.state_dict(), LossScaler(1.0, 4)
        assert all(type(value) in (int, float) for value in state.values())
        ours.load_state_dict(state)
