"""Areas and curves compared with scikit-learn, with ties and with weights."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as known

from spatialdl.evaluating.ranking import Ranking


def drawn(count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with many ties, labels, and units."""
    rng = np.random.default_rng(4)
    positive = rng.random(count) < 0.3
    return (rng.normal(size=count) + positive).round(1), positive, rng.integers(0, 25, count)


def test_areas_of_weighted_samples_are_those_of_scikit_learn() -> None:
    scores, positive, unit = drawn()
    weights = np.random.default_rng(5).integers(0, 4, (6, 25)).astype(float)
    areas, averages = Ranking(scores, positive, unit).areas(weights)
    for row, area, average in zip(weights, areas, averages, strict=True):
        given = {"sample_weight": row[unit]}
        assert area == pytest.approx(known.roc_auc_score(positive, scores, **given), abs=1e-12)
        expected = known.average_precision_score(positive, scores, **given)
        assert average == pytest.approx(expected, abs=1e-12)


def test_curves_are_those_of_scikit_learn() -> None:
    scores, positive, unit = drawn()
    curve = Ranking(scores, positive, unit).curve()
    assert curve is not None
    wrong, right, _ = known.roc_curve(positive, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.false_positive, wrong, atol=1e-12)
    np.testing.assert_allclose(curve.recall, right, atol=1e-12)
    precision, recall, _ = known.precision_recall_curve(positive, scores)
    np.testing.assert_allclose(curve.precision, precision[::-1], atol=1e-12)
    np.testing.assert_allclose(curve.recall, recall[::-1], atol=1e-12)


def test_one_class_alone_has_no_area_and_no_curve() -> None:
    scores, positive, unit = drawn()
    for alone in (positive | True, positive & False):
        ranking = Ranking(scores, alone, unit)
        assert np.isnan(ranking.areas(np.ones((2, 25)))).all()
        assert ranking.curve() is None
    left_out = np.array([unit_ % 2 == 0 for unit_ in range(25)], float)[None]
    chosen = left_out[0][unit] > 0
    area, _ = Ranking(scores, positive & ~chosen, unit).areas(left_out)
    assert np.isnan(area).all()
    assert Ranking(np.zeros(0), np.zeros(0, bool), np.zeros(0, int)).curve() is None
