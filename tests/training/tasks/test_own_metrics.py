"""User metrics: checks before training, and their output."""

from __future__ import annotations

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchmetrics import ClasswiseWrapper
from torchmetrics.classification import MulticlassAUROC, MulticlassRecall

from spatialdl.training.checks import check_config
from spatialdl.training.progress import Best
from spatialdl.training.tasks.foreign_metrics import (
    made_metrics,
    merge,
    state_of,
)
from spatialdl.training.tasks.metric_names import own_metric_plugins
from spatialdl.training.tasks.own_metrics import OwnMetrics
from tests.composing import composed
from tests.fitting import make_parts, summary, train
from tests.training.checkpoints.runs import table
from tests.training.tasks.own_metric_classes import MeanBrightness, RunningMean

TM, OWN = "torchmetrics.classification", "tests.training.tasks.own_metric_classes"
F1 = f"{{_target_: {TM}.MulticlassF1Score, num_classes: 3, average: macro}}"
ACCURACY = {"_target_": f"{TM}.MulticlassAccuracy", "num_classes": 3}
SMALL = (
    *("model.width=2", "data.image_size=[40,36]", "data.num_classes=3", "data.samples=6"),
    *("data.validation_samples=6", "data.batch_size=3", "device=cpu", "trainer.max_steps=2"),
)


def config(*overrides: str) -> DictConfig:
    return composed("train", *SMALL, *overrides)


def own(task: str, *metrics: dict) -> OwnMetrics:
    return OwnMetrics(OmegaConf.create({"name": task, "metrics": list(metrics)}))


def tried(metrics: OwnMetrics, columns: int | None = 3, copies: int = 1, parts: int = 1) -> None:
    metrics.try_out(columns, 3, 2, copies, parts)


def test_they_are_in_tables_and_decide_on_the_end(tmp_path):
    recall = f"{{_target_: {TM}.MulticlassRecall, num_classes: 3, average: null}}"
    words = f"task.metrics=[{F1},{recall}]"
    early = ("trainer.early_stopping.metric=MulticlassF1Score", "trainer.validate_every=1")
    best = ("trainer.checkpoint.best=MulticlassF1Score",)
    train(tmp_path, *SMALL, words, *early, *best)
    rows = table(tmp_path / "validation.csv")
    assert len(rows) == 2
    for row in rows:  # the built-in one is the same
        assert float(row["MulticlassF1Score"]) == pytest.approx(float(row["f1"]), abs=1e-12)
    found = summary(tmp_path)["validation"]
    assert found[0]["MulticlassRecall"] == pytest.approx(found[0]["recall_per_class"])
    assert "MulticlassF1Score" in (tmp_path / "report.html").read_text()


def test_what_they_get_of_each_task(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # they waited for it
    mape = {"_target_": "torchmetrics.regression.MeanAbsoluteError"}
    values, labels = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[2.0], [torch.nan], [7.0]])
    found = own("regression", mape).of_samples(values.double(), labels)
    assert found == {"MeanAbsoluteError": 1.5}, "what is not known does not count"
    exact = {"_target_": f"{TM}.MultilabelAccuracy", "num_labels": 2, "average": "micro"}
    shares = torch.tensor([[0.9, 0.2], [0.1, 0.6]]).double()
    known = torch.tensor([[1.0, torch.nan], [0.0, 0.0]])
    assert own("multilabel", {**exact, "ignore_index": -1}).of_samples(shares, known) == {
        "MultilabelAccuracy": pytest.approx(2 / 3)
    }
    with pytest.raises(ValueError, match="unknown labels are -1: set ignore_index"):
        own("multilabel", exact).of_samples(shares, known)


def test_of_nothing_and_of_nan_they_have_no_value():
    metrics = own("classification", {"_target_": f"{TM}.MulticlassF1Score", "num_classes": 3})
    for values in (torch.zeros(0, 3), torch.full((2, 3), torch.nan)):
        labels = torch.zeros(len(values)).long()
        assert metrics.of_samples(values, labels) == {"MulticlassF1Score": None}


def test_a_metric_that_refuses_its_input_is_named_with_the_shapes_before_training():
    words = f"task.metrics=[{{_target_: {TM}.MulticlassF1Score, num_classes: 4}}]"
    said = r"MulticlassF1Score rejects predictions float64 \(24, 3\) and targets int64 \(24,\)"
    with pytest.raises(ValueError, match=said):
        make_parts(*SMALL, words)
    maps = ("model=unet", "++model.depth=1", "task=segmentation")
    said = r"rejects predictions float64 \(1, 3, 12, 12\) and targets int64 \(1, 12, 12\)"
    with pytest.raises(ValueError, match=said):
        make_parts(*SMALL, *maps, words)


def test_what_cannot_be_put_together_from_ranks_is_refused():
    loose = own("segmentation", {"_target_": f"{OWN}.NoReduction"})
    tried(loose)
    with pytest.raises(ValueError, match=r"NoReduction cannot be reduced over 2 ranks.*'last'"):
        tried(loose, copies=2)
    edges = own("segmentation", {"_target_": f"{OWN}.Edges"})
    tried(edges, copies=2)  # of replicas, which have whole maps
    with pytest.raises(ValueError, match="Edges needs whole maps, but this layout splits them"):
        tried(edges, copies=2, parts=2)
    dice = {"_target_": "torchmetrics.segmentation.DiceScore", "num_classes": 3}
    with pytest.raises(ValueError, match="DiceScore needs whole maps"):
        tried(own("segmentation", {**dice, "input_format": "mixed"}), copies=2, parts=2)
    jaccard = {"_target_": f"{TM}.MulticlassJaccardIndex", "num_classes": 3}
    tried(own("segmentation", jaccard, {"_target_": f"{OWN}.MeanBrightness"}), copies=2, parts=2)


def test_wrappers_on_maps_have_the_value_of_what_they_wrap():
    """Wrappers do not count updates."""
    kind = "torchmetrics.wrappers.LambdaInputTransformer"
    wrapped = {"_target_": kind, "wrapped_metric": ACCURACY, "name": "in"}
    metrics = own("segmentation", ACCURACY, wrapped)
    tried(metrics, copies=2, parts=2)
    copies = [metrics.of_maps(torch.device("cpu")) for _ in range(3)]
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(3, (2, 4, 4), generator=draw)
    for number, copy in enumerate(copies[:2]):
        copy.update_own(torch.randn(1, 3, 4, 4, generator=draw), target[number : number + 1])
    found = copies[2].merged([copy.states() for copy in copies])
    assert found["in"] == found["MulticlassAccuracy"] is not None


def test_a_metric_that_draws_samples_draws_the_same_ones_and_shifts_no_others():
    boot = {"_target_": "torchmetrics.BootStrapper", "base_metric": ACCURACY, "num_bootstraps": 5}
    metrics = own("classification", boot)
    shares = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double().softmax(1)
    before = torch.get_rng_state()
    first = metrics.of_samples(shares, torch.arange(9) % 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert metrics.of_samples(shares, torch.arange(9) % 3) == first
    assert first["BootStrapper_std"] > 0
    with pytest.raises(ValueError, match=r"BootStrapper draws random samples .* maps"):
        tried(own("segmentation", boot))


def test_pixels_of_no_class_need_ignore_index():
    target = torch.full((1, 4, 4), 255)
    metrics = own("segmentation", {"_target_": f"{TM}.MulticlassF1Score", "num_classes": 3})
    with pytest.raises(ValueError, match="unlabelled pixels are 255: set ignore_index: 255"):
        metrics.of_maps(torch.device("cpu")).update_own(torch.zeros(1, 3, 4, 4), target)


def test_whether_small_or_large_values_are_best_is_said_by_the_metric():
    metrics = own(
        "regression",
        {"_target_": "torchmetrics.regression.MeanAbsolutePercentageError", "name": "off"},
        {"_target_": "torchmetrics.regression.ConcordanceCorrCoef"},
        {"_target_": f"{OWN}.Edges"},
    )
    assert metrics.is_smaller_better("off", "key") is True
    assert metrics.is_smaller_better("slide_off", "key") is True
    assert metrics.is_smaller_better("ConcordanceCorrCoef", "key") is False
    assert metrics.is_smaller_better("rmse", "key") is None
    assert metrics.is_smaller_better(None, "key") is None
    with pytest.raises(ValueError, match="key=Edges: higher_is_better of its class is None"):
        metrics.is_smaller_better("Edges", "key")
    best = Best("off", "key", smaller=True)
    assert [best.update({"off": value}) for value in (2.0, 1.0, 3.0)] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task.metrics=3", "task.metrics=3 must be a list"),
        ("task.metrics=[f1]", "task.metrics: f1 has no class: write it as"),
        (f"task.metrics=[{F1},{F1}]", "duplicate name MulticlassF1Score: rename one"),
        ("task.metrics=[{_target_: a.B, name: accuracy}]", "duplicate name accuracy"),
        ("task.metrics=[{_target_: a.B, name: slide_x}]", "name=slide_x is reserved for"),
        ("task.metrics=[{_target_: a.B, name: a-b}]", "name=a-b must have only letters"),
        ("trainer.checkpoint.best=MulticlassF1Score", "is not a metric of this task"),
    ],
)
def test_lists_that_name_no_metrics_are_refused_before_ranks_start(words, said):
    with pytest.raises(ValueError, match=said):
        check_config(config(words))
    for name in ("MulticlassF1Score", "MulticlassF1Score_0"):
        check_config(config(f"task.metrics=[{F1}]", f"trainer.checkpoint.best={name}"))


F1_EACH = {"_target_": f"{TM}.MulticlassF1Score", "num_classes": 3, "average": "none"}


def collected(metrics: object, **keys: object) -> dict:
    return {"_target_": "torchmetrics.MetricCollection", "metrics": metrics, **keys}


def test_each_metric_of_a_collection_is_one_by_its_key():
    listed = collected([ACCURACY, F1_EACH], prefix="val/")
    named = collected({"a": ACCURACY, "b": listed}, name="x")
    names = [
        *("MetricCollection_val_MulticlassAccuracy", "MetricCollection_val_MulticlassF1Score"),
        *("x_a", "x_b_val_MulticlassAccuracy", "x_b_val_MulticlassF1Score"),
    ]
    given = OmegaConf.create({"name": "classification", "metrics": [listed, named]})
    assert sorted(made_metrics(own_metric_plugins(given))) == sorted(names)


RUNNING = {"_target_": "torchmetrics.wrappers.Running", "base_metric": ACCURACY}
TRACKER = {"_target_": "torchmetrics.MetricTracker", "metric": ACCURACY}
EXTREMES = {"_target_": "torchmetrics.MinMaxMetric", "base_metric": ACCURACY}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([{"_target_": f"{TM}.NoSuchScore"}], "NoSuchScore cannot be instantiated"),
        ([{"_target_": f"{TM}.MulticlassF1Score"}], "cannot be instantiated: .*num_classes"),
        ([{"_target_": "torch.nn.ReLU"}], "torch.nn.ReLU creates a ReLU, expected a torchmetrics"),
        ([{"_target_": f"{OWN}.Pairs"}], "Pairs returns a tuple, expected a number"),
        (
            [{"_target_": f"{TM}.MulticlassConfusionMatrix", "num_classes": 3}],
            r"MulticlassConfusionMatrix returns \(3, 3\), expected",
        ),
        ([collected([])], "MetricCollection has no metrics"),
        ([collected([{**ACCURACY, "classes": 3}])], "cannot be instantiated"),
        ([collected([ACCURACY, ACCURACY])], "cannot be instantiated: .*two"),
        (
            [{**ACCURACY, "name": "x_a"}, collected({"a": F1_EACH}, name="x")],
            "two metrics have the name x_a: rename one",
        ),
        ([TRACKER], "MetricTracker, expected a torchmetrics.Metric or MetricCollection"),
        ([EXTREMES], "is a MinMaxMetric, which combines several validations"),
        ([collected({"a": RUNNING})], "MetricCollection_a is a Running"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, said):
    with pytest.raises(ValueError, match=said):
        tried(own("classification", *metrics))


DRAW = torch.Generator().manual_seed(0)
GIVEN = torch.randn(9, 3, generator=DRAW, dtype=torch.float64).softmax(1)
WANTED = torch.arange(9) % 3
MAKES = [
    MeanBrightness,
    RunningMean,
    lambda: MulticlassAUROC(3),  # keeps all it has seen
    lambda: ClasswiseWrapper(MulticlassRecall(3, average=None)),
]


@pytest.mark.parametrize("make", MAKES)
def test_parts_are_the_whole(make):
    def seen(numbers):
        metric = make()
        for number in numbers:
            metric.update(GIVEN[number : number + 1], WANTED[number : number + 1])
        return metric

    together = make()
    merge(together, [state_of(seen(part)) for part in (range(5), range(5, 5), range(5, 9))])
    found, expected = together.compute(), seen(range(9)).compute()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, check_dtype=False)
