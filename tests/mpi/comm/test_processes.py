"""Ranks by node, and that runs with ranks at other places give the same losses."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import spatialdl
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.launch import launched
from spatialdl.comm.processes import Nodes
from spatialdl.comm.world import as_communicator, torch_world
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit

TINY = [
    *("model.width=2", "data.image_size=[70,61]"),
    *("data.num_classes=3", "data.samples=12", "data.validation_samples=0", "data.batch_size=8"),
    *("trainer.precision=float64", "trainer.max_steps=4", "comm.check=true", "device=cpu"),
    *("parallel.microbatches=2", "optimizer.lr=0.01"),
    *("trainer.checkpoint.every_steps=2", "comm.map=true"),
]
SIZE = MPI.COMM_WORLD.size
DEALT = {
    3: ("parallel=sp+pp", "parallel.grid=[2,1]", ["a", "b", "b"], (1, 2, 0)),
    4: ("parallel=dp+sp", "parallel.grid=[1,2]", ["a", "b", "a", "b"], (0, 2, 1, 3)),
}
"""By the number of ranks a layout, the node of each rank, and the order that follows."""


def over(transport: str) -> Communicator:
    return as_communicator(MPI.COMM_WORLD) if transport == "mpi" else torch_world(launched())


@pytest.mark.parametrize("transport", ["mpi", "torch"])
def test_ranks_of_this_machine_are_on_one_node(transport):
    world = over(transport)
    assert world.nodes() == [0] * world.size
    nodes = Nodes(world)
    assert nodes.of == [0] * world.size
    assert nodes.own.size == world.size
    assert nodes.own is nodes.own
    inside = world.subset(range(world.size)[::-1])
    assert inside.nodes() == [0] * world.size


def test_a_node_has_a_communicator(world: Communicator):
    nodes = Nodes(world, [f"node{rank % 2}" for rank in range(world.size)])
    assert nodes.of == [rank % 2 for rank in range(world.size)]
    assert nodes.own.allgather(world.rank) == list(range(world.rank % 2, world.size, 2))


@pytest.mark.world(4)
def test_grids_of_a_mesh_lie_on_nodes(world: Communicator, monkeypatch):
    """The same picture of an image, whoever has which part of it."""
    monkeypatch.setattr(type(world), "nodes", lambda self: [0, 1, 0, 1])
    mesh = spatialdl.init_mesh((2, 1), data=2)
    assert mesh.grid_comm.allgather(world.rank) == ([0, 2], [1, 3])[world.rank % 2]
    assert mesh.replica == world.rank % 2
    assert mesh.comm.allgather(world.rank) == [0, 2, 1, 3]
    image = torch.arange(35.0).view(1, 1, 7, 5)
    assert torch.equal(spatialdl.shard(image, mesh).full_tensor(), image)
    as_it_is = spatialdl.init_mesh((2, 1), data=2, comm=world)
    assert as_it_is.grid_comm.allgather(world.rank) == ([0, 1], [2, 3])[world.rank // 2]


def train(run_dir: Path, world: Communicator, names: list[str] | None, *more: str) -> Trainer:
    layout, grid, _, _ = DEALT[SIZE]
    config = composed("train", *TINY, layout, grid, *more)
    trainer = Trainer(config, world, Nodes(world, names))
    torch.manual_seed(world.rank)
    fit(trainer, run_dir)
    return trainer


def curve(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.world(3, 4)
@pytest.mark.parametrize(
    "transport",
    [
        # of three ranks the order is not its own inverse, which shows the most
        pytest.param("mpi", marks=[] if SIZE == 3 else pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_ranks_in_order(transport, tmp_path, caplog):
    world = over(transport)
    *_, names, order = DEALT[SIZE]
    plain, dealt = (world.bcast(tmp_path / name) for name in ("plain", "dealt"))
    assert train(plain, world, None).parts.placement.order == ()
    caplog.clear()
    with caplog.at_level("INFO"):
        assert train(dealt, world, names).parts.placement.order == order
    # what one order has saved another one goes on with, each rank as the one that had its place
    again = world.bcast(tmp_path / "again")
    train(again, world, names, f"ckpt_path='{plain}/checkpoints/step-00000002'")
    assert world.allgather(torch.initial_seed()) == [order.index(rank) for rank in range(SIZE)]
    train(again / "in order", world, None, f"ckpt_path='{dealt}/checkpoints/step-00000002'")
    assert world.allgather(torch.initial_seed()) == list(order)
    if world.rank == 0:
        assert len(curve(plain)) == 4
        for other in (dealt, again):
            assert curve(other) == pytest.approx(curve(plain), abs=1e-10)
        (table,) = (one.message for one in caplog.records if one.message.startswith("ranks:"))
        ranks = [int(line.split()[0]) for line in table.splitlines()[2:]]
        assert ranks == list(order)
        assert f" {os.uname().nodename.partition('.')[0]} " in table
