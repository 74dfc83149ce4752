"""Runs of a small network that are saved in one layout and resumed in another."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.checkpoints.content import copies
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.mpi.device import device_key

SAVED, STEPS = 2, 4  # epochs have three steps, so that both lie in the middle of one
TINY = [
    *(
        "model._target_=tests.training.checkpoints.networks.network",
        "~model.width",
        "data.image_size=[37,29]",
    ),
    *("data.num_classes=3", "data.samples=14", "data.validation_samples=0", "data.batch_size=5"),
    *("trainer.precision=float64", f"trainer.max_steps={STEPS}"),
    f"trainer.checkpoint.every_steps={SAVED}",
]
SGD = "optimizer=sgd optimizer.lr=0.05 optimizer.momentum=0.9 trainer.clip_norm=0.5"
ADAMW = "optimizer=adamw scheduler=cosine scheduler.warmup_steps=3"


class Layout(NamedTuple):
    """Layouts by number of ranks; each splits a batch into four slices."""

    ranks: int
    overrides: str


LAYOUTS = {
    "none": Layout(1, "parallel=none parallel.microbatches=4"),
    "dp": Layout(2, "parallel=dp parallel.microbatches=2"),
    "sp": Layout(2, "parallel=sp parallel.microbatches=4"),
    "pp": Layout(2, "parallel=pp parallel.microbatches=4"),
    "gems": Layout(2, "parallel=gems parallel.microbatches=4"),
    "interleaved": Layout(
        2,
        "parallel=pp parallel.microbatches=4 parallel.stages=4 parallel.interleave=2 "
        "parallel.schedule=interleaved",
    ),
    "sp+pp": Layout(3, "parallel=sp+pp parallel.microbatches=4 parallel.grid=[1,2]"),
    "dp+sp": Layout(4, "parallel=dp+sp parallel.microbatches=2"),
    "dp4": Layout(4, "parallel=dp parallel.data=4 parallel.microbatches=1"),
    "shard": Layout(4, "parallel=dp parallel.data=4 parallel.shard_state=true"),
    "dp+sp shard": Layout(4, "parallel=dp+sp parallel.microbatches=2 parallel.shard_state=true"),
    "tensor": Layout(2, "parallel=none parallel.microbatches=4 parallel.tensor=2"),
    "tensor 3": Layout(3, "parallel=none parallel.microbatches=4 parallel.tensor=3"),
    "sp+pp tensor": Layout(4, "parallel=sp+pp parallel.microbatches=4 parallel.tensor=[1,2]"),
    "dp tensor": Layout(4, "parallel=dp parallel.microbatches=2 parallel.tensor=2"),
    "shard tensor": Layout(
        4, "parallel=dp parallel.microbatches=2 parallel.tensor=2 parallel.shard_state=true"
    ),
    "sp+pp 5": Layout(5, "parallel=sp+pp parallel.microbatches=4 parallel.grid=[2,2]"),
}


class Outcome(NamedTuple):
    """Of a run, on rank 0 of its layout.

    Attributes:
        losses: by step.
        state: weights, buffers and optimizer state, under the names of a checkpoint.
    """

    losses: dict[int, float]
    state: dict[str, Tensor]


def run(run_dir: Path, comm: Communicator, *overrides: str) -> Outcome:
    """Train with the configuration; every rank of `comm` calls it."""
    words = [*TINY, *(word for one in overrides for word in one.split()), device_key(comm)]
    marked = (f"++{word}" if word.startswith("model._") else word for word in words)
    trainer = Trainer(composed("train", *marked), comm)
    fit(trainer, run_dir)
    own = copies(trainer.parts.pipeline, trainer.parts.update, comm.rank)
    files = [tensors for one in comm.allgather(own) for tensors in one.values()]
    run_dir = comm.bcast(run_dir)
    state = {name: value for tensors in files for name, value in tensors.items()}
    with (run_dir / "metrics.csv").open(newline="") as lines:
        losses = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(lines)}
    return Outcome(losses, state)


def in_layout(world: Communicator, name: str, run_dir: Path, *overrides: str) -> Outcome | None:
    """Run in a layout on the first ranks of the world; None on other ranks."""
    layout = LAYOUTS[name]
    comm = SingleProcess() if layout.ranks == 1 else None
    if comm is None and world.rank < layout.ranks:
        comm = world if layout.ranks == world.size else world.subset(range(layout.ranks))
    found = None
    if comm is not None and world.rank < layout.ranks:
        found = run(run_dir, comm, layout.overrides, *overrides)
    MPI.COMM_WORLD.Barrier()
    return found


def assert_same_bits(ours: Outcome, other: Outcome) -> None:
    assert ours.losses == other.losses
    assert ours.state.keys() == other.state.keys()
    for name, value in ours.state.items():
        assert torch.equal(value, other.state[name]), name
