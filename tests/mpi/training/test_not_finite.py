"""All ranks stop together in every layout and agree on the first value that is not finite."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from spatialdl.comm.communicator import Communicator
from spatialdl.errors import NotFinite
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.mpi.device import device_key
from tests.training.checkpoints.runs import checkpoints
from tests.training.not_finite import CHAIN

THREE = "parallel=sp+pp parallel.microbatches=2"
TILES = "parallel=sp parallel.grid=[2,2]"
TENSOR = "parallel=sp parallel.tensor=2"
STATE = "parallel=dp parallel.data=4 parallel.shard_state=true"
GEMS = "parallel=sp+gems parallel.cut=[conv2]"
FORWARD, BACKWARD = "NaN in poison (Poison), forward", "Inf in poison (BadGradient), backward"


def first(world: Communicator, folder, *words: str) -> tuple[str, Trainer]:
    """What every rank says alike; some ranks' own findings follow."""
    small = ("data.image_size=[13,10]", "data.samples=8", "data.batch_size=4")
    more = ("data.num_classes=3", "trainer.max_steps=3", "data.validation_samples=2")
    trainer = Trainer(composed("train", *CHAIN, *small, *more, device_key(world), *words), world)
    with pytest.raises(NotFinite) as found:
        fit(trainer, folder)
    texts = MPI.COMM_WORLD.allgather(str(found.value))
    assert texts == [texts[0]] * len(texts)
    return texts[0], trainer


@pytest.mark.world(4)
def test_what_others_saw_is_told_as_well(world, tmp_path):
    words = f"{TILES} +model.kind=from +model.part=3 +model.call=1"
    text = first(world, tmp_path, *words.split())[0]
    here, _, others = text.partition("; first on other ranks: ")
    assert here.startswith(f"step 2: {FORWARD}, micro-batch 0, stage 0, rank 3 on")
    # the convolution after it brings it to one neighbour, the statistics of the norm to all
    where = {0: "norm (BatchNorm2d)", 1: "norm (BatchNorm2d)", 2: "conv2 (Conv2d)"}
    for rank, name in where.items():
        assert f"NaN in {name}, forward, micro-batch 0, stage 0, rank {rank} on" in others


@pytest.mark.parametrize(
    ("ranks", "words", "where"),
    [
        (
            3,  # each step has two micro-batches
            f"{THREE} parallel.cut=[conv2] +model.kind=from +model.call=2 +model.part=1",
            f"step 2: {FORWARD}, micro-batch 0, stage 0, rank 1 on",
        ),
        (
            3,
            f"{THREE} parallel.cut=[conv2] +model.kind=backward +model.call=2 "
            "parallel.schedule=1f1b",
            f"step 2: {BACKWARD}, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            *(3, f"{GEMS} +model.kind=from +model.call=2"),
            f"step 2: {FORWARD}, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            *(4, f"{TILES} +model.kind=from +model.part=2 +model.call=1"),
            f"step 2: {FORWARD}, micro-batch 0, stage 0, rank 2 on",
        ),
        (
            *(4, f"{TENSOR} +model.kind=from +model.call=1"),
            f"step 2: {FORWARD}, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            *(3, "parallel=dp parallel.data=3 +model.kind=backward +model.call=1"),
            f"step 2: {BACKWARD}, micro-batch 0, stage 0, rank ",
        ),
        (
            *(4, f"{STATE} +model.kind=backward +model.call=1"),
            f"step 2: {BACKWARD}, micro-batch 0, stage 0, rank ",
        ),
    ],
)
def test_no_rank_updates_with_it(ranks, words, where, world, tmp_path):
    if world.size != ranks:
        pytest.skip(f"a layout of {ranks} ranks")
    often = ("trainer.checkpoint.best=null", "trainer.checkpoint.every_steps=1")
    text, trainer = first(world, tmp_path, *often, *words.split())
    assert text.startswith(where)
    assert all(weight.isfinite().all() for weight in trainer.parts.pipeline.parameters())
    if world.rank == 0:
        assert checkpoints(tmp_path) == [1]
