"""Metrics equal those of scikit-learn, torchmetrics and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as known

from spatialdl.evaluating.resampling import point
from spatialdl.evaluating.scores import ClassScores, LabelScores, NumberScores, PixelScores
from spatialdl.training.tasks.metrics import (
    classification_scores,
    from_pairs,
    multilabel_scores,
    regression_scores,
)
from tests.evaluating.cases import drawn


def test_classes_as_scikit_learn():
    _, values, truth = drawn()
    found = point(ClassScores(values, truth, np.arange(len(truth))))
    told = values.argmax(1)
    is_class = [truth == k for k in range(3)]
    expected = {
        "accuracy": known.accuracy_score(truth, told),
        "balanced_accuracy": known.balanced_accuracy_score(truth, told),
        "f1_per_class": known.f1_score(truth, told, average=None),
        "recall_per_class": known.recall_score(truth, told, average=None),
        "precision_per_class": known.precision_score(truth, told, average=None),
        "auroc_per_class": [known.roc_auc_score(is_class[k], values[:, k]) for k in range(3)],
        "average_precision_per_class": [
            known.average_precision_score(is_class[k], values[:, k]) for k in range(3)
        ],
    }
    for name, value in expected.items():
        assert np.allclose(found[name], value, rtol=0, atol=1e-12), name
    assert len(np.unique(values)) < values.size / 2  # there are ties


def test_calibration_as_torchmetrics():
    from torchmetrics.functional.classification import multiclass_calibration_error

    _, _, truth = drawn()
    values = np.random.default_rng(5).dirichlet((1, 1, 1), len(truth))  # none at an edge of bins
    values[:3] = np.eye(3)[truth[:3]]  # a confidence of 1
    given = torch.from_numpy(values), torch.from_numpy(truth)
    expected = float(multiclass_calibration_error(*given, 3, n_bins=15, norm="l1"))
    found = point(ClassScores(values, truth, np.arange(len(truth))))["calibration_error"]
    assert found == pytest.approx(expected, abs=1e-6)  # torchmetrics has float32 bins


def test_classes_as_in_training():
    _, values, truth = drawn(20)
    truth[:] = truth % 2  # a class that is missing
    ours = point(ClassScores(values, truth, np.arange(20)))
    assert np.isnan(ours["auroc_per_class"][2])
    compare(ours, classification_scores(torch.from_numpy(values), torch.from_numpy(truth)))


def test_labels_as_in_training_and_scikit_learn():
    rng = np.random.default_rng(1)
    values, truth = rng.random((60, 3)).round(1), rng.integers(0, 2, (60, 3)).astype(float)
    truth[rng.random((60, 3)) < 0.2] = np.nan
    truth[:, 2] = np.where(np.isnan(truth[:, 2]), np.nan, 1)  # all alike
    ours = point(LabelScores(values, truth, np.arange(60)))
    compare(ours, multilabel_scores(torch.from_numpy(values), torch.from_numpy(truth)))
    there = ~np.isnan(truth[:, 0])
    expected = known.average_precision_score(truth[there, 0], values[there, 0])
    assert ours["average_precision_per_class"][0] == pytest.approx(expected, abs=1e-12)


def test_numbers_as_in_training_and_scikit_learn():
    rng = np.random.default_rng(2)
    truth = rng.normal(size=(50, 2))
    values = truth + rng.normal(size=(50, 2))
    truth[:5, 0] = np.nan
    ours = point(NumberScores(values, truth, np.arange(50)))
    compare(ours, regression_scores(torch.from_numpy(values), torch.from_numpy(truth)))
    far, told = 1e6 + truth, 1e6 + values  # whose squares have no digits left for their spread
    r2 = known.r2_score(far[:, 1], told[:, 1])
    found = point(NumberScores(told, far, np.arange(50)))
    assert found["r2_per_target"][1] == pytest.approx(r2, abs=1e-8)
    same = point(NumberScores(values[:, :1], np.ones((50, 1)), np.arange(50)))
    assert np.isnan(same["r2"])


def test_pixels_as_in_training():
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, 90, (7, 3, 3))
    pairs[0, 2], pairs[0, :, 2] = 0, 0  # an image without a class
    ours = point(PixelScores(pairs, np.arange(7)))
    theirs = from_pairs(torch.from_numpy(pairs.sum(0)).double())
    compare(ours, {name: theirs[name] for name in ("accuracy", "mean_dice", "mean_iou")})
    of_images = [from_pairs(torch.from_numpy(one).double())["dice"] for one in pairs]
    column = [row[2] for row in of_images if row[2] is not None]
    assert len(column) == 6
    assert ours["image_dice_per_class"][2] == pytest.approx(np.mean(column), abs=1e-12)


def compare(ours, theirs, tolerance=1e-12):
    checked = 0
    for name, value in theirs.items():
        if name in ours:
            expected = np.array(value, np.float64)  # None is NaN
            equal = np.allclose(ours[name], expected, rtol=0, atol=tolerance, equal_nan=True)
            assert equal, (name, ours[name], value)
            checked += 1
    assert checked >= 3


def test_weights_are_copies_of_samples():
    """A unit that is drawn twice counts as two."""
    slides, values, truth = drawn(40, 5)
    unit = np.array([int(name[1:]) for name in slides])
    weights = np.array([[2, 0, 1, 3, 0], [1, 1, 1, 1, 1]], float)
    copies = np.repeat(np.arange(40), weights[0][unit].astype(int))
    pairs = np.random.default_rng(0).integers(0, 9, (40, 3, 3))
    makers = [
        lambda at: ClassScores(values[at], truth[at], unit[at]),
        lambda at: LabelScores(values[at], (np.eye(3)[truth])[at], unit[at]),
        lambda at: NumberScores(values[at], (np.eye(3)[truth])[at], unit[at]),
        lambda at: PixelScores(pairs[at], unit[at]),
    ]
    for make in makers:
        whole, some = make(np.arange(40)), make(copies)
        found = whole.metrics(weights)
        expected = point(some)
        for name, value in expected.items():
            assert np.allclose(found[name][0], value, rtol=0, atol=1e-12, equal_nan=True), name
            assert np.allclose(found[name][1], point(whole)[name], atol=1e-12), name
