"""How far a run is, what is best, and what each part of a step takes."""

from __future__ import annotations

import math
from signal import SIGTERM

import pytest

from spatialdl.comm import trace
from spatialdl.comm.single_process import SingleProcess
from spatialdl.training import step_sync as module
from spatialdl.training.parts import RunParts
from spatialdl.training.progress import (
    METRICS,
    Best,
    TrainingProgress,
    check_metric,
    total_steps,
)
from spatialdl.training.step_sync import PARTS, TimeSplit
from tests.bags import bag_config, write_bags
from tests.composing import composed
from tests.fitting import validated


def progress(*overrides: str, steps: int = 8, batches: int = 3) -> TrainingProgress:
    return TrainingProgress(composed("train", *overrides).trainer, steps, batches)


def due(one: TrainingProgress) -> tuple[list[int], list[int]]:
    """The steps after which a run validates and writes checkpoints."""
    validations, checkpoints = [], []
    while not one.is_over():
        one.step_done()
        if one.validation_is_due():
            one.validated({"loss": 1.0, "accuracy": 0.5, "samples": 1})
            validations.append(one.step)
        if one.checkpoint_is_due():
            checkpoints.append(one.step)
    return validations, checkpoints


@pytest.mark.parametrize(
    ("overrides", "validations", "checkpoints"),
    [
        ([], [3, 6, 8], [3, 6, 8]),
        (["trainer.validate_every=4"], [4, 8], [3, 6, 8]),
        (["trainer.checkpoint.every_steps=5"], [3, 6, 8], [5, 8]),
        (["trainer.early_stopping={metric: loss, patience: 1}"], [3, 6], [3, 6]),
    ],
)
def test_what_is_due(overrides, validations, checkpoints):
    assert due(progress(*overrides)) == (validations, checkpoints)


@pytest.mark.parametrize(
    ("words", "made"),
    [("epochs=2", 6), ("steps=4 epochs=1", 3), ("steps=4 epochs=2", 4), ("steps=4", 4)],
)
def test_the_shorter_limit_ends_the_run(words, made):
    limits = [f"trainer.max_{word}" for word in words.split()]
    assert total_steps(composed("train", *limits).trainer, batches=3) == made


def test_a_run_that_is_told_to_stop_saves_and_leaves_the_validation_for_later():
    one = progress()
    for _ in range(3):
        one.step_done()
    one.stopped = SIGTERM
    assert one.is_over()
    assert one.checkpoint_is_due()
    assert not one.validation_is_due()
    again = progress()
    again.restore(one.state())
    assert (again.step, again.epoch, again.batch) == (3, 1, 0)
    assert again.validation_is_due()
    assert not again.is_over()


SMALL = (
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "data.batch_size=3"),
    *("data.samples=3", "data.validation_samples=3", "trainer.max_steps=1"),
)


def outcomes(best: Best, values: list[float]) -> list[bool]:
    return [best.update({best.metric: value, "samples": 5}) for value in values]


@pytest.mark.parametrize(
    ("metric", "values", "better"),
    [
        ("loss", [3.0, 2.0, 2.0, 2.5, 1.0], [True, True, False, False, True]),
        ("accuracy", [0.1, 0.3, 0.3, 0.2, 0.9], [True, True, False, False, True]),
        ("slide_rmse", [3.0, 4.0, 1.0], [True, False, True]),
        ("auroc", [None, 0.3, None, 0.5], [False, True, False, True]),
        ("loss", [math.nan, 2.0, math.nan, math.inf, 1.0], [False, True, False, False, True]),
    ],
)
def test_losses_fall_and_others_rise(metric, values, better):
    assert outcomes(Best(metric, "key"), values) == better
    assert not Best(None, "key").update({"loss": 1.0}), "without a metric nothing is watched"


@pytest.mark.parametrize("metric", ["dice", "samples", "speed"])
def test_a_metric_that_is_none_is_told_with_those_there_are(metric):
    found = {"loss": 1.0, "mean_dice": 0.5, "dice": [0.5], "samples": 3, "slides": 1}
    with pytest.raises(ValueError, match=rf"key={metric} is not a metric .*: use one of loss, mea"):
        Best(metric, "key").update(found)


def test_it_goes_on_from_what_was_saved_of_the_same_metric():
    best = Best("loss", "key")
    outcomes(best, [3.0, 4.0])
    again, other = Best("loss", "key"), Best("accuracy", "key")
    for one in (again, other):
        one.restore(best.state())
    assert (again.value, again.worse) == (3.0, 1)
    assert (other.value, other.worse) == (None, 0)


@pytest.mark.parametrize("task", METRICS)
def test_the_metrics_that_are_known_before_are_those_that_are_told(task, tmp_path):
    words = (*SMALL, f"task={task}")
    if task == "segmentation":
        words += ("model=unet", "++model.depth=1")
    given = composed("train", *words, "device=cpu") if task != "survival" else None
    if given is None:  # of bags, which alone have such labels
        given = bag_config(write_bags(tmp_path), words[-1], "data.num_classes=2", "device=cpu")
    found = validated(RunParts(given, SingleProcess()))
    numbers = {name for name, value in found.items() if not isinstance(value, list)}
    assert numbers - {"samples"} == {"loss", *METRICS[task]}


def test_a_metric_that_nobody_tells_is_refused():
    check_metric(None, "key", "regression", slides=False)
    check_metric("slide_vote_accuracy", "key", "classification", slides=True)
    tasks = [("multilabel", False, "loss"), ("segmentation", True, "loss")]
    for task, slides, first in (*tasks, ("classification", False, "loss, accuracy, balanced_acc")):
        with pytest.raises(ValueError, match=f"key=slide_f1 is not a metric .*: use .* {first}"):
            check_metric("slide_f1", "key", task, slides)


@pytest.fixture
def clock(monkeypatch):
    """Clock controlled by the test."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    trace.count()
    yield now
    trace.stop_counting()


def wait(clock: list[float], kind: trace.Kind, seconds: float) -> None:
    with trace.span(kind, "a wait"):
        clock[0] += seconds


def test_a_step_is_what_it_waits_for_and_computing(clock):
    split = TimeSplit()
    split.restart()
    wait(clock, "reduce", 7.0)  # between steps: it belongs to none
    clock[0] += 9.0
    split.restart()
    wait(clock, "data", 1.0)
    with trace.span("compute", "forward"):
        clock[0] += 5.0
        wait(clock, "halo", 2.0)
    wait(clock, "reduce", 0.5)
    own = split.own()
    assert own == pytest.approx([8.5, 2.0, 0.0, 0.5, 1.0])
    split.note(own, ranks=1)
    assert split.last == pytest.approx(
        {"compute": 5 / 8.5, "halo": 2 / 8.5, "hand_over": 0, "reduce": 0.5 / 8.5, "data": 1 / 8.5}
    )
    assert sum(split.last.values()) == pytest.approx(1)


def test_the_summary_is_a_mean_over_ranks_and_leaves_the_first_step_out():
    split = TimeSplit()
    assert split.summary() == {}
    split.note([100.0, 0, 0, 0, 100.0], ranks=2)
    assert split.summary()["data"] == 1.0
    split.note([2.0, 1.0, 0, 0, 0], ranks=2)
    split.note([6.0, 1.0, 0, 0, 2.0], ranks=2)
    found = split.summary()
    assert found.pop("seconds_per_step") == pytest.approx(2.0)
    assert tuple(found) == PARTS
    assert found == pytest.approx(
        {"compute": 0.5, "halo": 0.25, "hand_over": 0, "reduce": 0, "data": 0.25}
    )
