"""Configured single metrics, wrappers and collections."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from spatialdl.training.tasks.making_metrics import is_random, made_metrics
from spatialdl.training.tasks.metric_names import own_metric_plugins
from spatialdl.training.tasks.own_metrics import OwnMetrics

TM = "torchmetrics.classification"
ACCURACY = {"_target_": f"{TM}.MulticlassAccuracy", "num_classes": 3}
F1 = {"_target_": f"{TM}.MulticlassF1Score", "num_classes": 3, "average": "none"}
COLLECTION = "torchmetrics.MetricCollection"


def made(*metrics: dict) -> dict:
    config = OmegaConf.create({"name": "classification", "metrics": list(metrics)})
    return made_metrics(own_metric_plugins(config))


def test_each_metric_of_a_collection_is_one_by_its_key():
    listed = {"_target_": COLLECTION, "metrics": [ACCURACY, F1], "prefix": "val/"}
    named = {"_target_": COLLECTION, "name": "x", "metrics": {"a": ACCURACY, "b": listed}}
    names = [
        *("MetricCollection_val_MulticlassAccuracy", "MetricCollection_val_MulticlassF1Score"),
        *("x_a", "x_b_val_MulticlassAccuracy", "x_b_val_MulticlassF1Score"),
    ]
    assert sorted(made(listed, named)) == sorted(names)


def test_values_are_those_of_the_collection():
    found = OwnMetrics(
        OmegaConf.create(
            {
                "name": "classification",
                "metrics": [{"_target_": COLLECTION, "name": "x", "metrics": [ACCURACY, F1]}],
            }
        )
    )
    shares = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    labels = torch.arange(9) % 3
    values = found.of_samples(shares, labels)
    for name, metric in made(ACCURACY, F1).items():
        metric.update(shares, labels)
        assert values[f"x_{name}"] == pytest.approx(metric.compute().tolist())
    assert found.is_smaller_better("x_MulticlassAccuracy", "key") is False


def test_metrics_of_a_collection_share_no_states():
    """torchmetrics updates only one of those that count the same."""
    one, other = made({"_target_": COLLECTION, "name": "x", "metrics": [ACCURACY, F1]}).values()
    one.update(torch.eye(3), torch.arange(3))
    assert int(other.tp.sum()) == 0
    assert float(one.compute()) == 1


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([{"_target_": COLLECTION, "metrics": []}], "MetricCollection has no metrics"),
        (
            [{"_target_": COLLECTION, "metrics": [{**ACCURACY, "classes": 3}]}],
            "cannot be instantiated",
        ),
        (
            [{"_target_": COLLECTION, "metrics": [ACCURACY, ACCURACY]}],
            "cannot be instantiated: .*two",
        ),
        (
            [
                {**ACCURACY, "name": "x_a"},
                {"_target_": COLLECTION, "name": "x", "metrics": {"a": F1}},
            ],
            "two metrics have the name x_a: rename one",
        ),
        (
            [{"_target_": "torchmetrics.MetricTracker", "metric": ACCURACY}],
            "MetricTracker, expected a torchmetrics.Metric or MetricCollection",
        ),
        (
            [{"_target_": "torchmetrics.MinMaxMetric", "base_metric": ACCURACY}],
            "is a MinMaxMetric, which combines several validations",
        ),
        (
            [
                {
                    "_target_": COLLECTION,
                    "metrics": {
                        "a": {"_target_": "torchmetrics.wrappers.Running", "base_metric": ACCURACY}
                    },
                }
            ],
            "MetricCollection_a is a Running",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(metrics, said):
    with pytest.raises(ValueError, match=said):
        made(*metrics)


def test_random_metrics_are_found_inside_of_wrappers():
    boot = {"_target_": "torchmetrics.BootStrapper", "base_metric": ACCURACY}
    found = made(boot, F1, {"_target_": COLLECTION, "name": "x", "metrics": {"a": boot}})
    assert [name for name, one in found.items() if is_random(one)] == ["BootStrapper", "x_a"]
