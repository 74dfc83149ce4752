"""Maps of which a class's score is the mean."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from spatialdl.inference.predicting.activation import Activations
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from tests.fitting import make_parts
from tests.mpi.training.small import small

HERE = "tests.inference.predicting.test_activation"
SMALL = "tests.mpi.training.small.small"
DRAW = torch.Generator().manual_seed(0)
IMAGES = torch.rand(5, 3, 23, 19, dtype=torch.float64, generator=DRAW)


def pipeline_of(network: str) -> PipelineRuntime:
    given = ("~model.width", "data.num_classes=3", "trainer.precision=float64", "device=cpu")
    size = ("data.image_size=[23,19]", "trainer.max_steps=1")
    return make_parts(f"++model._target_={network}", *given, *size).pipeline


def evaluated(network: str) -> tuple[Activations, Tensor]:
    pipeline = pipeline_of(network)
    watch = Activations(pipeline)
    batch = Microbatch(len(IMAGES), 1.0, IMAGES, torch.zeros(len(IMAGES)))
    return watch, pipeline.evaluate([batch])[0]


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * x)


def nested(num_classes: int, in_channels: int) -> nn.Sequential:
    """Its last map is an input only, of a layer of a layer."""
    body = nn.Sequential(nn.Conv2d(in_channels, 6, 3), Squared(), nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, fc=nn.Linear(6, num_classes)))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1


class Second(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[1].mean((2, 3))


def of_a_pair(num_classes: int, in_channels: int) -> nn.Sequential:
    layers = [nn.Conv2d(in_channels, 6, 3), Twice(), Second(), nn.Linear(6, num_classes)]
    return nn.Sequential(OrderedDict(zip("abcd", layers, strict=True)))


@pytest.mark.parametrize(
    ("network", "size"),
    [(SMALL, (6, 5)), (f"{HERE}.nested", (21, 17)), (f"{HERE}.of_a_pair", (21, 17))],
)
def test_the_mean_of_a_map_is_the_logit(network, size):
    watch, output = evaluated(network)
    seen = watch.take(output)
    assert (seen.size, seen.values.shape) == (size, (5, 3, *size))
    torch.testing.assert_close(seen.values.mean((2, 3)), output, rtol=0, atol=1e-12)
    assert not seen.is_split
    assert not watch.refusal
    assert torch.equal(seen.logits, output)


def test_a_closed_one_sees_nothing():
    pipeline = pipeline_of(SMALL)
    watch = Activations(pipeline)
    watch.close()
    assert watch.take(pipeline.evaluate([Microbatch(5, 1.0, IMAGES, torch.zeros(5))])[0]) is None
    assert not any(module._forward_hooks for module in pipeline.stages[0].modules())


def ends_with_a_map(num_classes: int, in_channels: int) -> nn.Sequential:
    head = [nn.Conv2d(in_channels, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*head)


def flattens(num_classes: int, in_channels: int) -> nn.Sequential:
    head = nn.Linear(4 * 21 * 17, num_classes)
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.Flatten(), head)


def pools_the_most(num_classes: int, in_channels: int) -> nn.Sequential:
    network = small(num_classes, in_channels)
    network.pool = nn.AdaptiveMaxPool2d(1)
    return network


def has_two_layers(num_classes: int, in_channels: int) -> nn.Sequential:
    end = nn.Sequential(nn.ReLU(), nn.Linear(6, num_classes))
    return nn.Sequential(OrderedDict(body=small(6, in_channels), end=end))


def goes_on(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(body=small(num_classes, in_channels), end=nn.Softplus()))


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ("ends_with_a_map", "the last stage has no linear layer"),
        ("flattens", "the input of its last linear layer is not one number per map channel"),
        ("pools_the_most", "the input of its last linear layer is not the mean of a feature map"),
        ("has_two_layers", "the input of its last linear layer is not the mean of a feature map"),
        ("goes_on", "its output is not that of its last linear layer"),
    ],
)
def test_networks_without_such_an_end_are_refused(network, why):
    watch, output = evaluated(f"{HERE}.{network}")
    assert watch.take(output) is None
    assert watch.refusal == why
