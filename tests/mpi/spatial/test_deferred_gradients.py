"""Weights of layers on split images that get their gradients later, without talking."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import Mesh, average_gradients, shard
from spatialdl.comm import trace
from spatialdl.spatial.deferred_gradients import DeferredGradients
from spatialdl.spatial.deferred_layers import DeferWeightGradients
from spatialdl.spatial.recompute import recompute
from tests.mpi.equality import close


@pytest.fixture
def unwatched(meshes: dict[tuple[int, ...], Mesh]) -> dict[tuple[int, ...], Mesh]:
    """As those of stages: a user's watch weights by hooks, and hooked ones do not wait."""
    return {grid: replace(mesh, agreement=None) for grid, mesh in meshes.items()}


class Tokens(nn.Module):
    """Layers that work on every pixel by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv1d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).sum() + self.conv(x.flatten(2)).square().sum()


NETWORKS = {
    "halos": lambda: nn.Conv2d(4, 6, (3, 5), padding=(1, 2)),
    "strided, dilated": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=3, dilation=2, groups=2),
    "no halos": lambda: nn.Conv2d(4, 6, 1, bias=False),
    "no halos, strided": lambda: nn.Conv2d(4, 6, 1, stride=3),
    "large weights": lambda: nn.Conv2d(4, 90, 5, padding=2),
    "tiles without outputs": lambda: nn.Conv2d(4, 6, 7, stride=9, padding=3),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed, 1": lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False),
    "tokens": Tokens,
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 19 * 14, 5)),
    "twice": lambda: nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1)] * 2),
}


def upstream(y: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return (y * torch.randn(y.shape, dtype=y.dtype, generator=draw)).sum()


@pytest.mark.parametrize(("learns", "again"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_get_the_gradients_of_one_process(
    name: str, learns: bool, again: bool, unwatched: dict[tuple[int, ...], Mesh]
) -> None:
    torch.manual_seed(3)
    plain = NETWORKS[name]().double()
    image = torch.randn(2, 4, 19, 14, dtype=torch.float64)
    for grid, mesh in unwatched.items():
        expected, x = image.clone().requires_grad_(learns), image.clone().requires_grad_(learns)
        plain.zero_grad()
        upstream(plain(expected)).backward()
        ours = copy.deepcopy(plain)
        ours.zero_grad()
        with DeferWeightGradients():
            split = shard(x, mesh)
            y = recompute(ours, split, modules=[ours]) if again else ours(split)
            loss = upstream(y)
        waiting = DeferredGradients()
        with waiting.gather(), DeferWeightGradients():
            loss.backward()
        weights = [p for p in ours.parameters() if p.dim() > 1]
        assert [weight.grad for weight in weights] == [None] * len(weights)
        trace.start()
        waiting.add_all()
        assert trace.stop() == [], "weights must not talk"
        average_gradients(ours, mesh)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            close(mine.grad, theirs.grad, f"{name} on {grid}: ")
        if learns:
            close(x.grad, expected.grad, f"{name} on {grid}, image: ")


def test_the_trace_would_have_seen_them_talk(world: MPI.Intracomm, meshes) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    grid = (world.size, 1)
    trace.start()
    upstream(conv(shard(torch.randn(2, 4, 19, 14, dtype=torch.float64), meshes[grid]))).backward()
    assert len(trace.stop()) > 0 or world.size == 1
