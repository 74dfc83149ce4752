from __future__ import annotations

import pytest
import torch
from torch import nn

import spatialdl
from spatialdl.bench import overhead
from spatialdl.spatial import SpatialTensor


class Seen(nn.Module):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x)
        return self.norm(self.conv(x)).relu().mean((2, 3))


@pytest.mark.parametrize(("ranks", "whole"), [(1, (8, 8)), (2, (16, 8)), (4, (16, 16))])
def test_sides_alternate_on_a_tile_of_the_same_size(ranks, whole):
    network = Seen()
    plain, split = overhead.compare(network, ranks, size=8, batch=2, rounds=2)
    assert len(plain) == len(split) == 2
    tiles, images = network.inputs[::2], network.inputs[1::2]
    assert all(type(one) is torch.Tensor and one.shape == (2, 3, 8, 8) for one in tiles)
    for one in images:
        assert isinstance(one, SpatialTensor)
        assert one.shape == (2, 3, *whole)
        assert one.to_local().shape == (2, 3, 8, 8)


def test_a_network_of_small_operations_is_the_same_on_one_rank():
    torch.manual_seed(0)
    network = overhead.efficientnet_b0(num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    split = spatialdl.shard(images, spatialdl.init_mesh((1, 1)))
    assert torch.equal(network(split), network(images))


def test_the_table(capsys):
    overhead.main(["--size", "32", "--batch", "2", "--rounds", "1", "--ranks", "1"])
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[:2] for line in lines] == [[name, "1"] for name in overhead.NETWORKS]
    with pytest.raises(ValueError, match="at least 1"):
        overhead.main(["--rounds", "0"])
