"""Callbacks on several ranks: same calls on all ranks, and any rank may end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.mpi.device import device_key

WORLD = MPI.COMM_WORLD
LAYOUTS = {2: ["parallel=sp", "parallel=pp parallel.microbatches=2"], 3: ["parallel=sp+lp"]}


@pytest.mark.parametrize("layout", LAYOUTS.get(WORLD.size, []))
def test_all_ranks_are_called_alike_and_the_last_one_stops_them(layout, tmp_path) -> None:
    run_dir = Path(WORLD.bcast(str(tmp_path)))
    world = MpiCommunicator(WORLD)
    last = f"stop_at: 3, stopping_rank: {WORLD.size - 1}"
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("model.width=2", "data.image_size=[40,36]", "data.samples=4", "seed=1"),
                *("data.validation_samples=3", "data.batch_size=2", "trainer.max_steps=8"),
                *("trainer.report=false", "comm.check=true", "trainer.validate_every=2"),
                f"trainer.callbacks=[{{_target_: tests.training.own_callbacks.Recorder, {last}}}]",
                *(device_key(world), *layout.split()),
            ],
        )
    trainer = Trainer(config, world)
    fit(trainer, run_dir)
    assert trainer.progress.step == 3
    assert trainer.progress.ended == "as was asked for"
    own = json.loads((run_dir / f"calls-{world.rank}.json").read_text())
    assert all(one == own for one in world.allgather(own))
    names = [(name, step) for name, step, *_ in own["calls"]]
    assert names[0] == ("fit_start", 0)
    assert names[-2:] == [("checkpoint", 3), ("fit_end", 3)]
    if world.rank == 0:
        summary = json.loads((run_dir / "summary.json").read_text())
        assert [loss for name, _, loss, _ in own["calls"] if name == "step_end"] == summary["loss"]
