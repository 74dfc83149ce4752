"""How often the host waits for its device in a training step; run on the simulated accelerator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import spatialdl
from spatialdl.comm.device_path import device_path
from spatialdl.pipeline.runtime import Pipeline
from tests.mpi.device import DEVICE
from tests.mpi.equality_cases import Case
from tests.mpi.equality_runs import parallel

pytestmark = pytest.mark.skipif(DEVICE.type != "sim", reason="only the simulated device is watched")


@pytest.mark.parametrize(("network", "masks"), [("resnet18", 0), ("unet", 1)])
def test_by_nccl_a_step_waits_for_its_loss_only(
    network: str, masks: int, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    """And once for the classes of masks, which are looked at; 76 times through the host."""
    if device_path().name != "nccl":
        pytest.skip("it waits for what is sent")
    steps: list[Counter[tuple[str, str, str]]] = []
    train_step = Pipeline.train_step

    def watched(pipeline: Pipeline, microbatches: object, step: int) -> float:
        torch.sim.synchronize()
        with torch.sim.wait_sites(str(Path(spatialdl.__file__).parent)) as sites:
            loss: float = train_step(pipeline, microbatches, step)  # type: ignore[arg-type]
        steps.append(sites)
        return loss

    monkeypatch.setattr(Pipeline, "train_step", watched)
    parallel(Case("sp", network, (96, 96), ((world.size, 1),), batch=2), world)
    assert sum(steps[-1].values()) <= 1 + masks, dict(steps[-1])
