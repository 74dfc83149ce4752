"""SpatialParallel leaves the gradients that average_gradients would."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import spatialdl
from spatialdl.models import resnet18
from spatialdl.spatial import parallel


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 2**30])
def test_equals_average_gradients(
    bucket_bytes: int, world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "BUCKET_BYTES", bucket_bytes)
    mesh = spatialdl.init_mesh((1, world.size))
    torch.manual_seed(0)
    plain = resnet18(num_classes=3, width=4).double()
    wrapped = spatialdl.SpatialParallel(copy.deepcopy(plain), mesh)
    for step in range(2):  # the second backward adds to the gradients of the first
        image = torch.randn(2, 3, 41, 50, dtype=torch.float64)
        for model in (plain, wrapped):
            output = model(spatialdl.shard(image, mesh))
            F.cross_entropy(output, torch.tensor([0, step])).backward()
    spatialdl.average_gradients(plain, mesh)
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)
    assert wrapped.state_dict().keys() == plain.state_dict().keys()


class Forked(nn.Module):
    """A layer for even ranks, one for odd ranks, one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.unused = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.odd(x) if rank % 2 else self.even(x)


def test_missing_gradients_count_as_zero_or_stay_none(world: MPI.Intracomm) -> None:
    mesh = spatialdl.init_mesh((1, 1), data=world.size)
    model = spatialdl.SpatialParallel(Forked(), mesh)
    model(torch.ones(1, 2), world.rank).sum().backward()
    odd_ranks = world.size // 2
    assert model.module.odd.bias.grad.item() == pytest.approx(odd_ranks / world.size)
    assert model.module.even.bias.grad.item() == pytest.approx(1 - odd_ranks / world.size)
    assert model.module.unused.bias.grad is None
