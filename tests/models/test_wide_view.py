from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.models import wide_view


def test_its_size():
    with torch.device("meta"):
        network = wide_view()
    assert sum(p.numel() for p in network.parameters()) == 62_794


def test_a_place_of_the_last_map_sees_1279_pixels():
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


@pytest.mark.parametrize("size", [(2048, 2048), (256, 256), (97, 301)])
def test_images_of_any_size(size):
    network = wide_view(num_classes=3, in_channels=1, width=1).eval()
    assert network(torch.rand(1, 1, *size)).shape == (1, 3)
