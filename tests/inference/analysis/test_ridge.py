"""Ridge regression beside that of scikit-learn: of numbers, of classes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.model_selection import GroupKFold, cross_val_predict, cross_val_score

from spatialdl.inference.analysis import Ridge, RidgeClassifierCV, RidgeCV

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(101, 9)) * np.arange(1, 10) + 50
ROWS[:, 2] = 4  # a column that is constant
BOTH = ROWS @ RNG.normal(size=(9, 2)) + RNG.normal(size=(101, 2)) * 20 + 1000
TARGETS = {"one": BOTH[:, 0], "two": BOTH}


@pytest.mark.parametrize(
    ("name", "intercept", "alpha"),
    [("one", True, 0.01), ("two", False, 3.0), ("two", True, [0.5, 70])],
)
def test_ridge_is_that_of_scikit_learn(name, intercept, alpha):
    y = TARGETS[name]
    ours = Ridge(alpha, fit_intercept=intercept).fit(ROWS, y)
    theirs = linear_model.Ridge(alpha, fit_intercept=intercept).fit(ROWS, y)
    assert ours.coef_.shape == theirs.coef_.shape
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-9)
    np.testing.assert_allclose(ours.predict(ROWS), theirs.predict(ROWS), rtol=1e-9)


def test_without_penalty_it_is_least_squares():
    """Of several solutions, here because of a column that is there twice, the shortest."""
    rows = np.concatenate([ROWS, ROWS[:, :1]], 1)
    ours = Ridge(0).fit(rows, BOTH)
    np.testing.assert_allclose(
        ours.coef_, linear_model.LinearRegression().fit(rows, BOTH).coef_, atol=1e-8
    )


@pytest.mark.parametrize(("name", "intercept"), [("one", False), ("two", True)])
def test_cross_validation_is_that_of_models_fitted_without_each_fold(name, intercept):
    y, alphas = TARGETS[name], (1.0, 100.0, 1e4)
    ours = RidgeCV(alphas, cv=6, fit_intercept=intercept).fit(ROWS, y)
    error = "neg_mean_squared_error"
    theirs = linear_model.RidgeCV(alphas, cv=6, fit_intercept=intercept, scoring=error).fit(ROWS, y)
    plain = linear_model.Ridge(fit_intercept=intercept)
    for alpha, scores in zip(alphas, ours.scores_, strict=True):
        wanted = cross_val_score(plain.set_params(alpha=alpha), ROWS, y, cv=6, scoring=error)
        np.testing.assert_allclose(scores, wanted, rtol=1e-9)
    assert ours.alpha_ == theirs.alpha_
    assert ours.best_score_ == pytest.approx(theirs.best_score_)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(ours.predict(ROWS), theirs.predict(ROWS), rtol=1e-9)
    held_out = cross_val_predict(plain.set_params(alpha=ours.alpha_), ROWS, y, cv=6)
    for fold in range(6):
        inside = ours.folds_ == fold
        np.testing.assert_allclose(
            ours.without(fold).predict(ROWS[inside]), held_out[inside], rtol=1e-9
        )


def test_groups_are_never_in_two_folds():
    groups = np.array([f"patient-{n}" for n in RNG.integers(0, 11, len(ROWS))])
    ours = RidgeCV(cv=4).fit(ROWS, BOTH, groups)
    assert set(ours.folds_) == {0, 1, 2, 3}
    for name in set(groups):
        assert len(set(ours.folds_[groups == name])) == 1
    plain = linear_model.Ridge(ours.alpha_)
    splits = [
        (np.flatnonzero(ours.folds_ != f), np.flatnonzero(ours.folds_ == f)) for f in range(4)
    ]
    wanted = cross_val_score(plain, ROWS, BOTH, cv=splits, scoring="neg_mean_squared_error")
    np.testing.assert_allclose(ours.scores_[[0.1, 1.0, 10.0].index(ours.alpha_)], wanted)
    sizes = np.bincount(ours.folds_)
    theirs = [len(test) for _, test in GroupKFold(4).split(ROWS, groups=groups)]
    assert sizes.max() - sizes.min() <= max(theirs) - min(theirs) + 1


def test_refusals():
    holes = BOTH.copy()
    holes[5, 1] = np.nan
    for model, y, message in [
        (Ridge(-1), BOTH, "alpha=-1 must be numbers of at least 0"),
        (Ridge([1, 2, 3]), BOTH, "alpha has 3 numbers for 2 targets"),
        (Ridge(), BOTH[:-1], r"targets have shape \(100, 2\) for 101 rows"),
        (Ridge(), holes, "the target of row 5 is not finite"),
        (RidgeCV(cv=1), BOTH, "cv=1 must be between 2 and the 101 rows"),
        (RidgeCV(cv=102), BOTH, "cv=102 must be between 2 and the 101 rows"),
        (RidgeCV([]), BOTH, "must be numbers of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.fit(ROWS, y)
    with pytest.raises(ValueError, match="cv=5 must be between 2 and the 3 groups"):
        RidgeCV().fit(ROWS, BOTH, np.arange(101) % 3)
    with pytest.raises(ValueError, match="expected one for each of 101 rows"):
        RidgeCV().fit(ROWS, BOTH, np.arange(3))


# --- of classes


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 classes on all ranks, expected at least 2"):
        RidgeClassifierCV().fit(ROWS, ["a"] * 101)
