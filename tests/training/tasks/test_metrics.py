"""Beside torchmetrics' own numbers, which it takes in float32, and counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torchmetrics.functional import classification as reference
from torchmetrics.functional import r2_score

from spatialdl.training.tasks.losses import segmentation_loss
from spatialdl.training.tasks.metrics import (
    classification_scores,
    multilabel_scores,
    regression_scores,
)
from spatialdl.training.tasks.segmentation import Segmentation
from tests.training.tasks.test_losses import masks


def drawn(classes: int, samples: int = 101) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(classes)
    logits = torch.randn(samples, classes, dtype=torch.float64, generator=draw)
    return logits.softmax(1), torch.randint(classes, (samples,), generator=draw)


@pytest.mark.parametrize("classes", [2, 5])
def test_classification(classes):
    told, labels = drawn(classes)
    found = classification_scores(told, labels)
    expected = {
        "accuracy": reference.multiclass_accuracy(told, labels, classes, average="micro"),
        "balanced_accuracy": reference.multiclass_accuracy(told, labels, classes),
        "auroc": reference.multiclass_auroc(told, labels, classes),
        "f1": reference.multiclass_f1_score(told, labels, classes),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), abs=1e-6), name
    assert found["confusion_matrix"] == (
        reference.multiclass_confusion_matrix(told, labels, classes).tolist()
    )


def pairs_won(told: torch.Tensor, wanted: torch.Tensor) -> float:
    """AUROC by definition: share of pairs in which the sample of the class scores higher."""
    above = told[wanted][:, None] - told[~wanted]
    return float(((above > 0).double() + 0.5 * (above == 0)).mean())


def test_auroc_has_all_digits_and_counts_ties_half():
    told, labels = drawn(3)
    told = (told * 20).round() / 20
    found = classification_scores(told, labels)["auroc_per_class"]
    exact = [pairs_won(told[:, c], labels == c) for c in range(3)]
    assert found == pytest.approx(exact, abs=1e-14)
    assert torch.get_default_dtype() == torch.float32


def test_a_class_that_does_not_occur_has_no_auroc_and_spoils_no_mean():
    told, labels = drawn(4)
    labels[labels == 2] = 1
    found = classification_scores(told, labels)
    assert found["auroc_per_class"][2] is found["recall_per_class"][2] is None
    others = [pairs_won(told[:, c], labels == c) for c in (0, 1, 3)]
    assert found["auroc"] == pytest.approx(sum(others) / 3, abs=1e-14)
    recalls = [found["recall_per_class"][c] for c in (0, 1, 3)]
    assert found["balanced_accuracy"] == pytest.approx(sum(recalls) / 3)
    alone = classification_scores(told[:1], labels[:1])
    assert alone["auroc"] is None
    column = classification_scores(torch.ones(3, 1, dtype=torch.float64), torch.zeros(3).long())
    assert (column["accuracy"], column["auroc"]) == (1.0, None)
    nothing = classification_scores(told[:0], labels[:0])
    assert nothing["accuracy"] is nothing["auroc"] is nothing["f1"] is None


def test_multilabel():
    draw = torch.Generator().manual_seed(0)
    told = torch.rand(60, 3, dtype=torch.float64, generator=draw)
    labels = torch.randint(2, (60, 3), generator=draw)
    labels[torch.rand(60, 3, generator=draw) < 0.2] = -1
    found = multilabel_scores(told, labels.double().masked_fill(labels < 0, torch.nan))
    given = {"preds": told, "target": labels, "num_labels": 3, "ignore_index": -1}
    assert found["accuracy"] == pytest.approx(
        reference.multilabel_accuracy(**given, average="micro").item(), abs=1e-6
    )
    assert found["auroc"] == pytest.approx(reference.multilabel_auroc(**given).item(), abs=1e-6)
    assert found["f1"] == pytest.approx(reference.multilabel_f1_score(**given).item(), abs=1e-6)
    matrices = reference.multilabel_confusion_matrix(**given)
    assert found["confusion_matrix"] == matrices.tolist()
    unknown = torch.full((60, 3), torch.nan)
    assert multilabel_scores(told, unknown)["accuracy"] is None


def test_regression():
    draw = torch.Generator().manual_seed(0)
    told = torch.randn(40, 2, dtype=torch.float64, generator=draw)
    wanted = told + 0.5 * torch.randn(40, 2, dtype=torch.float64, generator=draw)
    wanted[7, 1] = torch.nan
    found = regression_scores(told, wanted)
    error = told - wanted
    assert found["mae"] == pytest.approx(error.abs().nanmean(0).mean().item(), abs=1e-14)
    assert found["rmse"] == pytest.approx(error.square().nanmean(0).sqrt().mean().item(), abs=1e-14)
    assert found["r2_per_target"][0] == pytest.approx(r2_score(told[:, 0], wanted[:, 0]).item())
    constant = regression_scores(told[:3], torch.ones(3, 2))
    assert constant["r2"] is None
    assert constant["mae"] is not None


TASKS = [Segmentation(4), Segmentation(4, torch.tensor([0.5, 2.0, 1.0, 3.0]), 0.1, 0.7)]


@pytest.mark.parametrize("task", TASKS)
def test_tallies_of_parts_add_up_to_that_of_the_whole(task):
    output, target = masks(3, 9, 7)
    whole = task.tally(output, target, part=0)
    parts = task.tally(output[:1], target[:1], 0) + task.tally(output[1:], target[1:], 0)
    torch.testing.assert_close(parts, whole)
    assert len(whole) == task.tallied
    found = task.metrics(whole.tolist())
    assert found["loss"] == pytest.approx(task.loss(output, target).item(), abs=1e-13)


def test_copies_on_other_parts_and_pixels_of_no_weight_cost_nothing():
    output, target = masks(3, 9, 7)
    assert not Segmentation(4).tally(output, target, part=1).any()
    task = Segmentation(4, torch.tensor([0.0, 1.0, 1.0, 1.0]), 0.1)
    assert task.metrics(task.tally(output, target * 0, 0).tolist())["loss"] == 0


def test_metrics_of_a_segmentation():
    target = torch.tensor([[[0, 0, 1, 1, 255, 255]]])
    told = torch.tensor([[[0, 1, 1, 1, 1, 2]]])
    output = F.one_hot(told, 4).permute(0, 3, 1, 2).double()
    task = Segmentation(4)
    found = task.metrics(task.tally(output, target, 0).tolist())
    assert found["accuracy"] == 3 / 4
    assert found["dice"][:2] == pytest.approx([2 / 3, 4 / 5])
    assert found["iou"][:2] == pytest.approx([1 / 2, 2 / 3])
    assert found["dice"][2:] == found["iou"][2:] == [None, None]
    assert found["confusion_matrix"][:2] == [[1, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    assert found["mean_dice"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert found["mean_iou"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["loss"] == pytest.approx(segmentation_loss(output, target).item())
    assert found["samples"] == 1


def test_a_channel_without_a_class_is_a_wrong_prediction():
    output = torch.zeros(1, 3, 1, 3)
    output[:, 2, :, 1:] = 1
    task = Segmentation(2)
    found = task.metrics(task.tally(output, torch.tensor([[[0, 0, 0]]]), 0).tolist())
    assert (found["accuracy"], found["dice"], found["iou"]) == (1 / 3, [1 / 2, None], [1 / 3, None])
    with pytest.raises(ValueError, match="a pixel of class 2, but there are 2 classes: set data"):
        task.tally(output, torch.tensor([[[0, 2, 0]]]), 0)
