from __future__ import annotations

import numpy as np
import pytest
from sklearn import linear_model

from spatialdl.analysis import RidgeClassifierCV

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(90, 5))
NUMBERS = np.argmax(ROWS[:, :3] + RNG.normal(size=(90, 3)), 1)


@pytest.mark.parametrize("names", [("b", "a", "c"), ("yes", "no", "no")])
def test_classes_and_weights_are_those_of_scikit_learn(names: tuple[str, ...]) -> None:
    classes = np.array(names)[NUMBERS]
    ours = RidgeClassifierCV([2.0], cv=3).fit(ROWS, classes)
    theirs = linear_model.RidgeClassifier(2.0).fit(ROWS, classes)
    assert ours.classes_.tolist() == theirs.classes_.tolist()
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-10)
    np.testing.assert_allclose(
        ours.decision_function(ROWS), theirs.decision_function(ROWS), rtol=1e-9, atol=1e-12
    )
    assert (ours.predict(ROWS) == theirs.predict(ROWS)).all()
    assert ours.score(ROWS, classes) == pytest.approx(theirs.score(ROWS, classes), abs=1e-15)


def test_rows_that_are_held_out_are_not_seen() -> None:
    classes, groups = np.array(["a", "b", "c"])[NUMBERS], np.arange(90) // 6
    ours = RidgeClassifierCV([0.5, 5.0], cv=4).fit(ROWS, classes, groups)
    found = ours.predict_held_out(ROWS)
    for fold in range(4):
        inside = ours.folds_ == fold
        assert not set(groups[inside]) & set(groups[~inside])
        theirs = linear_model.RidgeClassifier(ours.alpha_).fit(ROWS[~inside], classes[~inside])
        assert (found[inside] == theirs.predict(ROWS[inside])).all()
        np.testing.assert_allclose(
            ours.without(fold).decision_function(ROWS), theirs.decision_function(ROWS), rtol=1e-8
        )
    assert (found != ours.predict(ROWS)).any()


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 classes on all ranks, expected at least 2"):
        RidgeClassifierCV().fit(ROWS, ["a"] * 90)
