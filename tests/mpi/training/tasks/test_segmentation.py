"""Training and validation on shards with masks equal a single process in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from spatialdl.data.format import UNLABELLED
from spatialdl.data.shards import ShardDataset
from tests.mpi.training.small import trained, written_once
from tests.training.checkpoints.runs import table

SIZE = 37, 45
LAYOUTS = {
    2: [
        "parallel=sp parallel.grid=[1,2] parallel.recompute=block",
        "parallel=sp parallel.gather_before=decoder.1",
        "parallel=dp",
        "parallel=none parallel.tensor=2",
    ],
    3: ["parallel=sp parallel.grid=[3,1]"],
    4: [
        "parallel=sp parallel.data=2",
        pytest.param("parallel=sp parallel.tensor=2", marks=pytest.mark.slow),
    ],
}


def write(folder: Path) -> None:
    """Seven training and three validation images with unlabelled pixels."""
    draw = np.random.default_rng(0)
    with ShardWriter(
        folder, classes=("background", "gland", "tumour"), shard_size=20_000
    ) as shards:
        for number in range(10):
            image = draw.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
            mask = (image[..., 0] // 86).astype(np.uint8)
            mask[draw.random(SIZE) < 0.1] = UNLABELLED
            shards.add(image, None, "train" if number < 7 else "val", mask=mask)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return written_once(tmp_path_factory, lambda folder: write(folder / "set")) / "set"


def train(run_dir: Path, data: Path, comm, layout: str) -> tuple[dict, list[dict[str, str]]]:
    words = ("model=unet", "++model.width=2", "++model.depth=2", "data=shards")
    words += (f"data.path={data}", "data.batch_size=3", "parallel.microbatches=1")
    words += ("trainer.max_steps=3", "trainer.validate_every=2", "trainer.precision=float64")
    _, summary = trained(run_dir, comm, *words, *layout.split())
    return summary, table(run_dir / "validation.csv") if comm.rank == 0 else []


@pytest.mark.parametrize("layout", LAYOUTS.get(MPI.COMM_WORLD.size, []))
def test_shards_with_masks_equal_one_process(layout, data, tmp_path, monkeypatch) -> None:
    world = MpiCommunicator(MPI.COMM_WORLD)
    asked: list[tuple[int, int, int, int]] = []
    read_mask = ShardDataset.read_mask

    def reading(self, sample, box=None):
        asked.append(box)
        return read_mask(self, sample, box)

    monkeypatch.setattr(ShardDataset, "read_mask", reading)
    ours, our_rows = train(tmp_path / "ours", data, world, layout)
    pixels = max((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in asked)
    if "dp" not in layout:
        others = 2 if "data=2" in layout or "tensor=2" in layout else 1
        parts = world.size / others
        assert pixels <= 1.2 * SIZE[0] * SIZE[1] / parts, "a rank reads its own box only"
    if world.rank != 0:
        return
    # two replicas accumulate over the same slices as one process with twice the micro-batches
    slices = 2 if "data=2" in layout or "dp" in layout else 1
    plain_layout = f"parallel=none parallel.microbatches={slices}"
    plain, plain_rows = train(tmp_path / "plain", data, SingleProcess(), plain_layout)
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
    assert len(our_rows) == len(plain_rows) == 2
    for found, expected in zip(our_rows, plain_rows, strict=True):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert float(found[key]) == pytest.approx(float(value), abs=1e-10), key
        assert int(found["samples"]) == 3
    for found, expected in zip(ours["validation"], plain["validation"], strict=True):
        assert found["dice"] == pytest.approx(expected["dice"], abs=1e-10)
        assert found["iou"] == pytest.approx(expected["iou"], abs=1e-10)
