"""Losses, metrics and predictions of every task equal a single process in every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import nn

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.tasks.task import MultiLabel
from tests.mpi.training.small import small, trained

SMALL = "++model._target_=tests.mpi.training.small.small ~model.width "
TASKS = {
    "classes": SMALL + "task.class_weights=[1,2,0.5] task.label_smoothing=0.1 task.mixup=0.4 "
    "trainer.freeze=[conv1.*,bn1.*]",
    "balanced": SMALL + "task.class_weights=balanced",
    "multilabel": SMALL + "task=multilabel task.pos_weight=[1,3,0.5] task.label_smoothing=0.1",
    "regression": SMALL + "task=regression task.loss=huber task.huber_delta=0.2 task.mixup=0.4",
    "maps": "model=unet ++model.depth=1 ++model.width=2 task.class_weights=[1,2,0.5] task.dice=0.5",
    "own": SMALL + "++task.loss._target_=tests.mpi.training.small.focal ++task.loss.gamma=1.5",
    "own_maps": "model=unet ++model.depth=1 ++model.width=2 ++task.loss.weights=[1,2,0.5] "
    "++task.loss._target_=tests.mpi.training.small.Overlap ++task.loss.power=1.5",
    "deep": "++model.width=2 trainer.freeze=[conv1.*,bn1.*,layer1.0.*] task.mixup=1",
}
LOCAL = "parallel=sp+lp parallel.grid=[2,1] parallel.local_dp=2 parallel.cut=[conv3]"
PIPED = "parallel=sp+pp parallel.grid=[3,1] parallel.microbatches=2"
GEMS = "parallel=dp+gems parallel.microbatches=2"
SHARDED = "parallel=dp parallel.data=4 parallel.shard_state=true"
ALL = "classes balanced multilabel regression maps own own_maps deep"


class Row(NamedTuple):
    """A layout with tasks; batches have so many samples, and one process cuts so many slices."""

    layout: str
    slices: int
    batch: int
    quick: str
    slow: str = ""


ROWS = {
    2: [
        Row("parallel=gems parallel.microbatches=2", 2, 4, "classes own_maps", ALL),
        Row("parallel=sp parallel.gather_before=head", 1, 4, "maps", "own_maps"),
        Row("parallel=none parallel.tensor=2", 1, 4, "classes maps", ALL),
    ],
    # batches of 4, and a last one of 2; 5 samples to validate on
    3: [Row("parallel=dp parallel.data=3", 3, 4, "classes maps", ALL)],
    4: [
        Row("parallel=sp parallel.grid=[2,2]", 1, 4, "maps", ALL),
        Row(LOCAL, 1, 4, "balanced multilabel", "classes regression"),
        Row("parallel=sp parallel.tensor=2", 1, 4, "own_maps", ALL),
        Row(PIPED, 2, 4, "classes", ALL),
        Row(GEMS, 4, 5, "", ALL),
        Row(SHARDED, 4, 5, "classes", "deep"),
    ],
}
CHOSEN = [
    pytest.param(row, task, marks=[] if task in row.quick.split() else pytest.mark.slow)
    for row in ROWS.get(MPI.COMM_WORLD.size, [])
    for task in dict.fromkeys(f"{row.quick} {row.slow}".split())
]


def train(run_dir: Path, comm: Any, layout: str, task: str, batch: int) -> dict[str, Any]:
    words = ("data.image_size=[40,36]", "data.num_classes=3", f"data.batch_size={batch}")
    words += ("data.samples=10", "data.validation_samples=5", "trainer.precision=float64")
    words += (f"trainer.max_steps={-(-10 // batch)}", *TASKS[task].split(), *layout.split())
    _, summary = trained(run_dir, comm, *words)
    if comm.rank != 0:
        return {}
    tables = [run_dir / "predictions.csv"] if "maps" not in task else []
    cells = [cell for file in tables for line in file.open() for cell in line.strip().split(",")]
    return {"loss": summary["loss"], "validation": summary["validation"], "predictions": cells}


def close(found: Any, expected: Any) -> None:
    """Numbers and lists of lists of numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif isinstance(expected, str):
        assert found == expected or float(found) == pytest.approx(float(expected), abs=1e-10)
    else:
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    @cache
    def reference(slices: int, task: str, batch: int) -> dict[str, Any]:
        layout = f"parallel=none parallel.microbatches={slices}"
        return train(tmp_path_factory.mktemp("plain"), SingleProcess(), layout, task, batch)

    return reference


@pytest.mark.parametrize(("row", "task"), CHOSEN)
def test_tasks_equal_one_process(row, task, tmp_path, plain) -> None:
    ours = train(tmp_path, MpiCommunicator(MPI.COMM_WORLD), row.layout, task, row.batch)
    if MPI.COMM_WORLD.rank == 0:
        close(ours, plain(row.slices, task, row.batch))


SIZE, SAMPLES = (21, 17), 5


def drawn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model, images = small(3, 3).double(), torch.randn(SAMPLES, 3, *SIZE, dtype=torch.float64)
    target = torch.tensor([[1, 0, 1], [0, torch.nan, 1], [1, 1, torch.nan], [0, 0, 0], [1, 0, 0]])
    target[0, :2] = torch.nan
    return model, images, target.double()


@pytest.mark.world(3)
def test_parts_of_a_micro_batch_count_by_their_known_labels_in_float64(world: Communicator) -> None:
    model, images, target = drawn()
    known = ~target.isnan()
    loss = nn.functional.binary_cross_entropy_with_logits(model(images)[known], target[known])
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    task, placement = MultiLabel(), Placement(1, ((1, 1),) * 2, batch=(1, 2))
    pipeline = PipelineRuntime(
        *(drawn()[0], placement, make_schedule("gpipe", placement, 1), world, task.loss),
        (3, *SIZE),
        PipelineOptions(sample_weights=task.weights),
    )
    batch = Microbatch(
        SAMPLES, 1.0, images if pipeline.first(0) else None, target if pipeline.last(0) else None
    )
    total = world.allreduce(pipeline.train_step([batch], 0))
    assert total == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)
