"""How often the host waits for its device in a training step; run on the simulated accelerator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import spatialdl
from spatialdl.comm import check
from spatialdl.comm.device_path import device_path
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.training.finite import are_finite
from tests.mpi.device import DEVICE
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import parallel

pytestmark = pytest.mark.skipif(DEVICE.type != "sim", reason="only the simulated device is watched")


ONE = ((1, 1),)
STAGES = ONE * 2


@pytest.mark.parametrize(
    "case",
    [
        Case("sp", "resnet18", (96, 96), ((2, 1),), batch=2),
        Case("sp", "unet", (96, 96), ((2, 1),), batch=2),
        Case("dp", "resnet18", (96, 96), ONE, 2, batch=4),
        Case("dp", "resnet18", (96, 96), ONE, 2, batch=4, sync=True),
        Case("lp", "resnet18", (50, 50), STAGES, batch=2),
        Case("pp", "resnet18", (50, 50), STAGES, 1, 3, 3, schedule="1f1b"),
        Case("pp", "resnet18", (50, 50), STAGES, 1, 3, 3, schedule="zero_bubble"),
        Case("pp", "resnet18", (45, 50), STAGES * 2, 1, 4, 4, (), "", False, "interleaved", 2),
        Case("gems", "resnet18", (45, 50), STAGES, 1, 4, 4, schedule="basic"),
    ],
    ids=str,
)
def test_by_nccl_a_step_waits_for_its_loss_and_a_look_at_its_gradients(
    case: Case, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    """76 times through the host for the first case."""
    if device_path().name != "nccl":
        pytest.skip("it waits for what is sent")
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")
    steps: list[Counter[tuple[str, str, str]]] = []
    train_step = Pipeline.train_step

    def watched(pipeline: Pipeline, microbatches: object, step: int) -> float:
        torch.sim.synchronize()
        with torch.sim.wait_sites(str(Path(spatialdl.__file__).parent)) as sites:
            loss: float = train_step(pipeline, microbatches, step)  # type: ignore[arg-type]
            are_finite(p.grad for p in pipeline.parameters() if p.grad is not None)
            pipeline.gradients.clip(1.0)
        steps.append(sites)
        return loss

    monkeypatch.setattr(Pipeline, "train_step", watched)
    check.enable(False)  # as programs run: hosts do not wait for each other either
    try:
        parallel(case, world)
    finally:
        check.enable()
    assert sum(steps[-1].values()) <= 2, dict(steps[-1])
