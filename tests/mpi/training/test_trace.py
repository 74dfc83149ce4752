"""What the trace of a run shows of each rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spatialdl.comm.communicator import Communicator
from spatialdl.training.trainer import Trainer
from tests.composing import composed
from tests.fitting import fit
from tests.mpi.device import device_key
from tests.training.checkpoints.runs import losses

STEPS, OF_A_COPY = 2, 2
WORDS = (
    *("model._target_=tests.mpi.training.small.small", "~model.width", "data.image_size=[70,93]"),
    *("data.batch_size=8", "data.samples=16", "data.validation_samples=3", "data.num_classes=3"),
    *("trainer.precision=float64", f"trainer.max_steps={STEPS}", "trainer.validate_every=1"),
    "parallel.microbatches=4",
)


@pytest.mark.world(4)
def test_a_traced_run_has_the_same_numbers_and_shows_what_each_rank_did(
    world: Communicator, tmp_path: Path
) -> None:
    folder = Path(world.bcast(str(tmp_path)))
    for name, traced in (("run", "true"), ("untraced", "false")):
        words = ("parallel=dp+gems", f"trainer.trace={traced}", device_key(world), *WORDS)
        fit(Trainer(composed("train", *words), world), folder / name)
        world.barrier()
    run = folder / "run"
    assert losses(run) == losses(folder / "untraced")
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["cat"] for span in spans} == {"compute", "hand-over", "reduce", "data"}
    received = [
        span for span in spans if span["name"].startswith("hand-over forward of micro-batch")
    ]
    # outputs that a stage of a replica got in training, none in validation
    assert len(received) == 2 * 4 * STEPS
    done = sorted((span["tid"], *span["args"].values()) for span in spans if "args" in span)
    assert done == sorted(
        (2 * replica + abs(copy - stage), kind, stage, copy * OF_A_COPY + number, copy)
        for replica in (0, 1)
        for kind in ("forward", "backward")
        for stage in (0, 1)
        for copy in (0, 1)
        for number in range(OF_A_COPY)
        for _ in range(STEPS)
    )
