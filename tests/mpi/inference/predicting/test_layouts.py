"""Predictions in every layout equal those of a single process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.predicting.batch import run
from spatialdl.inference.predicting.cutting import cutting_of
from spatialdl.inference.predicting.inputs import Input, slide_input
from spatialdl.inference.predicting.pieces import PiecedMap
from spatialdl.inference.predicting.running import Runner, SlideOutput
from spatialdl.inference.predicting.trained import find_trained
from tests.inference.predicting.runs import MAPS, NETWORK, command, train, write_slide
from tests.inference.predicting.volumes import AFFINE, UNET, save, train_on_volumes, voxels
from tests.mpi.device import device_key
from tests.mpi.equality import slow_cases

WORLD = MpiCommunicator(MPI.COMM_WORLD)
TILES = {
    2: ["parallel=gems parallel.microbatches=2", "parallel=none parallel.tensor=2"],
    3: ["parallel=sp parallel.grid=[1,3]", "parallel=dp parallel.data=3"],
    4: [
        "parallel=sp parallel.grid=[2,2]",
        "parallel=dp+pp parallel.microbatches=2",
        "parallel=sp parallel.tensor=2",
        "parallel=sp+lp parallel.grid=[2,1] parallel.local_dp=2 parallel.cut=[conv3]",
    ],
}.get(WORLD.size, [])
REGIONS = {
    2: [
        *("parallel=lp", "parallel=gems", "parallel=none parallel.tensor=2"),
        "parallel=lp parallel.stream=[2,2]",
        "parallel=sp parallel.grid=[2,1] parallel.stream=[1,3]",
    ],
    3: ["parallel=sp parallel.grid=[3,1]", "parallel=dp parallel.data=3"],
    4: ["parallel=sp parallel.grid=[2,2]", "parallel=sp parallel.grid=[1,4]"],
}.get(WORLD.size, [])
VOLUMES = {
    2: [
        *("parallel=sp parallel.grid=[2,1,1]", "parallel=sp parallel.grid=[1,1,2]"),
        *("parallel=lp", "parallel=dp", "parallel=gems"),
        "parallel=sp parallel.grid=[2,1,1] parallel.stream=[1,2,1]",
    ],
    3: [
        *("parallel=sp parallel.grid=[3,1,1]", "parallel=sp+pp parallel.grid=[1,2,1]"),
        "parallel=dp parallel.data=3",  # of which one has nothing to do
    ],
    4: [
        "parallel=sp parallel.grid=[1,2,2]",
        "parallel=sp+lp parallel.grid=[3,1,1]",
        "parallel=dp+sp parallel.grid=[1,1,2]",
        *slow_cases(
            [
                "parallel=dp+pp",
                "parallel=sp parallel.grid=[1,1,2] parallel.tensor=2",
                "parallel=sp+lp parallel.grid=[1,2,1] parallel.local_dp=2",
            ]
        ),
    ],
}.get(WORLD.size, [])
TOLERANCE = 1e-10


class Case(NamedTuple):
    """A trained network, and a slide."""

    run: Path
    slide: Path


def on_rank_0(tmp_path_factory: pytest.TempPathFactory, *overrides: str) -> Case:
    folder = None
    if WORLD.rank == 0:
        folder = tmp_path_factory.mktemp("case")
        train(folder / "run", *overrides)
        write_slide(folder / "a.tiff", 203, 187)
    folder = WORLD.bcast(folder)
    return Case(folder / "run", folder / "a.tiff")


@pytest.fixture(scope="module")
def tiles(tmp_path_factory) -> Case:
    return on_rank_0(tmp_path_factory, *NETWORK)


@pytest.fixture(scope="module")
def maps(tmp_path_factory) -> Case:
    return on_rank_0(tmp_path_factory, "task=segmentation", *MAPS)


def predict(case: Case, comm: Any, layout: str) -> tuple[Input, SlideOutput]:
    words = ["overlap=5", "batch_size=5", "min_tissue=0.3", "activation=true"]
    words += [device_key(comm), f"ckpt_path={case.run}", f"slides={case.slide}", *layout.split()]
    config = command(*words)
    trained = find_trained(str(case.run), comm)
    given = slide_input(case.slide, "a", cutting_of(config, trained))
    return given, Runner(trained, config, comm).run(given)


@pytest.mark.parametrize("layout", TILES)
def test_tiles_equal_one_process(layout, tiles):
    _, ours = predict(tiles, WORLD, f"{layout} level=0")
    if WORLD.rank:
        assert ours.values is None
        return
    given, plain = predict(tiles, SingleProcess(), "parallel=none level=0")
    assert len(given.places) > 30
    assert torch.allclose(ours.values, plain.values, rtol=0, atol=TOLERANCE)
    assert float(plain.values.std(0).min()) > 1e-4  # or any would be equal
    assert list(ours.kept) == list(plain.kept)
    assert np.allclose(ours.activation, plain.activation, rtol=0, atol=1e-6)
    # the mean of what places give to a class is its logit
    logits = torch.from_numpy(plain.activation).double().mean((2, 3))
    assert torch.allclose(logits.softmax(1), plain.values, rtol=0, atol=1e-6)


def whole_map(comm: Any, given: Input, outcome: SlideOutput) -> Any:
    """All classes, on rank 0."""
    found = PiecedMap(comm, given.size, outcome.pieces, given.size)
    return np.stack([np.concatenate(list(found.bands(column, 16))) for column in range(3)])


@pytest.mark.parametrize(("layout", "tta"), zip(REGIONS[::-1], ["flips", "d4"], strict=False))
def test_a_map_is_the_mean_of_those_of_turned_images(layout, tta, maps):
    words = f"activation=false slide_mpp=0.5 mpp=0.73 tta={tta}"
    given, ours = predict(maps, WORLD, f"{layout} {words}")
    found = whole_map(WORLD, given, ours)
    if WORLD.rank:
        return
    plain = map_of_one_process(maps, words)
    expected = whole_map(SingleProcess(), given, plain)
    assert np.abs(found - expected).max() < TOLERANCE
    assert torch.allclose(ours.values, plain.values, rtol=0, atol=TOLERANCE)
    assert np.allclose(plain.values[0], expected.mean((1, 2)), rtol=0, atol=TOLERANCE)
    once = map_of_one_process(maps, "activation=false slide_mpp=0.5 mpp=0.73")
    assert np.abs(expected - whole_map(SingleProcess(), given, once)).max() > 1e-4


@cache
def map_of_one_process(case: Case, words: str) -> SlideOutput:
    return predict(case, SingleProcess(), f"parallel=none {words}")[1]


@pytest.mark.parametrize("layout", REGIONS)
def test_a_map_has_no_seams(layout, maps):
    words = "activation=false slide_mpp=0.5 mpp=0.73"  # between the levels of the slide
    given, ours = predict(maps, WORLD, f"{layout} {words}")
    found = whole_map(WORLD, given, ours)
    if "sp" in layout:  # nobody holds it whole
        held = sum(piece.values[0].numel() for piece in ours.pieces)
        assert held <= -(-given.size[0] * given.size[1] // WORLD.size) * 1.1
    if WORLD.rank:
        return
    assert any(length % 2 for length in given.size)
    plain = map_of_one_process(maps, words)
    expected = whole_map(SingleProcess(), given, plain)
    assert expected.shape == (3, *given.size)
    assert np.abs(found - expected).max() < TOLERANCE
    assert np.abs(expected.sum(0) - 1).max() < TOLERANCE
    assert expected.std() > 1e-3
    assert torch.allclose(ours.values, plain.values, rtol=0, atol=TOLERANCE)
    assert np.allclose(plain.values[0], expected.mean((1, 2)), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory) -> Path:
    """A network trained on volumes, files in two orientations, and their maps."""
    folder = tmp_path_factory.mktemp("volumes") if WORLD.rank == 0 else None
    if folder is not None:
        train_on_volumes(folder, *UNET, "optimizer.lr=0.02", "seed=3", "data.std=0.1")
        (folder / "new").mkdir()
        save(folder / "new" / "a.nii.gz", voxels((11, 9, 10)))
        # columns, rows and slices lead elsewhere than in the training set
        save(folder / "new" / "b.nii", voxels((9, 11, 13)), AFFINE[:, [2, 0, 1, 3]] * [1, -1, 1, 1])
        predict_volumes(folder, SingleProcess(), "parallel=none")
    return Path(WORLD.bcast(folder))


def predict_volumes(folder: Path, comm: Any, layout: str) -> Path:
    out = folder / layout.replace(" ", "_")
    if comm.rank == 0:
        out.mkdir()
    words = (f"ckpt_path={folder / 'run'}", f"volumes={folder / 'new'}", *layout.split())
    words += (device_key(comm),)
    assert run(command(*words), out, comm)
    return out


@pytest.mark.parametrize("layout", VOLUMES)
def test_maps_of_volumes_equal_those_of_one_process(layout, volumes):
    out = predict_volumes(volumes, WORLD, layout)
    if WORLD.rank:
        return
    for name, suffix, shape in (("a", "nii.gz", (11, 9, 10)), ("b", "nii", (9, 11, 13))):
        found, expected = (
            [nibabel.load(one / f"{name}-{kind}.{suffix}") for kind in ("classes", "0", "1", "2")]
            for one in (out, volumes / "parallel=none")
        )
        source = nibabel.load(volumes / "new" / f"{name}.{suffix}")
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape == source.shape == shape
            assert (one.affine == source.affine).all()
            ours, plain = np.asarray(one.dataobj), np.asarray(other.dataobj)
            assert ours.dtype == plain.dtype
            if ours.dtype == np.float64:
                assert np.abs(ours - plain).max() < TOLERANCE
                assert plain.std() > 1e-3  # or any would be equal
            else:
                assert (ours == plain).all()
                assert len(np.unique(plain)) > 1
        pictures = [one / f"{name}-slices.png" for one in (out, volumes / "parallel=none")]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    files = {path.name for path in out.iterdir() if path.is_file()}
    assert files == {path.name for path in (volumes / "parallel=none").iterdir() if path.is_file()}


def test_replicas_take_volumes_of_their_own_and_tell_of_bad_ones(volumes, monkeypatch):
    if WORLD.rank == 0:
        (volumes / "mixed").mkdir()
        (volumes / "mixed" / "bad.nii").write_text("no volume")
        for name in ("c", "d", "e"):
            save(volumes / "mixed" / f"{name}.nii", voxels((6, 5, 4)))
        (volumes / "out").mkdir()
    seen: list[str] = []
    predicted = Runner.run

    def noted(runner: Runner, given: Input) -> SlideOutput:
        seen.append(given.name)
        return predicted(runner, given)

    monkeypatch.setattr(Runner, "run", noted)
    words = (f"ckpt_path={volumes / 'run'}", f"volumes={WORLD.bcast(volumes) / 'mixed'}")
    config = command(
        *words, "parallel=dp", f"parallel.data={WORLD.size}", "maps=false", device_key(WORLD)
    )
    assert not run(config, volumes / "out", WORLD)
    everybody = WORLD.gather(seen)
    if everybody is None:
        return
    assert sorted(name for one in everybody for name in one) == ["c", "d", "e"]
    assert max(map(len, everybody)) <= -(-4 // WORLD.size)
    rows = (volumes / "out" / "volumes.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["bad", "c", "d", "e"]
    assert ["failed" in row for row in rows] == [True, False, False, False]
