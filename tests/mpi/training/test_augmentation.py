"""Augmented epochs on regions of many sizes equal a single process in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI
from torch import nn

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.mpi.device import device_key

SIZE = 37, 45  # of the crops
STORED = [(61, 70), (37, 45), (30, 80), (21, 19), (50, 44), (36, 46), (64, 33)]
ALL = [
    *("data/augment=pathology", "data.augment.saturation=0.3", "data.augment.hue=0.2"),
    *("data.augment.stain=0.1", "data.augment.blur=2.5", "data.augment.contrast=0.3"),
]
# (layout, slices of the batch that one process accumulates over); the ranks follow from it
CLASSIFY = {
    2: [("parallel=sp parallel.grid=[1,2]", 1), ("parallel=dp", 2)],
    3: [("parallel=sp parallel.grid=[3,1]", 1), ("parallel=sp+pp parallel.microbatches=2", 2)],
    4: [
        pytest.param("parallel=sp parallel.grid=[2,2]", 1, marks=pytest.mark.slow),
        ("parallel=dp+sp", 2),
        ("parallel=sp+gems parallel.stages=3 parallel.microbatches=2", 2),
    ],
}
SEGMENT = {
    2: ["parallel=sp"],
    3: ["parallel=sp parallel.grid=[1,3]"],
    4: [
        "parallel=sp parallel.grid=[2,2]",
        pytest.param("parallel=sp parallel.grid=[2,2] data.workers=2", marks=pytest.mark.slow),
    ],
}
WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = WORLD.bcast(tmp_path_factory.mktemp("set") if WORLD.rank == 0 else None)
    if WORLD.rank == 0:
        draw = np.random.default_rng(0)
        with ShardWriter(
            folder / "set", classes=("a", "b", "c"), kind="regions", shard_size=20_000
        ) as shards:
            for number, size in enumerate([*STORED, (60, 50), (20, 90)]):
                image = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
                mask = (image[..., 0] // 86).astype(np.uint8)
                split = "train" if number < len(STORED) else "val"
                shards.add(image, number % 3, split, mask=mask)
    WORLD.Barrier()
    return folder / "set"


def small(num_classes: int, in_channels: int, width: int) -> nn.Sequential:
    def block(channels: int) -> nn.Sequential:
        conv = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
    return nn.Sequential(block(in_channels), block(width), head)


def train(run_dir: Path, data: Path, comm, layout: str, *more: str) -> dict:
    overrides = ["data=shards", f"data.path={data}", f"data.image_size={list(SIZE)}"]
    overrides += ["data.batch_size=3", "parallel.microbatches=1", "trainer.precision=float64"]
    overrides += ["trainer.max_steps=7", "comm.check=true", device_key(comm)]  # epochs have 3
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*overrides, *ALL, *more, *layout.split()])
    fit(Trainer(config, comm), run_dir)
    return json.loads((run_dir / "summary.json").read_text()) if comm.rank == 0 else {}


def compare(layout: str, slices: int, data: Path, folder: Path, *more: str) -> None:
    ours = train(folder / "ours", data, MpiCommunicator(WORLD), layout, *more)
    if WORLD.rank == 0:
        plain = f"parallel=none parallel.microbatches={slices}"
        expected = train(folder / "plain", data, SingleProcess(), plain, *more)
        assert ours["loss"] == pytest.approx(expected["loss"], abs=1e-10)
        for found, one in zip(ours["validation"], expected["validation"], strict=True):
            assert found["loss"] == pytest.approx(one["loss"], abs=1e-10)


@pytest.mark.parametrize(("layout", "slices"), CLASSIFY.get(WORLD.size, []))
def test_augmented_epochs_equal_one_process(layout, slices, data, tmp_path):
    compare(layout, slices, data, tmp_path, f"++model._target_={__name__}.small", "++model.width=4")


@pytest.mark.parametrize("layout", SEGMENT.get(WORLD.size, []))
def test_masks_are_augmented_as_their_images(layout, data, tmp_path):
    compare(layout, 1, data, tmp_path, "model=unet", "++model.width=2", "++model.depth=2")
