"""Augmented regions, data sets of users and images of other types equal a single process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.data import ShardWriter
from tests.data import own_datasets
from tests.mpi.training.small import trained, written_once

WORLD = MPI.COMM_WORLD
GIVEN = ("data.batch_size=3", "parallel.microbatches=1", "trainer.precision=float64")
SMALL = "++model._target_=tests.mpi.training.small.small", "~model.width"


def compare(folder: Path, layout: str, slices: int, *words: str) -> tuple[dict, dict]:
    """Those of ranks and of one process that accumulates over so many slices of a batch."""
    world = MpiCommunicator(WORLD)
    _, ours = trained(folder / "ours", world, *GIVEN, *words, *layout.split())
    if WORLD.rank > 0:
        return {}, {}
    alone = f"parallel.microbatches={slices}"
    _, plain = trained(folder / "plain", SingleProcess(), *GIVEN, *words, alone)
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
    losses = [[one["loss"] for one in run["validation"]] for run in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    return ours, plain


# --- augmented epochs on regions of many sizes

CROPS = 37, 45
STORED = [(61, 70), (37, 45), (30, 80), (21, 19), (50, 44), (36, 46), (64, 33)]
ALL = [
    *("data/augment=pathology", "data.augment.saturation=0.3", "data.augment.hue=0.2"),
    *("data.augment.stain=0.1", "data.augment.blur=2.5", "data.augment.contrast=0.3"),
    *(f"data.image_size={list(CROPS)}", "trainer.max_steps=4"),  # epochs have 3
]
# (layout, slices of the batch that one process accumulates over); the ranks follow from it
CLASSIFY = {
    2: [("parallel=sp parallel.grid=[1,2]", 1), ("parallel=dp", 2)],
    3: [("parallel=sp+pp parallel.microbatches=2", 2)],
    4: [("parallel=dp+sp", 2)],
}
SEGMENT = {
    3: ["parallel=sp parallel.grid=[1,3]"],
    4: [
        "parallel=sp parallel.grid=[2,2]",
        pytest.param("parallel=sp parallel.grid=[2,2] data.workers=2", marks=pytest.mark.slow),
    ],
}


@pytest.fixture(scope="module")
def regions(tmp_path_factory) -> str:
    def write(folder: Path) -> None:
        draw = np.random.default_rng(0)
        with ShardWriter(folder, ("a", "b", "c"), kind="regions", shard_size=20_000) as shards:
            for number, size in enumerate([*STORED, (60, 50), (20, 90)]):
                image = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
                mask = (image[..., 0] // 86).astype(np.uint8)
                split = "train" if number < len(STORED) else "val"
                shards.add(image, number % 3, split, mask=mask)

    folder = written_once(tmp_path_factory, lambda here: write(here / "set")) / "set"
    return f"data.path={folder}"


@pytest.mark.parametrize(("layout", "slices"), CLASSIFY.get(WORLD.size, []))
def test_augmented_epochs_equal_one_process(layout, slices, regions, tmp_path):
    compare(tmp_path, layout, slices, "data=shards", regions, *ALL, *SMALL)


@pytest.mark.parametrize("layout", SEGMENT.get(WORLD.size, []))
def test_masks_are_augmented_as_their_images(layout, regions, tmp_path):
    unet = ("model=unet", "++model.width=2", "++model.depth=2")
    compare(tmp_path, layout, 1, "data=shards", regions, *ALL, *unet)


# --- data sets of users, with random transforms

OF_USERS = {
    2: [("parallel=dp", 2), ("parallel=sp data.workers=1", 1)],
    3: [("parallel=sp parallel.grid=[3,1]", 1), ("parallel=sp+pp parallel.microbatches=2", 2)],
    4: [("parallel=dp+sp", 2)],
}
OTHERS = {
    2: [("segmentation", "Masks", ("model=unet", "++model.width=2", "++model.depth=1"))],
    3: [("regression", "Numbers", SMALL)],
}


def of_kind(kind: str) -> tuple[str, ...]:
    name = f"data.dataset._target_={own_datasets.__name__}.{kind}"
    validation = ("++data.validation.split=val", "++data.validation.count=5")
    return ("data=dataset", name, *validation, "trainer.max_steps=5", "data.num_classes=2")


@pytest.mark.parametrize(("layout", "slices"), OF_USERS.get(WORLD.size, []))
def test_a_data_set_of_ones_own_trains_as_in_one_process(layout, slices, tmp_path):
    more = ("data.image_size=[19,22]", "data.augment.flip=0.5") if "grid" in layout else ()
    _, plain = compare(tmp_path, layout, slices, *of_kind("OwnGenerator"), *SMALL, *more)
    if WORLD.rank == 0:
        assert len(set(plain["loss"])) == 5
        assert all(one["samples"] == 5 for one in plain["validation"])


@pytest.mark.parametrize(("task", "kind", "more"), OTHERS.get(WORLD.size, []))
def test_masks_and_numbers_train_as_in_one_process(task, kind, more, tmp_path):
    layout = f"parallel=sp parallel.grid=[{WORLD.size},1]"
    compare(tmp_path, layout, 1, *of_kind(kind), f"task={task}", *more)


@pytest.mark.skipif(WORLD.size != 2, reason="2 ranks")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Unrepeatable", r"returns a different first sample each time.*cannot be seeded"),
        ("Noise", r"has 6 samples on rank 1, 5 on rank 0: use identical"),
    ],
)
def test_samples_that_ranks_would_make_differently_are_refused(kind, sentence, tmp_path):
    count = [f"++data.dataset.count={5 + WORLD.rank}"] if kind == "Noise" else []
    with pytest.raises(ValueError, match=sentence):
        compare(tmp_path, "parallel=sp", 1, *of_kind(kind), *count)


# --- 16-bit and float images with any number of channels

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


@pytest.mark.parametrize(("dtype", "channels", "how", "keys"), CASES, ids=str)
@pytest.mark.skipif(WORLD.size not in GRIDS, reason="2, 3 or 4 ranks")
def test_split_images_of_other_types_train_as_whole_ones(tmp_path, dtype, channels, how, keys):
    folder = WORLD.bcast(tmp_path) / "set"
    if WORLD.rank == 0:
        draw = np.random.default_rng(0)
        with ShardWriter(folder, ["a", "b"], **how) as shards:
            for number in range(4):
                image = draw.random((*SIZE, channels)) + 0.2 * (number % 2)
                image *= 40_000 if dtype == "uint16" else 1
                shards.add(image.astype(dtype), number % 2, "train")
    WORLD.Barrier()
    words = ("data=shards", f"data.path={folder}", "trainer.max_steps=2", *SMALL, *keys)
    _, plain = compare(tmp_path, f"parallel=sp parallel.grid={GRIDS[WORLD.size]}", 1, *words)
    if WORLD.rank == 0:
        assert 0 < plain["loss"][0] < 5  # pixels are scaled
