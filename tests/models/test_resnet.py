from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spatialdl.models import ResNet, resnet18, resnet50

BN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def torchvision_names(depth: int) -> list[str]:
    """The keys of torchvision's state dicts, in their order."""
    convolutions = 2 if depth == 18 else 3
    names = ["conv1.weight", *(f"bn1.{k}" for k in BN)]
    for stage, count in enumerate(STAGES[depth], 1):
        for index in range(count):
            block = f"layer{stage}.{index}"
            for i in range(1, convolutions + 1):
                names += [f"{block}.conv{i}.weight", *(f"{block}.bn{i}.{k}" for k in BN)]
            if index == 0 and (stage > 1 or depth == 50):
                names += [f"{block}.downsample.0.weight"]
                names += [f"{block}.downsample.1.{k}" for k in BN]
    return [*names, "fc.weight", "fc.bias"]


RESNET18_CONVOLUTIONS = [
    "conv1.weight",
    "layer1.0.conv1.weight",
    "layer1.0.conv2.weight",
    "layer1.1.conv1.weight",
    "layer1.1.conv2.weight",
    "layer2.0.conv1.weight",
    "layer2.0.conv2.weight",
    "layer2.0.downsample.0.weight",
    "layer2.1.conv1.weight",
    "layer2.1.conv2.weight",
    "layer3.0.conv1.weight",
    "layer3.0.conv2.weight",
    "layer3.0.downsample.0.weight",
    "layer3.1.conv1.weight",
    "layer3.1.conv2.weight",
    "layer4.0.conv1.weight",
    "layer4.0.conv2.weight",
    "layer4.0.downsample.0.weight",
    "layer4.1.conv1.weight",
    "layer4.1.conv2.weight",
]


@pytest.mark.parametrize(
    ("build", "depth", "parameters"), [(resnet18, 18, 11_689_512), (resnet50, 50, 25_557_032)]
)
def test_names_and_sizes_are_torchvisions(build, depth, parameters):
    with torch.device("meta"):
        network = build()
    assert list(network.state_dict()) == torchvision_names(depth)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_convolutions_of_resnet18_one_by_one():
    with torch.device("meta"):
        names = [k for k, v in resnet18().state_dict().items() if v.ndim == 4]
    assert names == RESNET18_CONVOLUTIONS


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("conv1.weight", (64, 3, 7, 7)),
        ("layer1.0.conv1.weight", (64, 64, 1, 1)),
        ("layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        ("layer2.0.conv2.weight", (128, 128, 3, 3)),
        ("layer4.2.conv3.weight", (2048, 512, 1, 1)),
        ("fc.weight", (1000, 2048)),
    ],
)
def test_shapes_of_resnet50_are_torchvisions(key, shape):
    with torch.device("meta"):
        assert resnet50().state_dict()[key].shape == shape


def test_stride_of_a_bottleneck_sits_in_its_3x3_convolution():
    block = resnet50(width=2).get_submodule("layer2.0")
    strides = [m.stride[0] for m in block.modules() if isinstance(m, nn.Conv2d)]
    assert strides == [1, 2, 1, 2]  # conv1, conv2, conv3, downsample


def test_children_are_a_chain_that_can_be_cut_anywhere():
    torch.manual_seed(0)
    network = resnet18(num_classes=5, width=4).double()
    names = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]
    names += ["avgpool", "flatten", "fc"]
    assert [name for name, _ in network.named_children()] == names
    assert type(network).forward is nn.Sequential.forward
    x = torch.randn(2, 3, 33, 47, dtype=torch.float64)
    network(x).square().sum().backward()
    whole = [p.grad.clone() for p in network.parameters()]
    for cut in range(1, len(names)):
        network.zero_grad()
        handed_over = network[:cut](x)
        received = handed_over.detach().requires_grad_()
        second = network[cut:]
        assert isinstance(second, ResNet)
        second(received).square().sum().backward()
        handed_over.backward(received.grad)
        for gradient, p in zip(whole, network.parameters(), strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("build", [resnet18, resnet50])
@pytest.mark.parametrize("size", [(1, 1), (31, 45), (64, 97)])
def test_any_size_gives_finite_gradients(build, size):
    torch.manual_seed(0)
    network = build(num_classes=3, in_channels=1, width=4)
    loss = F.cross_entropy(network(torch.randn(3, 1, *size)), torch.tensor([0, 1, 2]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


def test_basic_block_is_the_papers_arithmetic():
    torch.manual_seed(0)
    block = resnet18(width=3).get_submodule("layer2.0").eval()
    weights = block.state_dict()
    x = torch.randn(2, 3, 9, 7)

    def norm(y, name):
        keys = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(y, *(weights[f"{name}.{k}"] for k in keys))

    y = F.relu(norm(F.conv2d(x, weights["conv1.weight"], stride=2, padding=1), "bn1"))
    y = norm(F.conv2d(y, weights["conv2.weight"], padding=1), "bn2")
    y = y + norm(F.conv2d(x, weights["downsample.0.weight"], stride=2), "downsample.1")
    torch.testing.assert_close(block(x), F.relu(y))


def test_bottleneck_is_the_papers_arithmetic():
    torch.manual_seed(0)
    block = resnet50(width=2).get_submodule("layer1.1").eval()
    x = torch.randn(2, 8, 5, 6)
    y = F.relu(block.bn1(F.conv2d(x, block.conv1.weight)))
    y = F.relu(block.bn2(F.conv2d(y, block.conv2.weight, padding=1)))
    y = block.bn3(F.conv2d(y, block.conv3.weight))
    torch.testing.assert_close(block(x), F.relu(y + x))


def test_meta_device_needs_no_memory():
    with torch.device("meta"):
        assert resnet50()(torch.empty(1, 3, 50_001, 40_000)).shape == (1, 1000)
