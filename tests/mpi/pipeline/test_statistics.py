"""BatchNorm's running statistics over replicas equal those of one process over all slices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import Mesh, init_mesh, shard
from spatialdl.layout.layout import even_bounds
from spatialdl.pipeline.statistics import SliceStatistics


class Act(nn.BatchNorm2d):
    """BatchNorm and what follows it in one layer, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        factor = self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, None, None, self.training, factor or 0.0).tanh()


Act.forward.__module__ = "timm.layers.norm_act"


class Twice(nn.Module):
    """Calls one of its layers twice."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.once = Act(3, momentum=momentum, affine=False)
        self.untracked = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.untracked(self.norm(self.once(torch.tanh(self.norm(x)))))


def images(step: int, samples: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    scale = torch.arange(1, samples + 1).view(-1, 1, 1, 1)
    return torch.randn(samples, 3, 5, 4, dtype=torch.float64, generator=draw) * scale + step


def slices(samples: int, microbatches: int, replicas: int) -> list[list[tuple[int, int]]]:
    """Per micro-batch, per replica; some without samples."""
    return [
        [(start + a, start + b) for a, b in pairwise(even_bounds(stop - start, replicas))]
        for start, stop in pairwise(even_bounds(samples, microbatches))
    ]


def reference(momentum: float | None, samples: int, microbatches: int, replicas: int) -> Twice:
    model = Twice(momentum).double()
    for step in range(3):
        for row in slices(samples, microbatches, replicas):
            for start, stop in row:
                if stop > start:
                    model(images(step, samples)[start:stop])
    return model


def replica(
    momentum: float | None, samples: int, microbatches: int, mesh: Mesh, split: bool = False
) -> Twice:
    model = Twice(momentum).double()
    statistics = SliceStatistics(model, mesh.comm)
    for step in range(3):
        outputs = []
        rows = slices(samples, microbatches, mesh.data)
        for number, row in reversed(list(enumerate(rows))):  # in whichever order they come
            start, stop = row[mesh.replica]
            if stop > start:
                x = images(step, samples)[start:stop]
                with statistics.slice(number * mesh.data + mesh.replica, mesh.part == 0):
                    outputs.append(model(shard(x, mesh) if split else x).square().mean())
        if outputs:
            torch.stack(outputs).sum().backward()  # after all forwards, as GPipe does
        statistics.fold(microbatches * mesh.data)
    return model


def compare(ours: Twice, plain: Twice, world: MPI.Intracomm) -> None:
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    assert [norm.momentum for norm in (ours.norm, ours.once)] == [plain.norm.momentum] * 2
    for theirs in world.allgather(ours.norm.running_var):
        assert torch.equal(theirs, ours.norm.running_var)


@pytest.mark.parametrize(
    ("momentum", "samples", "microbatches"), [(0.1, 9, 2), (None, 3, 2), (0.9, 5, 4)]
)
def test_replicas_keep_the_statistics_of_one_process(
    momentum: float | None, samples: int, microbatches: int, world: MPI.Intracomm
) -> None:
    mesh = init_mesh((1, 1), data=world.size)
    ours = replica(momentum, samples, microbatches, mesh)
    compare(ours, reference(momentum, samples, microbatches, world.size), world)


@pytest.mark.world(4)
def test_replicas_of_split_images(world: MPI.Intracomm) -> None:
    ours = replica(None, 5, 2, init_mesh((2, 1), data=2), split=True)
    compare(ours, reference(None, 5, 2, 2), world)
