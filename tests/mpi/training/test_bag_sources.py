"""Bags of several lengths, split or dealt out to replicas: losses, weights and metrics of one
process. Some have fewer tiles than there are ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.errors import UnsupportedSpatialOp
from tests.bags import SMALL, bag_config, write_bags
from tests.mpi.device import device_key
from tests.mpi.training.small import run_of, written_once

WORLD = MPI.COMM_WORLD
LAYOUTS = {
    2: ["parallel=sp parallel.grid=[2]", "parallel=dp parallel.data=2"],
    3: ["parallel=sp parallel.grid=[3]", "parallel=dp parallel.data=3"],
    4: ["parallel=dp+sp parallel.grid=[2] parallel.data=2", "parallel=sp parallel.grid=[4]"],
}
CASES = {
    "abmil": ("data.batch_size=4",),
    "abmil of some tiles": ("data.batch_size=5", "data.max_tiles=9", "trainer.accumulate=2"),
    "mean": ("data.batch_size=4", "task=multilabel", "data.columns=[er,pr]"),
    "max": ("data.batch_size=4", "task.class_weights=[1,2,0.5]", "data.workers=1"),
    "clam": ("data.batch_size=4", "model.branches=multi", "model.exclusive=true"),
    "abmil of risks": (
        *("data.batch_size=5", "task=survival", "task.loss=cox", "trainer.accumulate=1"),
        *("trainer.checkpoint.best=c_index", "parallel.recompute=stage"),
    ),
    "transformer": ("data.batch_size=4", "task.label_smoothing=0.1"),
}
OFTEN = {  # by ranks; the others take long
    2: [
        (0, "abmil of some tiles"),
        (0, "transformer"),
        (1, "abmil"),
        (0, "abmil of risks"),
        (1, "abmil of risks"),
    ],
    3: [(0, "clam"), (1, "max")],
    4: [(0, "mean"), (0, "abmil of risks")],
}
RUNS = [
    pytest.param(
        *(layout, case),
        marks=[] if (number, case) in OFTEN[WORLD.size] else pytest.mark.slow,
        id=f"{layout.split()[0]}-{case}",
    )
    for number, layout in enumerate(LAYOUTS.get(WORLD.size, []))
    for case in CASES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return written_once(tmp_path_factory, write_bags)


def trained(run_dir: Path, folder: Path, comm, *words: str):
    config = bag_config(folder, device_key(comm), "comm.check=true", *words)
    trainer, summary = run_of(config, run_dir, comm)
    return summary, trainer.parts.pipeline.state_dict()


def _numbers(cells: list[str]) -> list[float]:
    return [float(one) for one in cells if one.replace(".", "").isdecimal()]


@pytest.mark.world(2)
def test_transmil_is_refused_on_split_bags_and_trains_on_replicas(tmp_path, folder) -> None:
    """Its square cannot be split."""
    words = (*SMALL["transmil"], "data.batch_size=4", "trainer.max_epochs=1")
    world = MpiCommunicator(WORLD)
    with pytest.raises(UnsupportedSpatialOp):
        trained(tmp_path / "split", folder, world, *words, "parallel=sp", "parallel.grid=[2]")
    dealt = ("parallel=dp", "parallel.data=2")
    ours, _ = trained(tmp_path / "ours", folder, world, *words, *dealt)
    if WORLD.rank == 0:
        plain, _ = trained(tmp_path / "plain", folder, SingleProcess(), *words)
        assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_bags_train_as_in_one_process(tmp_path, folder, layout, case) -> None:
    words = (*SMALL[case.split()[0]], *CASES[case])
    ours, weights = trained(
        tmp_path / "ours", folder, MpiCommunicator(WORLD), *words, *layout.split()
    )
    if WORLD.rank == 0:
        plain, expected = trained(tmp_path / "plain", folder, SingleProcess(), *words)
        assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
        assert len(plain["loss"]) >= 3
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-10)
        tables = [tmp_path / name / "predictions.csv" for name in ("ours", "plain")]
        rows = [[line.split(",") for line in table.read_text().splitlines()] for table in tables]
        for cells, wanted in zip(*rows, strict=True):
            assert cells[:5] == wanted[:5]
            assert _numbers(cells) == pytest.approx(_numbers(wanted), abs=1e-10)
