from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from spatialdl.comm.single_process import SingleProcess
from spatialdl.training.best import METRICS, Best, check_metric
from spatialdl.training.trainer import Trainer
from tests.bags import write_bags
from tests.fitting import fit


def small(*overrides: str) -> Trainer:
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        given = ("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "device=cpu")
        more = ("data.samples=3", "data.validation_samples=3", "trainer.max_steps=1")
        config = compose("train", [*overrides, *given, *more, "data.batch_size=3"])
    return Trainer(config, SingleProcess())


def survivals(folder: Path) -> Trainer:
    """Of bags, which alone have such labels."""
    (folder / "bags").mkdir()
    write_bags(folder / "bags")
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        config = compose(
            "train",
            [
                *("data=bags", "task=survival", "model=abmil", "trainer.max_steps=1"),
                *("device=cpu", "data.num_classes=2", f"data.features={folder / 'bags'}"),
                f"data.labels={folder / 'bags' / 'labels.csv'}",
            ],
        )
    return Trainer(config, SingleProcess())


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


def test_a_small_gain_does_not_count():
    best = Best("loss", "key", min_delta=0.5)
    assert outcomes(best, [3.0, 2.6, 2.4, 2.0]) == [True, False, True, False]
    assert (best.value, best.worse) == (2.4, 1)


def test_without_a_metric_nothing_is_watched():
    best = Best(None, "key")
    assert not best.update({"loss": 1.0})
    assert best.worse == 0


@pytest.mark.parametrize("metric", ["dice", "samples", "slides", "speed"])
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
    given = ["model=unet", "++model.depth=1"] if task == "segmentation" else []
    trainer = survivals(tmp_path) if task == "survival" else small(*given, f"task={task}")
    fit(trainer, tmp_path)
    (found,) = json.loads((tmp_path / "summary.json").read_text())["validation"]
    numbers = {name for name, value in found.items() if not isinstance(value, list)}
    assert numbers - {"step", "samples"} == {"loss", *METRICS[task]}


def test_a_metric_that_nobody_tells_is_refused():
    check_metric(None, "key", "regression", slides=False)
    check_metric("slide_vote_accuracy", "key", "classification", slides=True)
    sentence = "key=slide_f1 is not a metric .*: use one of loss, accuracy, balanced_accuracy"
    for task, slides in (("multilabel", False), ("segmentation", True)):
        with pytest.raises(ValueError, match=r"key=slide_f1 is not a metric .*: use one of loss"):
            check_metric("slide_f1", "key", task, slides)
    with pytest.raises(ValueError, match=sentence):
        check_metric("slide_f1", "key", "classification", slides=False)
