from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from spatialdl.training import checks
from spatialdl.training.optimization.precision import (
    PRECISIONS,
    LossScaler,
    precision_of,
    set_arithmetic,
)

CPU = torch.device("cpu")


def test_the_command_knows_all_precisions():
    assert tuple(PRECISIONS) == checks.PRECISIONS


@pytest.mark.parametrize(
    ("name", "dtype", "mixed"),
    [
        ("float32", torch.float32, None),
        ("float64", torch.float64, None),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float16),
    ],
)
def test_weights_are_never_of_half_precision(name, dtype, mixed):
    assert precision_of(name, CPU) == (found := PRECISIONS[name])
    assert (found.dtype, found.mixed) == (dtype, mixed)


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


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_for_products_and_convolutions_alike(tf32, as_before):
    set_arithmetic(tf32=tf32, deterministic=False)
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_gives_other_bits_the_next_time_is_refused(as_before):
    set_arithmetic(tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    set_arithmetic(tf32=False, deterministic=False)
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.parametrize("chosen", [True, False])
def test_algorithms_of_cudnn_are_timed_where_it_is_asked_for(chosen, as_before):
    set_arithmetic(tf32=False, deterministic=False, cudnn_benchmark=chosen)
    assert torch.backends.cudnn.benchmark is chosen


def run(scaler: LossScaler, steps: str) -> list[float]:
    """Scales of steps, of which those with an x overflow."""
    scales = []
    for step in steps:
        scales.append(scaler.scale)
        scaler.update(is_finite=step != "x")
    return scales


def test_the_scale_shrinks_with_overflows_and_grows_without():
    scaler = LossScaler(scale=8.0, interval=3)
    assert run(scaler, "..x...x") == [8, 8, 8, 4, 4, 4, 8]
    assert scaler.scale == 4


def test_the_scale_is_that_of_pytorch():
    ours = LossScaler(scale=2.0**5, interval=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**5, growth_interval=4)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in "....x.....xx....":
        assert ours.scale == theirs.get_scale()
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((1,), torch.inf if step == "x" else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_finite=step != "x")


def test_the_scale_never_vanishes():
    assert run(LossScaler(scale=2.0), "xxx") == [2, 1, 1]


def test_a_scaler_goes_on_where_it_was():
    whole, first = LossScaler(8.0, 3), LossScaler(8.0, 3)
    expected = run(whole, "..x.....")
    found = run(first, "..x..")
    state = first.state_dict()
    assert all(type(value) in (int, float) for value in state.values())
    second = LossScaler(1.0, 3)
    second.load_state_dict(state)
    assert found + run(second, "...") == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: TF32 is in its hardware")
def test_tf32_rounds_on_a_gpu(as_before):
    x = torch.randn(64, 64, device="cuda")
    exact = x.double() @ x.double()
    errors = []
    for tf32 in (False, True):
        set_arithmetic(tf32=tf32, deterministic=False)
        errors.append(float((x @ x - exact).abs().max()))
    assert errors[0] < 1e-4
    if torch.cuda.get_device_capability()[0] >= 8:
        assert errors[1] > 10 * errors[0]
