"""Training on a user's data set with random transforms equals a single process in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.trainer import Trainer
from tests.data import own_datasets
from tests.fitting import fit
from tests.mpi.device import device_key
from tests.mpi.training import test_augmentation

WORLD = MPI.COMM_WORLD
NETWORK = f"++model._target_={test_augmentation.__name__}.small", "++model.width=4"
# (layout, slices of the batch that one process accumulates over); the ranks follow from it
LAYOUTS = {
    2: [("parallel=sp", 1), ("parallel=dp", 2), ("parallel=sp data.workers=1", 1)],
    3: [("parallel=sp parallel.grid=[3,1]", 1), ("parallel=sp+pp parallel.microbatches=2", 2)],
    4: [("parallel=dp+sp", 2)],
}
OTHERS = {
    2: [("segmentation", "Masks", ("model=unet", "++model.width=2", "++model.depth=1"))],
    3: [("regression", "Numbers", NETWORK)],
}


def train(run_dir: Path, comm: Any, layout: str, kind: str, *more: str) -> dict[str, Any]:
    of = f"data.dataset._target_={own_datasets.__name__}.{kind}"
    overrides = ["data=dataset", of, "++data.validation.split=val", "++data.validation.count=5"]
    overrides += ["data.batch_size=3", "parallel.microbatches=1", "trainer.precision=float64"]
    overrides += ["trainer.max_steps=5", "comm.check=true", device_key(comm), "data.num_classes=2"]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*overrides, *more, *layout.split()])
    fit(Trainer(config, comm), run_dir)
    return json.loads((run_dir / "summary.json").read_text()) if comm.rank == 0 else {}


def compare(folder: Path, layout: str, slices: int, kind: str, *more: str) -> None:
    ours = train(folder / "ours", MpiCommunicator(WORLD), layout, kind, *more)
    if WORLD.rank == 0:
        plain = f"parallel=none parallel.microbatches={slices}"
        expected = train(folder / "plain", SingleProcess(), plain, kind, *more)
        assert ours["loss"] == pytest.approx(expected["loss"], abs=1e-10)
        assert len(set(expected["loss"])) == 5
        for found, one in zip(ours["validation"], expected["validation"], strict=True):
            assert found["samples"] == 5 if kind != "Masks" else found["accuracy"] is not None
            assert found["loss"] == pytest.approx(one["loss"], abs=1e-10)


@pytest.mark.parametrize(("layout", "slices"), LAYOUTS.get(WORLD.size, []))
def test_a_data_set_of_ones_own_trains_as_in_one_process(layout, slices, tmp_path):
    more = ("data.image_size=[19,22]", "data.augment.flip=0.5") if "grid" in layout else ()
    compare(tmp_path, layout, slices, "OwnGenerator", *NETWORK, *more)


@pytest.mark.parametrize(("task", "kind", "more"), OTHERS.get(WORLD.size, []))
def test_masks_and_numbers_train_as_in_one_process(task, kind, more, tmp_path):
    compare(tmp_path, f"parallel=sp parallel.grid=[{WORLD.size},1]", 1, kind, f"task={task}", *more)


@pytest.mark.skipif(WORLD.size != 2, reason="2 ranks")
def test_samples_that_ranks_would_make_differently_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"returns a different first sample each time.*cannot be seeded"
    ):
        train(tmp_path, MpiCommunicator(WORLD), "parallel=sp", "Unrepeatable")
    kind, mine = "Noise", f"++data.dataset.count={5 + WORLD.rank}"
    with pytest.raises(ValueError, match=r"has 6 samples on rank 1, 5 on rank 0: use identical"):
        train(tmp_path, MpiCommunicator(WORLD), "parallel=sp", kind, mine)
