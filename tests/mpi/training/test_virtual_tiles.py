"""Virtual tiles on several ranks with activations on disk equal a single process."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training import signals
from spatialdl.training.tasks.segmentation import Segmentation
from tests.fitting import check_validations
from tests.mpi.device import REFERENCE
from tests.mpi.training.small import trained

WORLD = MPI.COMM_WORLD
SMALL = (
    *("data.num_classes=3", "data.samples=5", "data.batch_size=4"),
    *("data.validation_samples=3", "data/augment=pathology", "trainer.precision=float64"),
    *("trainer.max_steps=2", "trainer.validate_every=1", "trainer.report=false"),
)
KINDS = {
    "classification": [
        *("++model._target_=tests.mpi.training.small.small", "~model.width"),
        "data.image_size=[140,133]",
    ],
    "segmentation": [
        *("task=segmentation", "model=unet", "model.width=4", "model.depth=1"),
        "data.image_size=[70,67]",
    ],
}
# (layout, slices of the batch that one process accumulates over); the ranks follow from it
LAYOUTS = {
    2: [
        ("parallel=sp parallel.grid=[2,1] parallel.stream=[1,2]", 1),
        ("parallel=sp parallel.grid=[1,2] parallel.stream=[2,1] data.workers=1", 1),
        ("parallel=dp parallel.stream=[2,2]", 2),
        ("parallel=pp parallel.microbatches=2 parallel.stream=[2,2]", 2),
    ],
    3: [("parallel=sp+pp parallel.microbatches=2 parallel.stream=[2,1]", 2)],
    4: [("parallel=dp+sp parallel.stream=[1,2]", 2)],
}


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize(("layout", "slices"), LAYOUTS.get(WORLD.size, []))
def test_equals_one_process(layout, slices, task, tmp_path):
    words = [*KINDS[task], "parallel.microbatches=1", *layout.split()]
    limit = ["trainer.memory_limit_gb=0.0001", f"parallel.stream_to={tmp_path}"]
    trainer, ours = trained(tmp_path / "ours", MpiCommunicator(WORLD), *SMALL, *words, *limit)
    written = trainer.parts.pipeline.options.memory.store.written
    assert WORLD.allreduce(written) > 600_000
    noted = WORLD.gather(written / 1e6)
    if WORLD.rank > 0:
        return
    _, plain = trained(
        tmp_path / "plain", SingleProcess(), *SMALL, *KINDS[task], f"parallel.microbatches={slices}"
    )
    assert ours["world_size"] == WORLD.size
    assert [one["written"] for one in ours["offloaded_mb"]] == noted
    assert ours["loss"] == pytest.approx(plain["loss"], abs=1e-10)
    assert len(ours["validation"]) == len(plain["validation"]) == 2
    check_validations(ours["validation"], plain["validation"])


@pytest.mark.world(2, 4)
def test_maps_are_validated_tile_by_tile(tmp_path, monkeypatch):
    """Map and masks of a rank's whole tile were in memory at once, and in no limit."""
    layout = {2: "sp parallel.grid=[2,1]", 4: "dp+sp"}[WORLD.size]
    words = [*KINDS["segmentation"], *f"parallel={layout} parallel.stream=[2,3]".split()]
    words += ["task.dice=1", "data.image_size=[71,69]", "trainer.max_steps=1"]
    tallied: list[tuple[int, ...]] = []
    tally = Segmentation.tally

    def noted(self: Segmentation, output: Any, target: Any, part: int) -> Any:
        tallied.append(tuple(output.to_local().shape[2:]))
        assert output.to_local().shape[2:] == target.to_local().shape[1:]
        return tally(self, output, target, part)

    with monkeypatch.context() as patch:
        patch.setattr(Segmentation, "tally", noted)
        _, ours = trained(tmp_path / "ours", MpiCommunicator(WORLD), *SMALL, *words)
    assert tallied
    assert all(rows <= 24 and columns <= 24 for rows, columns in tallied)
    if WORLD.rank > 0:
        return
    slices = WORLD.size // 2
    own = [*KINDS["segmentation"], *words[-3:], f"parallel.microbatches={slices}"]
    _, plain = trained(tmp_path / "plain", SingleProcess(), *SMALL, *own)
    check_validations(ours["validation"], plain["validation"])


@pytest.mark.world(2, 4)
def test_all_ranks_give_up_a_step_when_one_of_them_is_told_to_stop(tmp_path, monkeypatch):
    """At the same call of all: else some would wait for what the others do not send any more."""
    grid = "parallel.grid=[2,1]" if WORLD.size == 2 else "parallel.grid=[2,2]"
    words = [*KINDS["classification"], "parallel=sp", grid, "parallel.stream=[1,2]"]
    monkeypatch.setattr(signals._Seen, "first", None)
    asked = 0
    stop_at = -1

    def seen() -> bool:
        nonlocal asked
        asked += 1
        if asked == stop_at and WORLD.rank == WORLD.size - 1:
            signals._Seen.first = signal.SIGTERM
        return signals._Seen.first is not None

    with monkeypatch.context() as within:
        within.setattr(signals, "seen", seen)
        whole, _ = trained(tmp_path / "whole", MpiCommunicator(WORLD), *SMALL, *words)
        of_a_step = asked // whole.progress.step
        asked, stop_at = 0, of_a_step * 3 // 2  # in the midst of the second step
        stopped, _ = trained(tmp_path / "ours", MpiCommunicator(WORLD), *SMALL, *words)
    assert stop_at <= asked < stop_at + 10  # it did not end the step
    assert 0 < stopped.progress.step < whole.progress.step
    assert stopped.progress.stopped is signal.SIGTERM
    monkeypatch.setattr(signals._Seen, "first", None)
    ours, _ = trained(tmp_path / "ours", MpiCommunicator(WORLD), *SMALL, *words, "ckpt_path=latest")
    state = ours.parts.pipeline.state_dict()
    most = 0.0 if REFERENCE.type == "cpu" else 1e-10  # cuDNN adds up in no fixed order
    for name, value in whole.parts.pipeline.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=most, msg=name)
