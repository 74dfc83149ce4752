"""Saved in one layout, resumed in another: the curve of an uninterrupted single process."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import world
from spatialdl.errors import CheckpointError
from spatialdl.training.checkpoints.folder import RANDOM, stage_file
from spatialdl.training.checkpoints.reading import damages, first_whole
from tests.fitting import fit
from tests.mpi.training import checkpointed
from tests.mpi.training.checkpointed import (
    ADAMW,
    LAYOUTS,
    SAVED,
    SGD,
    STEPS,
    Outcome,
    assert_same_bits,
    in_layout,
    run,
)
from tests.training.checkpoints.runs import made

WORLD = world()
SIZE = MPI.COMM_WORLD.size
HERE = [name for name, layout in LAYOUTS.items() if layout.ranks <= SIZE]
# state is sharded over all ranks of a world
HERE = [name for name in HERE if "shard" not in name or LAYOUTS[name].ranks == SIZE]
QUICK = {
    3: [("sp+pp", "dp"), ("gems", "none"), ("tensor", "tensor 3")],
    4: [("none", "shard"), ("shard", "sp+pp tensor"), ("sp+pp tensor", "shard tensor")],
}
CHECKPOINT = f"checkpoints/step-{SAVED:08d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(WORLD.bcast(tmp_path_factory.mktemp("runs")))


@cache
def reference(folder: Path, optimizer: str) -> Outcome:
    path = folder / f"reference-{MPI.COMM_WORLD.rank}-{optimizer.split(maxsplit=1)[0]}"
    return run(
        path, SingleProcess(), LAYOUTS["none"].overrides, optimizer, "trainer.checkpoint.keep=0"
    )


@cache
def saved(folder: Path, layout: str, optimizer: str) -> Outcome | None:
    """Uninterrupted run that writes a checkpoint."""
    return in_layout(WORLD, layout, run_dir_of(folder, layout, optimizer), optimizer)


def run_dir_of(folder: Path, layout: str, optimizer: str) -> Path:
    return folder / f"{layout}-{optimizer.split(maxsplit=1)[0]}".replace(" ", "-").replace("=", "-")


def pairs() -> list[object]:
    """Each layout resumes from every other; a few pairs unless slow tests run."""
    found: list[object] = []
    for number, (before, layout) in enumerate(permutations(HERE, 2)):
        quick = (before, layout) in QUICK.get(SIZE, [])
        optimizer = ADAMW if quick or number % 2 else SGD
        name = f"{before}-to-{layout}".replace(" ", "-")
        marks = () if quick else pytest.mark.slow
        found.append(pytest.param(before, layout, optimizer, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("before", "layout", "optimizer"), pairs())
def test_the_losses_go_on_in_another_layout(before, layout, optimizer, folder, tmp_path):
    saved(folder, before, optimizer)
    path = run_dir_of(folder, before, optimizer) / CHECKPOINT
    ours = in_layout(WORLD, layout, tmp_path / "run", optimizer, f"ckpt_path='{path}'")
    if ours is None:
        return
    plain = reference(folder, optimizer)
    assert list(ours.losses) == list(range(1, STEPS + 1)), "with the rows of the steps before"
    assert ours.losses == pytest.approx(plain.losses, abs=1e-10)
    assert ours.state.keys() == plain.state.keys()
    for name, value in plain.state.items():
        difference = (ours.state[name].double() - value.double()).abs().max()
        assert difference <= 1e-10, f"{name} differs by {difference}"


def alike() -> list[object]:
    return [
        pytest.param(
            layout,
            optimizer,
            marks=() if SIZE < 5 and (layout, optimizer) == ("sp+pp", SGD) else pytest.mark.slow,
            id=f"{layout}-{optimizer.split()[0]}".replace(" ", "-"),
        )
        for layout in HERE
        for optimizer in (SGD, ADAMW)
    ]


@pytest.mark.parametrize(("layout", "optimizer"), alike())
def test_the_same_layout_goes_on_bit_for_bit(layout, optimizer, folder, tmp_path):
    before = saved(folder, layout, optimizer)
    path = run_dir_of(folder, layout, optimizer) / CHECKPOINT
    torch.rand(WORLD.rank + 1)  # drawn elsewhere
    ours = in_layout(WORLD, layout, tmp_path / "run", optimizer, f"ckpt_path='{path}'")
    if ours is not None:
        assert_same_bits(ours, before)


@pytest.mark.skipif(SIZE != 2, reason="needs two ranks")
def test_buffers_of_divided_channels_that_a_forward_assigns_are_saved_whole(tmp_path):
    network = f"{ADAMW} trainer.ema=0.9 model._target_=tests.training.checkpoints.networks.centred"
    path = Path(WORLD.bcast(tmp_path))
    plain = run(path / f"plain-{WORLD.rank}", SingleProcess(), LAYOUTS["none"].overrides, network)
    in_layout(WORLD, "tensor", path / "saved", network)
    checkpoint = f"ckpt_path='{path}/saved/{CHECKPOINT}'"
    ours = in_layout(WORLD, "tensor", path / "on", network, checkpoint)
    assert ours is not None
    for name, value in plain.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=0, atol=1e-10)


@pytest.mark.skipif(SIZE != 2, reason="needs two ranks")
def test_of_what_the_optimizer_has_kept_a_rank_reads_its_part_only(folder, tmp_path, monkeypatch):
    saved(folder, "tensor", ADAMW)
    checkpoint = f"ckpt_path='{run_dir_of(folder, 'tensor', ADAMW) / CHECKPOINT}'"
    trainers = []

    def fitted(trainer, run_dir):
        trainers.append(trainer)
        fit(trainer, run_dir)

    monkeypatch.setattr(checkpointed, "fit", fitted)
    in_layout(WORLD, "tensor", tmp_path / "run", ADAMW, checkpoint)
    for parameter, state in trainers[0].parts.update.optimizer.state.items():
        assert state["exp_avg"].untyped_storage().nbytes() == parameter.nbytes


def test_all_ranks_hear_of_damage_in_any_file(tmp_path):
    checkpoint_folder = Path(WORLD.bcast(tmp_path))
    paths = [checkpoint_folder / f"step-{step:08d}" for step in (9, 6, 3)]
    if WORLD.rank == 0:
        for step in (9, 6, 3):
            made(checkpoint_folder, step, stages=4)
    WORLD.barrier()
    assert damages(paths[0], WORLD) == []
    assert first_whole(paths, WORLD) == paths[0]
    names = [RANDOM, *map(stage_file, range(4))]
    for name in names:
        content = (paths[0] / name).read_bytes()
        WORLD.barrier()
        if WORLD.rank == 0:
            (paths[0] / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        WORLD.barrier()
        (said,) = damages(paths[0], WORLD)
        assert said == f"{name} was changed (SHA-256 mismatch)"
        assert first_whole(paths, WORLD) == paths[1]
        WORLD.barrier()
        if WORLD.rank == 0:
            (paths[0] / name).write_bytes(content)
        WORLD.barrier()
    if WORLD.rank == 0:
        for path in paths:
            (path / "checkpoint.json").write_text("{")
    WORLD.barrier()
    with pytest.raises(CheckpointError, match="as are the 2 other checkpoints"):
        first_whole(paths, WORLD)
