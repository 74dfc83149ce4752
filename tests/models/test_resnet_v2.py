from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spatialdl.models import ResNetV2, resnet110_v2, resnet_v2


def on_meta(depth: int) -> ResNetV2:
    with torch.device("meta"):
        return resnet_v2(depth)


def test_resnet110_has_110_layers():
    with torch.device("meta"):
        network = resnet110_v2()
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and not name.endswith("shortcut")
    ]
    assert len(layers) == 110
    stages = [network.get_submodule(f"layer{i}") for i in (1, 2, 3)]
    assert [len(stage) for stage in stages] == [12, 12, 12]


def test_stages_have_the_papers_channels_and_strides():
    network = on_meta(20)
    convolutions = {
        name: (m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0])
        for name, m in network.named_modules()
        if isinstance(m, nn.Conv2d)
    }
    expected = {"conv1": (3, 16, 3, 1)}
    rows = [(1, 16, 16, 64, 1), (2, 64, 64, 128, 2), (3, 128, 128, 256, 2)]
    for stage, before, width, after, stride in rows:
        for index in (0, 1):
            first = index == 0
            name, channels = f"layer{stage}.{index}", before if first else after
            expected[f"{name}.body.conv1"] = (channels, width, 1, stride if first else 1)
            expected[f"{name}.body.conv2"] = (width, width, 3, 1)
            expected[f"{name}.body.conv3"] = (width, after, 1, 1)
            if first:
                expected[f"{name}.shortcut"] = (before, after, 1, stride)
    assert convolutions == expected


def test_only_the_first_block_leaves_its_activation_to_the_stem():
    network = on_meta(20)
    blocks = [block for i in (1, 2, 3) for block in network.get_submodule(f"layer{i}")]
    assert ["bn1" in dict(block.body.named_children()) for block in blocks] == [False] + [True] * 5


def test_block_is_the_papers_arithmetic():
    torch.manual_seed(0)
    block = resnet_v2(11, width=2).get_submodule("layer2.0").double().eval()
    x = torch.randn(2, 8, 9, 7, dtype=torch.float64)
    kept, body = x.clone(), block.body
    y = F.conv2d(F.relu(body.bn1(x)), body.conv1.weight, stride=2)
    y = F.conv2d(F.relu(body.bn2(y)), body.conv2.weight, padding=1)
    y = F.conv2d(F.relu(body.bn3(y)), body.conv3.weight)
    y = y + F.conv2d(x, block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), y)
    assert torch.equal(x, kept)  # the activations in place touch nothing of the caller's


def test_children_are_a_chain_that_can_be_cut_anywhere():
    torch.manual_seed(0)
    network = resnet_v2(11, width=2).double()
    names = ["conv1", "bn1", "relu1", "layer1", "layer2", "layer3"]
    names += ["bn2", "relu2", "avgpool", "flatten", "fc"]
    assert [name for name, _ in network.named_children()] == names
    x = torch.randn(2, 3, 15, 18, dtype=torch.float64)
    network(x).square().sum().backward()
    whole = [p.grad.clone() for p in network.parameters()]
    for cut in range(1, len(names)):
        network.zero_grad()
        handed_over = network[:cut](x)
        received = handed_over.detach().requires_grad_()
        network[cut:](received).square().sum().backward()
        handed_over.backward(received.grad)
        for gradient, p in zip(whole, network.parameters(), strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (17, 5), (32, 32), (50, 33)])
def test_any_size_gives_finite_gradients(size):
    torch.manual_seed(0)
    network = resnet_v2(20, num_classes=3, in_channels=2, width=2)
    loss = F.cross_entropy(network(torch.randn(3, 2, *size)), torch.tensor([2, 1, 0]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize("depth", [2, 18, 112, -7])
def test_depth_must_be_nine_n_plus_two(depth):
    with pytest.raises(ValueError, match=f"9 n \\+ 2 layers.*but depth is {depth}: use"):
        resnet_v2(depth)
