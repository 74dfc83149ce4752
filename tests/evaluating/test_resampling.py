"""Bootstrap intervals of metrics over units."""

from __future__ import annotations

import numpy as np
from scipy import stats

from spatialdl.evaluating.resampling import Resampling, drawn, intervals, point
from spatialdl.evaluating.scores import ClassScores, NumberScores
from tests.evaluating.cases import drawn as tiles


def numbers(units: int) -> NumberScores:
    rng = np.random.default_rng(0)
    errors = rng.exponential(size=(units, 1))
    return NumberScores(errors, np.zeros((units, 1)), np.arange(units))


def test_intervals_are_near_those_of_scipy():
    scores = numbers(80)
    (found,) = intervals(scores, Resampling(4000))["mae"]
    given = (scores.values[:, 0],)
    theirs = stats.bootstrap(given, np.mean, n_resamples=4000, method="percentile", rng=1)
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert abs(found.low - theirs.confidence_interval.low) < 0.08 * width
    assert abs(found.high - theirs.confidence_interval.high) < 0.08 * width
    (narrow,) = intervals(scores, Resampling(4000, 0.5))["mae"]
    assert found.low < narrow.low < float(point(scores)["mae"]) < narrow.high < found.high


def test_units_are_drawn_as_a_whole():
    """Ten copies of each sample in one unit leave the interval unchanged."""
    scores = numbers(30)
    at = np.repeat(np.arange(30), 10)
    copies = NumberScores(scores.values[at], scores.truth[at], at)
    apart = NumberScores(scores.values[at], scores.truth[at], np.arange(300))
    (one,), (same,), (narrow,) = (
        intervals(s, Resampling(500))["mae"] for s in (scores, copies, apart)
    )
    assert np.allclose(one, same, rtol=0, atol=1e-12)
    assert narrow.high - narrow.low < 0.6 * (one.high - one.low)


def test_the_seed_says_what_is_drawn():
    scores = numbers(20)
    first, again, other = (intervals(scores, Resampling(50, 0.95, s))["mae"] for s in (3, 3, 4))
    assert first == again != other
    weights = np.concatenate(list(drawn(scores, Resampling(50))))
    assert weights.shape == (50, 20)
    assert (weights.sum(1) == 20).all()


def test_there_are_no_intervals_of_one_unit_or_of_nothing():
    for scores, count in ((numbers(1), 100), (numbers(9), 0)):
        (found,) = intervals(scores, Resampling(count))["mae"]
        assert np.isnan(found).all()


def test_a_class_that_most_resamples_lack_has_no_interval():
    _, values, truth = tiles(40, 40)
    truth[:] = truth % 2
    found = intervals(ClassScores(values, truth, np.arange(40)), Resampling(200))
    assert np.isnan(found["auroc_per_class"][2]).all()
    assert np.isfinite(found["auroc_per_class"][0]).all()
    assert np.isfinite(found["auroc"][0]).all()
