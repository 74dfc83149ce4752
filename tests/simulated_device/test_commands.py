"""Training on the device, as users start it on an accelerator that a package brings along.

PyTorch loads such packages when it is imported, see `python_path`. All that surrounds the steps is
run on the device by tests/mpi, in the ranks of pytest.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.training.trainer import Trainer
from tests.comm.programs import run
from tests.composing import composed
from tests.fitting import fit
from tests.simulated_device import python_path

NETWORK = "tests.training.checkpoints.networks.network"  # with dropout
SMALL = [
    *("data.num_classes=3", "data.batch_size=4", "trainer.precision=float64", "seed=3"),
    *("data=shards", "trainer.report=false", "trainer.max_steps=2", "parallel.microbatches=4"),
    *("trainer.checkpoint.every_steps=2", "optimizer.momentum=0.9", "trainer.clip_norm=0.5"),
]


def losses(folder: Path) -> list[float]:
    """By step, and of validations."""
    with (folder / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == [1, 2]
    validations = json.loads((folder / "summary.json").read_text())["validation"]
    return [float(row["loss"]) for row in (*rows, *validations)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ["parallel=sp", "comm.device_path=nccl"]),
        pytest.param(
            3,
            ["parallel=sp+pp", "comm.device_path=host", "data.workers=1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_equals_one_process_on_the_cpu(ranks, words, tmp_path):
    draw = np.random.default_rng(0)
    with ShardWriter(tmp_path / "set", ["a", "b", "c"], codec="zstd") as writer:
        for number in range(12):
            image = draw.integers(0, 256, (37, 29, 3), np.uint8)
            writer.add(image, number % 3, "val" if number > 7 else "train")
    given = [*SMALL, f"data.path={tmp_path / 'set'}"]
    network = [f"++model._target_={NETWORK}", "~model.width", "device=cpu"]
    config = composed("train", *given, *network)
    fit(Trainer(config, SingleProcess()), tmp_path / "plain")
    (tmp_path / "plugin").mkdir()
    done = run(
        *("-m", "spatialdl.train", *given, f"model._target_={NETWORK}", "device=sim", *words),
        "hydra.run.dir=run",
        cwd=tmp_path,
        PYTHONPATH=":".join([python_path(tmp_path / "plugin"), *sys.path]),
        SIM_DEVICES=str(ranks),
        SIM_DELAY_US="50",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensors between devices: " in done.stdout
    assert f"ranks 0 to {ranks - 1}" in done.stdout
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), abs=1e-10)
