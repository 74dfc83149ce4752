from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spatialdl
from spatialdl.channels.tensor import is_divided
from spatialdl.channels.weights import weights_of
from tests.mpi.channels.divided import WORLD, assert_as_whole, channels, within

SIZE = 2 * WORLD.size + 1


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def other(x: Tensor, *shape: int) -> Tensor:
    """On the device of `x`: the whole one may be on another than the parts."""
    return drawn(*shape, seed=4).to(x.device)


PRODUCTS = {
    "channels in place": lambda x: torch.einsum("bchw,cd->bdhw", x, other(x, SIZE, 7)),
    "the matrix first": lambda x: torch.einsum("dc,bchw->bdhw", other(x, 7, SIZE), x),
    "as a list": lambda x: torch.einsum("bchw,cd->bdhw", [x, other(x, SIZE, 7)]),
    "fewer channels than ranks": lambda x: torch.einsum("bchw,cd->bdhw", x, other(x, SIZE, 1)),
    "each channel": lambda x: torch.einsum("bchw,c->bchw", x, other(x, SIZE)),
    "channels behind": lambda x: torch.einsum("bchw,hd->bwdc", x, other(x, 3, 4)),
    "itself": lambda x: torch.einsum("bchw,bchv->bcwv", x, x),
    "sums over channels": lambda x: torch.einsum("bchw,bchv->bwv", x, x),
    "two dims in place of one": lambda x: torch.einsum("bchw,cde->bdehw", x, other(x, SIZE, 2, 3)),
    "three operands": lambda x: torch.einsum("bchw,c,h->bchw", x, other(x, SIZE), other(x, 3)),
    "dots": lambda x: torch.einsum("bc...,cd->bd...", x, other(x, SIZE, 7)),
    "without an arrow": lambda x: torch.einsum("bchw,cd", x, other(x, SIZE, 7)),
    "a size of one": lambda x: torch.einsum("bchw,xc->bchw", x, other(x, 2, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_einsum_of_divided_channels(name: str):
    assert_as_whole(PRODUCTS[name], drawn(2, SIZE, 3, 4))


@pytest.mark.parametrize("name", ["each channel", "channels behind", "itself", "three operands"])
def test_einsum_needs_all_channels_nowhere(name: str):
    assert is_divided(assert_as_whole(within(PRODUCTS[name]), drawn(2, SIZE, 3, 4)))


class _Mixed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(drawn(8, 6))
        self.head = nn.Linear(6, 2)
        self.equation = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.equation == "bhwc,cd->bhwd":
            x = torch.einsum(self.equation, x.permute(0, 2, 3, 1), self.weight).permute(0, 3, 1, 2)
        else:
            x = torch.einsum(self.equation, x, self.weight)
        return self.head(x.square().mean((2, 3)))


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("equation", ["bchw,cd->bdhw", "bhwc,cd->bhwd"])
def test_einsum_of_split_images_with_divided_channels(equation: str):
    """PyTorch's function calls another of the same name, which no table of split images knows."""
    grid = (WORLD.size // 2, 1)
    reference, x = _Mixed(equation).double(), drawn(1, 3, 8, 9)
    network = _Mixed(equation).double()
    network.load_state_dict(reference.state_dict())
    mesh = spatialdl.init_mesh(grid=grid, tensor=2)
    parallel = spatialdl.SpatialParallel(network, mesh)
    reference.load_state_dict(WORLD.bcast(reference.state_dict()))
    given, expected = parallel(spatialdl.shard(x, mesh)), reference(x)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    assert network.weight.shape == (8, 6)
    assert dict(network.named_parameters())["weight"].numel() == 24
    for one in (given, expected):
        one.square().sum().backward()
    whole = _whole_gradient(network, "weight")
    torch.testing.assert_close(whole, reference.weight.grad, rtol=0, atol=1e-12)


def _whole_gradient(network: nn.Module, name: str) -> Any:
    weight = weights_of(network)[name]
    return weight.whole(weight.part.grad)


@pytest.mark.parametrize("source", ["itself", "whole", "broadcast"])
def test_copies_into_a_part(source: str):
    """It was refused, as if it wrote into a copy."""

    def copied(x: Tensor) -> Tensor:
        into = torch.zeros_like(x)
        given = {"itself": x * 2, "whole": other(x, SIZE, 3), "broadcast": other(x, 3)}[source]
        into.copy_(given)
        return into * x

    assert_as_whole(within(copied), drawn(2, SIZE, 3))


def test_copies_of_what_is_divided_otherwise():
    source = drawn(2, SIZE, SIZE, seed=4)
    x, y = channels(drawn(2, SIZE, SIZE)), channels(source, at=2)
    x.copy_(y)
    assert torch.equal(x.full_tensor().cpu(), source)


class _Kept(nn.Module):
    """Keeps the means of the batch before, for each channel, after they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)
        self.register_buffer("before", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x - self.before
        self.before.copy_(x.detach().mean((0, 2, 3)).view(8, 1, 1))
        return self.head(y.square().mean((2, 3)))


def test_copies_into_a_divided_buffer():
    reference, network = _Kept().double(), _Kept().double()
    reference.load_state_dict(WORLD.bcast(reference.state_dict()))
    mesh = spatialdl.init_mesh(tensor=WORLD.size)
    network.load_state_dict(reference.state_dict())
    parallel = spatialdl.SpatialParallel(network, mesh)
    for seed in range(3):
        x = drawn(2, 3, 6, 5, seed=seed)
        given, expected = parallel(spatialdl.shard(x, mesh)), reference(x)
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    assert network._buffers["before"].numel() < 8
    whole = spatialdl.full_state_dict(parallel, mesh)["before"]
    torch.testing.assert_close(whole, reference.before, rtol=0, atol=1e-12)
