"""All ranks stop together before a non-finite update."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.errors import NotFinite
from spatialdl.training.trainer import Trainer
from tests.mpi.device import device_key
from tests.training.checkpoints.runs import checkpoints
from tests.training.debug.test_detect_nan import NETWORK

THREE = ["parallel=sp+pp", "parallel.microbatches=2", "parallel.cut=[conv2]"]
FOUR_TILES = ["parallel=sp", "parallel.grid=[2,2]"]
STATE = ["parallel=dp", "parallel.shard_state=true"]


@pytest.mark.parametrize(
    ("ranks", "overrides", "where"),
    [
        (
            3,  # each step has two micro-batches
            [*THREE, "+model.kind=from", "+model.call=2", "+model.part=1"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 1 on",
        ),
        (
            3,
            [*THREE, "+model.kind=backward", "+model.call=2", "parallel.schedule=zero_bubble"],
            "step 2: Inf in poison (BadGradient), backward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            3,
            ["parallel=sp+gems", "parallel.cut=[conv2]", "+model.kind=from", "+model.call=2"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            4,
            [*FOUR_TILES, "+model.kind=from", "+model.part=2", "+model.call=1"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 2 on",
        ),
        (
            4,
            ["parallel=sp", "parallel.tensor=2", "+model.kind=from", "+model.call=1"],
            "step 2: NaN in poison (Poison), forward, micro-batch 0, stage 0, rank 0 on",
        ),
        (
            4,
            [*STATE, "parallel.data=4", "+model.kind=backward", "+model.call=1"],
            "step 2: Inf in poison (BadGradient), backward, micro-batch 0, stage 0, rank ",
        ),
    ],
)
def test_every_layout_stops(ranks, overrides, where, world, tmp_path):
    if world.size != ranks:
        pytest.skip(f"a layout of {ranks} ranks")
    given = [
        *("model=resnet18", f"model._target_={NETWORK}", "~model.width", device_key(world)),
        *("data.image_size=[13,10]", "data.samples=8", "data.batch_size=4", "data.num_classes=3"),
        *("trainer.max_steps=3", "data.validation_samples=2", "trainer.checkpoint.best=null"),
        "trainer.checkpoint.every_steps=1",
    ]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        trainer = Trainer(compose("train", [*given, *overrides]), world)
    with pytest.raises(NotFinite) as found:
        trainer.fit(tmp_path)
    texts = MPI.COMM_WORLD.allgather(str(found.value))
    assert texts == [texts[0]] * world.size
    assert texts[0].startswith(where)
    assert all(weight.isfinite().all() for weight in trainer.parts.pipeline.parameters())
    if world.rank == 0:
        assert checkpoints(tmp_path) == [1]
