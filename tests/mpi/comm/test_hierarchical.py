"""Sums by nodes are those of all ranks at once, the same bits everywhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.gradients import average_
from spatialdl.comm.hierarchical import HierarchicalCommunicator, by_nodes
from spatialdl.comm.launch import launched
from spatialdl.comm.processes import Nodes
from spatialdl.comm.world import as_communicator, torch_world
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule

SIZE = MPI.COMM_WORLD.size
MADE = {
    "blocks": [2 * rank // SIZE for rank in range(SIZE)],
    "in turn": [rank % 2 for rank in range(SIZE)],
    "uneven": [min(rank, 1) for rank in range(SIZE)],
    "last first": [rank < SIZE - 1 for rank in range(SIZE)],
}
several = pytest.mark.skipif(SIZE < 3, reason="needs a node of two ranks beside another one")


@cache
def over_torch() -> Communicator:
    return torch_world(launched())


@several
@pytest.mark.parametrize("nodes", MADE.values(), ids=MADE)
def test_sums_are_those_of_all_at_once(nodes):
    plain = over_torch()
    comm = by_nodes(plain, nodes[plain.rank])
    assert isinstance(comm, HierarchicalCommunicator)
    draw = torch.Generator().manual_seed(plain.rank)
    for shape in ((), (3,), (1000, 70)):
        values = torch.randn(shape, dtype=torch.float64, generator=draw)
        expected = plain.all_reduce(values)
        torch.testing.assert_close(comm.all_reduce(values), expected, rtol=1e-12, atol=1e-12)
        comm.all_reduce_(values)
        assert all(torch.equal(values, other) for other in plain.all_gather(values))
    whole = torch.arange(9) + plain.rank
    assert torch.equal(comm.all_reduce(whole), plain.all_reduce(whole))
    assert comm.allgather(plain.rank) == list(range(SIZE))
    # of ranks in another order, as those of replicas on nodes are
    turned = plain.subset(range(SIZE)[::-1])
    ours = by_nodes(turned, nodes[plain.rank])
    assert ours.all_reduce(torch.tensor([plain.rank])).item() == sum(range(SIZE))
    assert ours.allgather(plain.rank) == list(range(SIZE))[::-1]


def test_nothing_is_made_where_it_saves_nothing(world: Communicator):
    plain = over_torch()
    assert by_nodes(plain, 0) is plain
    assert by_nodes(plain, plain.rank) is plain
    mpi = as_communicator(MPI.COMM_WORLD)
    assert by_nodes(mpi, world.rank % 2) is mpi


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 5)).double()


@several
def test_gradients_are_averaged_by_nodes():
    plain = over_torch()
    placement = Placement(SIZE, ((1, 1),))
    nodes = Nodes(plain, MADE["uneven"])
    pipeline = PipelineRuntime(
        network(),
        placement,
        make_schedule("gpipe", placement, 1),
        plain,
        F.cross_entropy,
        (3, 9, 7),
        PipelineOptions(nodes=nodes),
    )
    assert isinstance(pipeline.gradients.stages[0].comm, HierarchicalCommunicator)
    expected = []
    draw = torch.Generator().manual_seed(plain.rank)
    for own in pipeline.parameters():
        own.grad = torch.randn(own.shape, dtype=own.dtype, generator=draw)
        expected.append(own.grad.clone())
    pipeline.gradients.average()
    average_(expected, plain, SIZE)
    for own, other in zip(pipeline.parameters(), expected, strict=True):
        torch.testing.assert_close(own.grad, other, rtol=0, atol=1e-12)
