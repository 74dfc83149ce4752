"""Encoder and aggregator in a training run, on bags of pixels that are split or dealt out: losses,
weights and predictions of one process that keeps the whole graph. Some bags have fewer tiles than
there are ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.bags import EndToEndNetwork
from tests.bags import tile_config, write_tile_bags
from tests.mpi.device import device_key
from tests.mpi.training.small import run_of, written_once

WORLD = MPI.COMM_WORLD
SPLIT = {
    2: ["parallel=sp parallel.grid=[2]", "parallel=dp parallel.data=2"],
    3: ["parallel=sp parallel.grid=[3]"],
    4: ["parallel=dp+sp parallel.grid=[2] parallel.data=2"],
}
AGGREGATORS = {
    "attention": "abmil ++model.aggregator.width=6 ++model.aggregator.hidden=4",
    "max": "bag_pooling ++model.aggregator.width=6 ++model.aggregator.pool=max",
    "transformer": "bag_transformer ++model.aggregator.width=6 ++model.aggregator.heads=2 "
    "++model.aggregator.depth=1",
}
RUNS = [
    pytest.param(
        *(layout, name),
        marks=[] if (number, name) in ((0, "attention"), (1, "max")) else pytest.mark.slow,
        id=f"{layout.split()[0]}-{name}",
    )
    for number, layout in enumerate(SPLIT.get(WORLD.size, []))
    for name in AGGREGATORS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return written_once(tmp_path_factory, write_tile_bags)


def trained(
    run_dir: Path, folder: Path, comm: Any, *words: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings = ("comm.check=true", "data.batch_size=4", "optimizer.lr=0.01", *words)
    trainer, summary = run_of(tile_config(folder, device_key(comm), *settings), run_dir, comm)
    return summary, trainer.parts.pipeline.state_dict()


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_tiles_train_as_in_one_process_with_the_whole_graph(
    tmp_path: Path, folder: Path, layout: str, name: str
) -> None:
    target, *settings = AGGREGATORS[name].split()
    words = (f"model.aggregator._target_=spatialdl.models.{target}", *settings)
    world = MpiCommunicator(WORLD)
    slices = ("model.mode=slices", "model.slice_size=3", *layout.split())
    ours, weights = trained(tmp_path / "ours", folder, world, *words, *slices)
    if WORLD.rank == 0:
        plain, expected = trained(
            tmp_path / "plain", folder, SingleProcess(), *words, "model.mode=graph"
        )
        assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
        assert len(plain["loss"]) == 6
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-10)
        for key in ("loss", "auroc"):
            last = [summary["validation"][-1][key] for summary in (ours, plain)]
            assert last[0] == pytest.approx(last[1], abs=1e-10)


@pytest.mark.world(2)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path, folder: Path) -> None:
    """On replicas, from a checkpoint of a split run."""
    world, end = MpiCommunicator(WORLD), "trainer.max_epochs=2"
    tmp_path = WORLD.bcast(tmp_path)
    first = ("parallel=sp", "parallel.grid=[2]", "trainer.max_epochs=1")
    trained(tmp_path / "first", folder, world, *first)
    second = ("parallel=dp", "parallel.data=2", end, f"ckpt_path={tmp_path / 'first'}")
    ours, weights = trained(tmp_path / "second", folder, world, *second)
    if WORLD.rank == 0:
        plain, expected = trained(tmp_path / "plain", folder, SingleProcess(), end)
        assert ours["loss"][-2:] == pytest.approx(plain["loss"][-2:], abs=1e-10)
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-10)


def test_norms_over_tiles_and_other_tiles_are_refused() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) .* model.frozen_norm=true"):
        EndToEndNetwork(norm, nn.Identity(), (3, 5, 5))
    network = EndToEndNetwork(norm, nn.Identity(), (3, 5, 5), frozen_norm=True).train()
    assert not norm[1].training
    with pytest.raises(ValueError, match=r"is \(1, 75, tiles\), got \(1, 74, 2\)"):
        network(torch.zeros(1, 74, 2))
    with pytest.raises(ValueError, match="mode one of slices, graph"):
        EndToEndNetwork(norm, nn.Identity(), (3, 5, 5), mode="whole")
