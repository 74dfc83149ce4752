"""Communicators by node, and sums by nodes, where nodes share no memory."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.cluster.slurm import SRUN, run

PROGRAM = """
import json, socket, sys
import torch
from mpi4py import MPI
from spatialdl.comm.launch import launched
from spatialdl.comm.processes import Nodes
from spatialdl.comm.hierarchical import by_nodes
from spatialdl.comm.world import as_communicator, torch_world

mpi = as_communicator(MPI.COMM_WORLD)
world = mpi if sys.argv[1] == "mpi" else torch_world(launched())
nodes = Nodes(world)
comm = by_nodes(world, nodes.of[world.rank])
draw = torch.Generator().manual_seed(world.rank)
values = torch.randn(1001, dtype=torch.float64, generator=draw)
whole = torch.arange(1001) * (world.rank + 1)
found = {
    "host": socket.gethostname(),
    "nodes": nodes.of,
    "own": nodes.own.allgather(world.rank),
    "of node": nodes.own.all_reduce(torch.tensor([world.rank])).tolist(),
    "class": type(comm).__name__,
    "sum": comm.all_reduce(values).tolist(),
    "whole": comm.all_reduce(whole).tolist(),
}
told = world.gather(found)
if told is not None:
    print(json.dumps(told), flush=True)
"""
RANKS = 5


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("torch", "HierarchicalCommunicator"),
        pytest.param("mpi", "MpiCommunicator", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("dealt", "nodes"),
    [
        pytest.param("cyclic", [0, 1, 2, 0, 1]),
        pytest.param("block", [0, 0, 1, 1, 2], marks=pytest.mark.slow),
    ],
)
def test_a_node_has_a_communicator_of_its_ranks(transport, kind, dealt, nodes, tmp_path):
    words = [
        *SRUN,
        "-w",
        "node[1-3]",
        "-m",
        dealt,
        f"-n{RANKS}",
        sys.executable,
        "-c",
        PROGRAM,
        transport,
    ]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["host"] for one in told] == [f"node{1 + node}" for node in nodes]
    draws = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    values = [torch.randn(1001, dtype=torch.float64, generator=draw) for draw in draws]
    for node, one in zip(nodes, told, strict=True):
        own = [rank for rank in range(RANKS) if nodes[rank] == node]
        assert (one["nodes"], one["own"], one["of node"]) == (nodes, own, [sum(own)])
        assert one["class"] == kind
        assert one["whole"] == [15 * number for number in range(1001)]
        assert one["sum"] == told[0]["sum"]
        total = torch.tensor(one["sum"], dtype=torch.float64)
        torch.testing.assert_close(total, sum(values), rtol=0, atol=1e-14)
