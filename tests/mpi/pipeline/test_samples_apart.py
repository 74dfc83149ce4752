"""Networks that mix samples divided over ranks are refused by name, and only these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from tests.mpi.sample_networks import (
    Averages,
    Centred,
    CentredInEvaluation,
    LouderNorm,
    OwnNorm,
    chain,
    conv,
)

pytestmark = pytest.mark.world(3)
LOCAL = Placement(1, ((1, 1),) * 2, batch=(1, 2))
REPLICAS = Placement(3, ((1, 1),))


class Does(nn.Module):
    """A function of features (N, C)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Prototype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


MIXES = {
    "mean": lambda x: x - x.mean(0),
    "a little of the mean": lambda x: x + 1e-9 * x.mean(0),
    "fmax": lambda x: x + torch.fmax(x[:1], x[-1:]),
    "x @ x.T @ x": lambda x: x @ x.T @ x,
    "softmax": lambda x: x.softmax(0),
    "flatten": lambda x: x.flatten().softmax(0).view_as(x),
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "cdist": lambda x: x + torch.cdist(x, x).sum(1, keepdim=True),
    "first sample": lambda x: x + x[:1],
    "argsort": lambda x: x[x[:, 0].argsort()],
    "number of samples": lambda x: x / len(x),
    "position": lambda x: x + torch.arange(len(x)).view(-1, 1),
    "refuses NaN": lambda x: x - x.mean(0) if x.is_meta or math.isfinite(x.sum()) else 1 / 0,
}

APART = {
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1).values,
    "log": lambda x: x.log(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "tokens": lambda x: x.unflatten(1, (2, 3)).mT.flatten(1),
    "samples last": lambda x: x.T.contiguous().cumsum(0).T,
    "dropout": lambda x: F.dropout(x, 0.3) * torch.rand(len(x), 1, dtype=x.dtype),
}


def pipeline(
    model: nn.Module,
    placement: Placement,
    world: MPI.Intracomm,
    cut: list[str] | None = None,
    sync: bool = False,
) -> PipelineRuntime:
    schedule = make_schedule("gpipe", placement, 1)
    size = (3, 9, 7)
    return PipelineRuntime(
        *(model.double(), placement, schedule, world, F.cross_entropy, size),
        PipelineOptions(cut=cut, sync_batchnorm=sync),
    )


def features(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """The stage that divides samples begins with the linear layer."""
    stem = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*stem, nn.Linear(6, 6), Does(function), nn.Linear(6, 5))


@pytest.mark.parametrize("function", MIXES.values(), ids=MIXES)
def test_a_stage_that_mixes_samples_is_refused(
    function: Callable[[Tensor], Tensor], world: MPI.Intracomm
) -> None:
    what = r"parallel.local_dp=2 divides .* BatchNorm, in the output of stage 1"
    with pytest.raises(UnsupportedSpatialOp, match=what):
        pipeline(features(function), LOCAL, world, ["4"])


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_a_stage_that_does_not_is_taken(
    function: Callable[[Tensor], Tensor], world: MPI.Intracomm
) -> None:
    pipeline(features(function), LOCAL, world, ["4"])


def test_a_buffer_that_depends_on_samples_is_refused(world: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, (9, 7)), nn.Flatten(), Prototype(), nn.Linear(6, 5))
    pipeline(features(MIXES["mean"]), LOCAL, world, ["6"])  # before they are divided
    with pytest.raises(UnsupportedSpatialOp, match=r"'2\.mean', a buffer, of stage 1"):
        pipeline(model, LOCAL, world, ["1"])


@pytest.mark.parametrize("layer", [Centred, Averages, CentredInEvaluation])
def test_synchronised_replicas_may_not_mix_otherwise(
    layer: type[nn.Module], world: MPI.Intracomm
) -> None:
    with pytest.raises(UnsupportedSpatialOp, match=r"sync_batchnorm=true .* of 3 replicas"):
        pipeline(chain(layer()), REPLICAS, world, sync=True)
    pipeline(chain(layer()), REPLICAS, world)


def test_what_was_tried_leaves_no_trace(world: MPI.Intracomm) -> None:
    model = chain(OwnNorm(6), nn.Dropout(), conv())
    model[2].calls = 3
    state = {name: value.clone() for name, value in model.double().state_dict().items()}
    before = torch.get_rng_state()
    pipeline(model, LOCAL, world, ["2"])
    assert torch.equal(before, torch.get_rng_state())
    assert model[2].calls == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.world(4)
def test_images_that_are_cut_are_tried_so(world: MPI.Intracomm) -> None:
    placement = Placement(2, ((1, 2),))
    with pytest.raises(UnsupportedSpatialOp, match=r"sync_batchnorm=.* the output of stage 0"):
        pipeline(chain(Centred()), placement, world, sync=True)
    pipeline(
        chain(LouderNorm(6), nn.Dropout2d(), nn.InstanceNorm2d(6)), placement, world, sync=True
    )
