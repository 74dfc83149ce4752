"""The commands on the device, as users start them on an accelerator that a package brings along.

PyTorch loads such packages when it is imported, see `autoload`.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.training.trainer import Trainer
from tests.fitting import fit
from tests.simulated_device.autoload import python_path

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "tests.training.checkpoints.networks.network"  # with dropout
SMALL = [
    *("data.num_classes=3", "data.batch_size=4", "trainer.precision=float64", "seed=3"),
    *(f"model._target_={NETWORK}", "trainer.report=false", "trainer.max_steps=4"),
    *("trainer.checkpoint.every_steps=2", "optimizer.momentum=0.9", "trainer.clip_norm=0.5"),
]
SLICES = {"none": 4, "dp": 2, "sp": 4, "sp+pp": 4, "gems": 4, "sp+gems": 4}
"""Micro-batches, so that replicas and micro-batches together cut a batch into four."""


def start(folder: Path, module: str, *words: str, path: str = "auto", ranks: int = 2) -> str:
    """What a command prints."""
    plugin = folder / "plugin"
    if not plugin.exists():
        plugin.mkdir()
        python_path(plugin)
    done = subprocess.run(
        [sys.executable, "-m", module, *words, f"comm.device_path={path}"],
        cwd=folder,
        env={
            **os.environ,
            **{"PYTHONPATH": f"{plugin}:{ROOT}", "SIM_DEVICES": str(ranks), "SIM_DELAY_US": "100"},
            **{"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_sim(folder: Path, layout: str, *words: str, path: str = "nccl", ranks: int = 2) -> str:
    """Training there, in `folder`/run unless `words` say where."""
    own = [f"parallel={layout}", f"parallel.microbatches={SLICES[layout]}", "device=sim"]
    run = [] if any(word.startswith("hydra.") for word in words) else ["hydra.run.dir=run"]
    how = {"path": path, "ranks": ranks}
    return start(folder, "spatialdl.train", *SMALL, *own, *run, *words, **how)  # type: ignore[arg-type]


def alone(folder: Path, *words: str) -> list[float]:
    """Losses of one process on the CPU."""
    own = [word.replace("model._", "++model._") for word in (*SMALL, *words)]
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose("train", [*own, "~model.width", "device=cpu", "parallel.microbatches=4"])
    folder.mkdir(exist_ok=True)
    fit(Trainer(config, SingleProcess()), folder)
    return losses(folder)


def losses(run: Path) -> list[float]:
    """By step."""
    with (run / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def validation(run: Path) -> list[float]:
    found = json.loads((run / "summary.json").read_text())["validation"]
    return [one["loss"] for one in found]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set that is read by chunks; the override that names it."""
    folder = tmp_path_factory.mktemp("shards") / "set"
    draw = np.random.default_rng(0)
    with ShardWriter(folder, ["a", "b", "c"], codec="zstd") as writer:
        for number in range(12):
            image = draw.integers(0, 256, (37, 29, 3), np.uint8)
            writer.add(image, number % 3, "val" if number > 7 else "train")
    return f"data.path={folder}"


@pytest.fixture(scope="module")
def one_process(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the CPU."""
    folder = tmp_path_factory.mktemp("plain")
    alone(folder, "data=shards", shards)
    return folder


@pytest.fixture(scope="module")
def split(shards: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of tiles on two devices, and what it printed."""
    folder = tmp_path_factory.mktemp("split")
    return folder / "run", on_sim(folder, "sp", "data=shards", shards, "data.workers=1")


def test_training_of_tiles_equals_one_process_on_the_cpu(
    split: tuple[Path, str], one_process: Path
) -> None:
    is_that_of_one_process(*split, one_process, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "path", "ranks", "words"),
    [
        ("sp+pp", "host", 3, ["parallel.recompute=block"]),
        ("dp", "nccl", 2, []),
        ("gems", "host", 2, []),
        ("sp+gems", "nccl", 3, []),
    ],
)
def test_training_equals_one_process_on_the_cpu(
    layout: str,
    path: str,
    ranks: int,
    words: list[str],
    shards: str,
    one_process: Path,
    tmp_path: Path,
) -> None:
    said = on_sim(tmp_path, layout, "data=shards", shards, *words, path=path, ranks=ranks)
    is_that_of_one_process(tmp_path / "run", said, one_process, ranks)


def is_that_of_one_process(run: Path, said: str, one_process: Path, ranks: int) -> None:
    assert "tensors between devices: " in said
    assert f"ranks 0 to {ranks - 1}" in said
    assert losses(run) == pytest.approx(losses(one_process), abs=1e-10)
    assert validation(run) == pytest.approx(validation(one_process), abs=1e-10)


@pytest.mark.parametrize("layout", ["sp", pytest.param("dp", marks=pytest.mark.slow)])
def test_a_run_resumes_as_if_it_had_not_stopped(
    layout: str, shards: str, split: tuple[Path, str], one_process: Path, tmp_path: Path
) -> None:
    """Dropout included: in the same layout to the bit, in another one to rounding."""
    run, _ = split
    whole = losses(run)
    checkpoint = f"ckpt_path={run / 'checkpoints' / 'step-00000002'}"
    on_sim(tmp_path, layout, "data=shards", shards, checkpoint, "hydra.run.dir=again")
    again = losses(tmp_path / "again")
    assert again == pytest.approx(losses(one_process), abs=1e-10)
    if layout == "sp":
        assert again == whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sp", "dp"])
def test_predictions_equal_those_of_one_process_on_the_cpu(
    layout: str, shards: str, one_process: Path, tmp_path: Path
) -> None:
    given = (f"ckpt_path={one_process}", shards.replace("data.path", "shards"), "trust=[tests]")
    module = "spatialdl.predict"
    start(tmp_path, module, *given, "device=cpu", "hydra.run.dir=plain")
    start(tmp_path, module, *given, "device=sim", f"parallel={layout}", "hydra.run.dir=ours")
    ours, plain = (rows(tmp_path / name) for name in ("ours", "plain"))
    assert len(plain) == 12
    for one, other in zip(ours, plain, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            if key.startswith("probability"):
                assert float(one[key]) == pytest.approx(float(value), abs=1e-10)
            else:
                assert one[key] == value
    assert any(key.startswith("probability") for key in plain[0])


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "predictions.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
def test_half_precision_trains_as_far_from_float32_as_on_the_cpu(
    precision: str, shards: str, tmp_path: Path
) -> None:
    words = ("data=shards", shards, "optimizer.lr=0.01")
    exact = alone(tmp_path / "exact", *words)
    plain = alone(tmp_path / "plain", *words, f"trainer.precision={precision}")
    on_sim(tmp_path, "sp", *words, f"trainer.precision={precision}")
    ours = losses(tmp_path / "run")
    assert ours != exact, "nothing was rounded"
    rounding = max(abs(a - b) for a, b in zip(plain, exact, strict=True))
    assert ours == pytest.approx(exact, abs=max(2 * rounding, 0.01))
