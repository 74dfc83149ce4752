"""User metrics equal those of a single process in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.parts import RunParts
from tests.composing import composed
from tests.fitting import validated
from tests.mpi.device import device_key

TM, OWN = "torchmetrics.classification", "tests.training.tasks.own_metric_classes"
SMALL = "++model._target_=tests.mpi.training.small.small ~model.width"
ALL = "torchmetrics.MetricCollection"
COUNTS = f"{{_target_: {TM}.MulticlassAccuracy, num_classes: 3, average: macro}}"
CURVE = f"{{_target_: {TM}.MulticlassAveragePrecision, num_classes: 3, average: none}}"
STEPS = CURVE.replace("average", "thresholds: 9, average")  # ties would be broken by rounding
IMAGES = [
    f"{{_target_: {TM}.MulticlassF1Score, num_classes: 3, average: macro}}",
    f"{{_target_: {TM}.MulticlassF1Score, num_classes: 3, average: none, name: f1s}}",
    f"{{_target_: {TM}.MulticlassAUROC, num_classes: 3}}",
    f"{{_target_: {OWN}.MeanBrightness, name: own}}",
    f"{{_target_: {ALL}, name: all, prefix: x_, metrics: [{COUNTS}, {CURVE}]}}",
    f"{{_target_: torchmetrics.BootStrapper, base_metric: {COUNTS}, num_bootstraps: 4}}",
]
LABELS = [f"{{_target_: {TM}.MultilabelAveragePrecision, num_labels: 3, ignore_index: -1}}"]
NUMBERS = [
    "{_target_: torchmetrics.regression.MeanAbsolutePercentageError}",
    "{_target_: torchmetrics.regression.SpearmanCorrCoef, num_outputs: 3}",
]
MAPS = [
    f"{{_target_: {ALL}, metrics: {{a: {COUNTS}, curve: {STEPS}}}}}",
    f"{{_target_: torchmetrics.wrappers.LambdaInputTransformer, wrapped_metric: {COUNTS}}}",
    f"{{_target_: {TM}.MulticlassJaccardIndex, num_classes: 3, ignore_index: 255}}",
    f"{{_target_: {TM}.MulticlassAUROC, num_classes: 3, thresholds: 7}}",
    f"{{_target_: {OWN}.MeanBrightness, name: own}}",
    "{_target_: torchmetrics.ClasswiseWrapper, name: each, metric: "
    f"{{_target_: {TM}.MulticlassRecall, num_classes: 3, average: none}}}}",
]
RUNNING = [
    f"{{_target_: {OWN}.RunningMean}}",
    "{_target_: torchmetrics.segmentation.DiceScore, num_classes: 3, input_format: mixed}",
]
TASKS = {
    "classes": (f"{SMALL}", IMAGES),
    "multilabel": (f"{SMALL} task=multilabel", LABELS),
    "regression": (f"{SMALL} task=regression", NUMBERS),
    "maps": ("model=unet ++model.depth=1 ++model.width=2 task=segmentation", MAPS),
    "whole_maps": (
        "model=unet ++model.depth=1 ++model.width=2 task=segmentation",
        [*MAPS, *RUNNING],
    ),
}
ROWS = {
    2: [
        ("parallel=sp parallel.grid=[1,2]", "classes maps"),
        ("parallel=dp", "regression multilabel whole_maps"),
        ("parallel=gems parallel.microbatches=2", "whole_maps"),
        ("parallel=sp parallel.gather_before=head", "maps"),
    ],
    4: [
        ("parallel=sp parallel.data=2", "maps multilabel"),
        ("parallel=sp+pp parallel.grid=[3,1] parallel.microbatches=2", "classes"),
    ],
}
CASES = [
    (layout, task) for layout, tasks in ROWS.get(MPI.COMM_WORLD.size, []) for task in tasks.split()
]


def validated_twice(task: str, layout: str, comm: Any) -> dict[str, Any]:
    """The second must not go on from the first."""
    words, metrics = TASKS[task]
    given = ("data.image_size=[37,45]", "data.num_classes=3", "data.samples=6", "comm.check=true")
    given += ("data.validation_samples=5", "data.batch_size=4", "trainer.max_steps=1")
    given += ("trainer.precision=float64", f"task.metrics=[{','.join(metrics)}]")
    config = composed("train", *given, device_key(comm), *words.split(), *layout.split())
    parts = RunParts(config, comm)
    validated(parts)
    found = validated(parts)
    parts.close_loaders()
    return found


@pytest.mark.parametrize(("layout", "task"), CASES)
def test_own_metrics_equal_one_process(layout: str, task: str) -> None:
    world = MpiCommunicator(MPI.COMM_WORLD)
    ours = validated_twice(task, layout, world)
    assert all(world.bcast(ours) == one for one in world.allgather(ours)), "all ranks get them"
    if world.rank:
        return
    plain = validated_twice(task, "parallel=none", SingleProcess())
    assert ours.keys() == plain.keys()
    assert ours["samples"] == 5
    assert len(ours) > len(TASKS[task][1])
    assert ours.pop("confusion_matrix", None) == plain.pop("confusion_matrix", None)
    for name, value in plain.items():
        near = 1e-6 if name == "DiceScore" else 1e-10  # which computes in float32 itself
        assert ours[name] == pytest.approx(value, abs=near), name
