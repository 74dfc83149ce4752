from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.parts import RunParts
from spatialdl.training.pictures.activation import Activations
from tests.mpi.training.small import small

HERE = "tests.training.pictures.test_activation"


def parts(network: str) -> RunParts:
    words = [f"++model._target_={network}", "~model.width", "data.image_size=[23,19]"]
    words += ["data.num_classes=3", "trainer.precision=float64", "trainer.max_steps=1"]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return RunParts(compose("train", [*words, "device=cpu"]), SingleProcess())


def evaluated(network: str, images: Tensor, all_classes: bool) -> tuple[Activations, Tensor]:
    """After a bias has been set by which classes differ from image to image."""
    pipeline = parts(network).pipeline
    batch = Microbatch(len(images), 1.0, images, torch.zeros(len(images)))
    if hasattr(pipeline.stages[0], "fc"):
        pipeline.stages[0].fc.bias.data -= pipeline.evaluate([batch])[0].mean(0)
    watch = Activations(pipeline, all_classes=all_classes)
    return watch, pipeline.evaluate([batch])[0]


IMAGES = torch.rand(5, 3, 23, 19, dtype=torch.float64, generator=torch.manual_seed(0))


def test_the_mean_of_a_map_is_the_logit():
    watch, output = evaluated("tests.mpi.training.small.small", IMAGES, all_classes=True)
    seen = watch.take(output)
    assert seen.size == (6, 5)
    assert seen.values.shape == (5, 3, 6, 5)
    assert torch.allclose(seen.values.mean((2, 3)), output, rtol=0, atol=1e-12)
    assert not seen.is_split
    watch, output = evaluated("tests.mpi.training.small.small", IMAGES, all_classes=False)
    only = watch.take(output)
    assert only.values.shape == (5, 6, 5)
    assert torch.equal(only.logits, output)
    classes = output.argmax(1)
    assert len(set(classes.tolist())) > 1
    expected = seen.values[range(5), classes]
    assert torch.allclose(only.values, expected, rtol=0, atol=1e-12)


def test_a_closed_one_sees_nothing():
    ours = parts("tests.mpi.training.small.small")
    watch = Activations(ours.pipeline, all_classes=False)
    watch.close()
    output = ours.pipeline.evaluate([Microbatch(5, 1.0, IMAGES, torch.zeros(5))])[0]
    assert watch.take(output) is None
    assert not any(module._forward_hooks for module in ours.pipeline.stages[0].modules())


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


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * x)


@pytest.mark.parametrize("network", ["nested", "of_a_pair"])
def test_a_map_may_be_seen_only_where_it_is_pooled(network):
    watch, output = evaluated(f"{HERE}.{network}", IMAGES, all_classes=True)
    seen = watch.take(output)
    assert not watch.refusal
    assert seen.values.shape == (5, 3, 21, 17)
    assert torch.allclose(seen.values.mean((2, 3)), output, rtol=0, atol=1e-12)


def ends_with_a_map(num_classes: int, in_channels: int) -> nn.Sequential:
    head = [nn.Conv2d(in_channels, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*head)


def flattens(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3), nn.Flatten(), nn.Linear(4 * 21 * 17, num_classes)
    )


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
    watch, output = evaluated(f"{HERE}.{network}", IMAGES, all_classes=False)
    assert watch.take(output) is None
    assert watch.refusal == why
