"""All ranks stop together in every layout and agree on the first value."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.comm.communicator import Communicator
from spatialdl.errors import NotFinite
from spatialdl.training.trainer import Trainer
from tests.mpi.device import device_key
from tests.training.debug.test_detect_nan import NETWORK

FORWARD, BACKWARD = ["+model.kind=forward"], ["+model.kind=backward"]
THREE = ["parallel=sp+pp", "parallel.microbatches=2"]
FOUR_TILES = ["parallel=sp", "parallel.grid=[2,2]"]


def first(overrides: list[str], world: Communicator, folder) -> str:
    """What every rank says alike; some ranks' own findings follow."""
    given = [
        *("model=resnet18", f"model._target_={NETWORK}", "~model.width", "debug=detect_nan"),
        *("data.image_size=[13,10]", "data.samples=8", "data.batch_size=4", device_key(world)),
        *("data.num_classes=3", "trainer.max_steps=3", "data.validation_samples=2"),
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        trainer = Trainer(compose("train", [*given, *overrides]), world)
    with pytest.raises(NotFinite) as found:
        trainer.fit(folder)
    texts = MPI.COMM_WORLD.allgather(str(found.value))
    assert texts == [texts[0]] * len(texts)
    return texts[0]


@pytest.mark.world(3)
@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        # the second call is that of the second micro-batch
        (
            [*THREE, *FORWARD, "+model.call=1", "+model.part=1", "parallel.cut=[conv2]"],
            "step 1: NaN in poison (Poison), forward, micro-batch 1, stage 0, rank 1 on",
        ),
        (
            [*THREE, *FORWARD, "+model.call=2", "parallel.cut=[poison]"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 1, rank 2 on",
        ),
        (
            [*THREE, *BACKWARD, "parallel.cut=[conv2]", "parallel.schedule=zero_bubble"],
            "step 1: Inf in poison (BadGradient), backward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            ["parallel=sp+gems", *FORWARD, "parallel.cut=[conv2]"],
            "step 1: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            ["parallel=dp", "parallel.data=3", "+model.kind=loss"],
            "step 1: Inf in the loss, forward, micro-batch 0, stage 0, rank ",
        ),
    ],
)
def test_three_ranks(overrides, where, world, tmp_path):
    assert first(overrides, world, tmp_path).startswith(where)


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (
            [*FOUR_TILES, *FORWARD, "+model.part=2", "+model.call=1"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 2 on",
        ),
        (
            [*FOUR_TILES, *BACKWARD, "parallel.recompute=block"],
            "step 1: Inf in poison (BadGradient), backward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            ["parallel=none", "parallel.tensor=4", *FORWARD],
            "step 1: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            ["parallel=sp", "parallel.tensor=2", *FORWARD, "+model.call=1"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            ["parallel=dp+sp", *FORWARD, "+model.part=1"],
            "step 1: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 1 on",
        ),
        (
            ["parallel=dp", "parallel.data=4", "parallel.shard_state=true", *FORWARD],
            "step 1: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
    ],
)
def test_four_ranks(overrides, where, world, tmp_path):
    assert first(overrides, world, tmp_path).startswith(where)


@pytest.mark.world(4)
def test_what_others_saw_is_told_as_well(world, tmp_path):
    text = first([*FOUR_TILES, *FORWARD, "+model.part=3"], world, tmp_path)
    assert "rank 3 on" in text.partition("; first on other ranks: ")[0]
    others = text.partition("; first on other ranks: ")[2]
    # the convolution after it brings it to one neighbour, the statistics of the norm to all
    where = {0: "norm (BatchNorm2d)", 1: "norm (BatchNorm2d)", 2: "conv2 (Conv2d)"}
    for rank, name in where.items():
        assert f"NaN in {name}, forward, micro-batch 0, stage 0, rank {rank} on" in others
