"""Training on 16-bit and float images with any number of channels, split and whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.mpi.device import device_key

WORLD = MPI.COMM_WORLD
SIZE = 70, 51
GRIDS = {2: "[2,1]", 3: "[3,1]", 4: "[2,2]"}
NUMBERS = (
    *("data.mean=[0.4,0.6]", "data.std=[0.3,0.2]", "data.scale=50000", "data.image_size=[75,49]"),
    *("data.augment.brightness=0.2", "data.augment.blur=1.5", "data.augment.flip=0.5"),
)
CASES = [
    ("uint16", 2, {"codec": "zstd"}, NUMBERS),
    pytest.param("float32", 1, {"kind": "regions", "stripes": 3}, (), marks=pytest.mark.slow),
    pytest.param(
        *("float32", 5, {"kind": "regions", "stripes": 2, "codec": "lz4"}, ()),
        marks=pytest.mark.slow,
    ),
]


def write(folder: Path, dtype: str, channels: int, how: dict) -> None:
    draw = np.random.default_rng(0)
    with ShardWriter(folder, ["a", "b"], **how) as shards:
        for number in range(4):
            image = draw.random((*SIZE, channels)) + 0.2 * (number % 2)
            image *= 40_000 if dtype == "uint16" else 1
            shards.add(image.astype(dtype), number % 2, "train")


def losses(run_dir: Path, data: Path, channels: int, comm, *more: str) -> list[float]:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("model=resnet18", "model.width=4", "data=shards", f"data.path={data}"),
                *("data.batch_size=2", "trainer.max_steps=2", "trainer.precision=float64"),
                *(device_key(comm), "comm.check=true", *more),
            ],
        )
    trainer = Trainer(config, comm)
    assert trainer.parts.sources.channels == channels
    fit(trainer, run_dir)
    if comm.rank != 0:
        return []
    return json.loads((run_dir / "summary.json").read_text())["loss"]


@pytest.mark.parametrize(("dtype", "channels", "how", "keys"), CASES, ids=str)
@pytest.mark.skipif(WORLD.size not in GRIDS, reason="2, 3 or 4 ranks")
def test_split_images_of_other_types_train_as_whole_ones(
    tmp_path, dtype, channels, how, keys
) -> None:
    folder = Path(WORLD.bcast(str(tmp_path)))
    if WORLD.rank == 0:
        write(folder / "set", dtype, channels, how)
    WORLD.Barrier()
    world, grid = MpiCommunicator(WORLD), f"parallel.grid={GRIDS[WORLD.size]}"
    ours = losses(tmp_path / "ours", folder / "set", channels, world, "parallel=sp", grid, *keys)
    if WORLD.rank == 0:
        plain = losses(
            tmp_path / "plain", folder / "set", channels, SingleProcess(), "parallel=none", *keys
        )
        assert ours == pytest.approx(plain, abs=1e-10)
        assert 0 < plain[0] < 5  # pixels are scaled
