"""Synchronizations of host and device in a training step, on the simulated accelerator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import spatialdl
from spatialdl.comm import check
from spatialdl.comm.device_path import device_path
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.finite import are_finite
from spatialdl.training.tasks.mixup import mixed
from spatialdl.training.tasks.segmentation import Segmentation
from spatialdl.training.tasks.task import Classification, MultiLabel, Task
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
        Case("dp", "odd", (45, 50), ONE, 2, 2, batch=8),  # BatchNorm with momentum=None
        Case("dp", "averages", (17, 14), ONE, 2, 3, 9),  # buffers of a layer of its own
        Case("lp", "resnet18", (50, 50), STAGES, batch=2),
        Case("pp", "resnet18", (50, 50), STAGES, 1, 3, 3, schedule="1f1b"),
        Case("pp", "resnet18", (50, 50), STAGES, 1, 3, 3, schedule="zero_bubble"),
        Case("pp", "resnet18", (45, 50), STAGES * 2, 1, 4, 4, (), "", False, "interleaved", 2),
        Case("gems", "resnet18", (45, 50), STAGES, 1, 4, 4, schedule="basic"),
        Case("none", "resnet18", (50, 50), ONE, batch=2, tensor=(2,)),
        Case("none", "vit", (36, 28), ONE, batch=2, tensor=(2,)),
    ],
    ids=str,
)
def test_by_nccl_a_step_waits_for_its_loss_and_a_look_at_its_gradients(
    case: Case, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    """76 times through the host for the first case."""
    sites = waits_of_a_step(case, None, monkeypatch, world)
    assert sum(sites.values()) <= 2, dict(sites)


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


class OneHot(MultiLabel):
    """Labels of several classes, of which a sample has one."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, F.one_hot(target, 5).double())

    def weights(self, target: Tensor) -> Tensor | None:
        return super().weights(F.one_hot(target, 5).double())


@pytest.mark.parametrize(
    ("case", "task"),
    [
        (Case("sp", "resnet18", (96, 96), ((2, 1),), batch=2), Classification(WEIGHTS, classes=5)),
        (Case("dp", "resnet18", (96, 96), ONE, 2, batch=4), OneHot(WEIGHTS)),
        (
            Case("lp", "resnet18", (50, 50), STAGES, batch=5, local=(1, 2)),
            Classification(WEIGHTS, classes=5),
        ),
        (Case("sp", "unet", (96, 96), ((2, 1),), batch=2), Segmentation(5, WEIGHTS, dice=0.5)),
    ],
    ids=lambda value: value.name if not isinstance(value, Case) else str(value),
)
def test_weights_of_classes_are_copied_to_the_device_once(
    case: Case, task: Task, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> None:
    sites = waits_of_a_step(case, task, monkeypatch, world)
    assert sum(sites.values()) <= 2, dict(sites)


def test_mixup_does_not_wait() -> None:
    tile, target = torch.rand(4, 3, 8, 8).to(DEVICE), torch.tensor([0, 1, 2, 0]).to(DEVICE)
    with torch.sim.wait_sites(str(Path(spatialdl.__file__).parent)) as sites:
        mixed([Microbatch(4, 1.0, tile, target)], 0.4, 3, 0, 0, 0, 1)
    assert not sites, dict(sites)


def waits_of_a_step(
    case: Case, task: Task | None, monkeypatch: pytest.MonkeyPatch, world: MPI.Intracomm
) -> Counter[tuple[str, str, str]]:
    """Where the host waits in the last of several training steps."""
    if device_path().name != "nccl":
        pytest.skip("it waits for what is sent")
    if case.placement.world_size != world.size:
        pytest.skip(f"needs {case.placement.describe()}")
    steps: list[Counter[tuple[str, str, str]]] = []
    train_step = PipelineRuntime.train_step

    def watched(pipeline: PipelineRuntime, microbatches: object, step: int) -> float:
        torch.sim.synchronize()
        with torch.sim.wait_sites(str(Path(spatialdl.__file__).parent)) as sites:
            loss: float = train_step(pipeline, microbatches, step)  # type: ignore[arg-type]
            are_finite(p.grad for p in pipeline.parameters() if p.grad is not None)
            pipeline.gradients.clip(1.0)
        steps.append(sites)
        return loss

    monkeypatch.setattr(PipelineRuntime, "train_step", watched)
    check.enable(False)  # as programs run: hosts do not wait for each other either
    try:
        parallel(case, world, task=task)
    finally:
        check.enable()
    return steps[-1]
