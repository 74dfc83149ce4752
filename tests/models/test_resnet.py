"""Convolutional classifiers: names, sizes and arithmetic as published."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spatialdl.models import (
    amoebanet_d,
    resnet18,
    resnet50,
    resnet110_v2,
    resnet_v2,
    unet,
    vit,
    wide_view,
)
from spatialdl.pipeline.recording import Forward
from tests.vision import need_timm


@pytest.mark.parametrize(("build", "name"), [(resnet18, "resnet18"), (resnet50, "resnet50")])
def test_names_and_arithmetic_are_torchvisions(build, name):
    need_timm()
    from torchvision import models

    torch.manual_seed(0)
    theirs, ours = models.get_model(name, num_classes=3).eval(), build(num_classes=3).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 65, 43)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (resnet18, 11_689_512),  # as torchvision's
        (resnet50, 25_557_032),
        (wide_view, 62_794),
        (lambda: unet(num_classes=2, in_channels=1), 31_036_546),  # of the paper
        (vit, 22_050_664 - (14 * 14 + 1) * 384),  # positions are not learned
        # Huang et al. 2019 (GPipe), table 1, in millions
        (lambda: amoebanet_d(1000, 3, 18, 208), 82e6),
        (lambda: amoebanet_d(1000, 3, 18, 544), 542e6),
    ],
)
def test_networks_have_the_parameters_that_were_published(build, parameters):
    with torch.device("meta"):
        found = sum(p.numel() for p in build().parameters())
    assert found == pytest.approx(parameters, rel=0.01 if isinstance(parameters, float) else 0)


@pytest.mark.parametrize(
    "network",
    [
        lambda: resnet18(3, 2, width=4),
        lambda: resnet50(3, 2, width=4),
        lambda: resnet_v2(20, num_classes=3, in_channels=2, width=2),
        lambda: amoebanet_d(3, 2, layers=3, filters=16),
        lambda: wide_view(num_classes=3, in_channels=2, width=1),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (65, 33)])
def test_images_of_any_size_give_every_weight_finite_gradients(network, size):
    torch.manual_seed(0)
    model = network()
    output = model(torch.randn(3, 2, *size))
    assert output.shape == (3, 3)
    F.cross_entropy(output, torch.tensor([0, 1, 2])).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# --- ResNet v2


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
    # only the first block leaves its activation to the stem
    bodies = [dict(block.body.named_children()) for stage in stages for block in stage]
    assert ["bn1" in body for body in bodies] == [False] + [True] * 35


def test_stages_have_the_papers_channels_and_strides():
    with torch.device("meta"):
        network = resnet_v2(20)
    for stage, before, width, after, stride in (
        *((1, 16, 16, 64, 1), (2, 64, 64, 128, 2), (3, 128, 128, 256, 2)),
    ):
        for index, channels, step in ((0, before, stride), (1, after, 1)):
            block = network.get_submodule(f"layer{stage}.{index}")
            found = [one for one in block.modules() if isinstance(one, nn.Conv2d)]
            shapes = [(one.in_channels, one.out_channels, one.stride[0]) for one in found]
            shortcut = [(before, after, stride)] * (index == 0)
            body = [(channels, width, step), (width, width, 1), (width, after, 1)]
            assert sorted(shapes) == sorted([*body, *shortcut])


def test_a_block_with_activations_first_is_the_papers_arithmetic():
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


# --- AmoebaNet-D and a network of whole slides


def test_amoebanet_can_be_cut_before_every_cell():
    model = amoebanet_d(layers=3, filters=16).eval()
    steps = Forward(model, (3, 64, 64)).of(2, training=True).steps
    names = "stem.conv stem.norm stem_reduction1 stem_reduction2"
    names += " group1_cell1 reduction1 group2_cell1 reduction2 group3_cell1 head"
    assert [step.call for step in steps] == names.split()
    y, before = model[:3](torch.randn(2, 3, 65, 33))
    assert (y.shape[-2:], before.shape[-2:]) == ((9, 5), (17, 9))


def test_a_place_of_the_last_map_of_the_wide_view_sees_1279_pixels():
    network = wide_view(width=2).double().eval()
    body = nn.Sequential(*list(network.children())[:-3])
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.weight, 0.01)  # nothing cancels, ReLU lets everything through
    image = torch.rand(1, 3, 1, 4096, dtype=torch.float64, requires_grad=True)
    body(image)[0, :, 0, 16].sum().backward()
    seen = (image.grad.abs().sum((0, 1, 2)) > 0).nonzero().ravel()
    # max pooling hands on one of three neighbours, so at the ends a few may be missing
    assert 1279 - 2 * 15 <= int(seen[-1] - seen[0]) + 1 <= 1279


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: resnet_v2(18), r"9 n \+ 2 layers.*but depth is 18: use"),
        (lambda: resnet_v2(2), r"9 n \+ 2 layers.*but depth is 2: use"),
        (lambda: amoebanet_d(layers=4), "4"),
        (lambda: amoebanet_d(layers=0), "0"),
        (lambda: amoebanet_d(filters=24), "24"),
    ],
)
def test_sizes_that_make_no_network_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()
