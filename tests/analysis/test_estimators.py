"""What all estimators have in common, beside scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone

from spatialdl.analysis import PCA, KMeans, NearestNeighbors, Ridge, RidgeCV, TruncatedSVD

ALL = [KMeans(2), PCA(2), TruncatedSVD(2), Ridge(), RidgeCV(cv=2), NearestNeighbors(1)]
ROWS = np.random.default_rng(0).normal(size=(20, 5))


def fit(model, rows, targets=None):
    targets = np.zeros(len(rows)) if targets is None else targets
    return model.fit(rows, targets)


@pytest.mark.parametrize("model", ALL, ids=lambda one: type(one).__name__)
def test_parameters_and_clones(model):
    copy = clone(model)
    assert type(copy) is type(model)
    assert copy.get_params() == model.get_params()
    assert copy.set_params(device="cpu") is copy
    assert type(model).__name__ in repr(model)
    with pytest.raises(ValueError, match="has no parameter 'clusters', only"):
        copy.set_params(clusters=3)


@pytest.mark.parametrize("model", ALL, ids=lambda one: type(one).__name__)
def test_rows_that_cannot_be_used_are_refused(model):
    bad = ROWS.copy()
    bad[7, 3] = np.nan
    for rows, message in [
        (bad, r"row 7, column 3, is nan: features must be finite"),
        (np.where(np.isnan(bad), -np.inf, bad), r"row 7, column 3, is -inf"),
        (ROWS[0], r"shape \(5,\), expected real numbers of shape \(rows, width\)"),
        (ROWS.astype(complex), "complex128, expected real numbers"),
        (ROWS.astype(str), "expected real numbers"),
        (np.empty((0, 5)), "there are 0 rows on all ranks"),
        ([], "there are 0 rows on all ranks"),
        (np.empty((3, 0)), "rows have no columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(clone(model), rows)


@pytest.mark.parametrize("model", ALL[:5], ids=lambda one: type(one).__name__)
def test_other_widths_and_models_that_are_not_fitted(model):
    name = "predict" if hasattr(model, "predict") else "transform"
    with pytest.raises(ValueError, match="is not fitted"):
        getattr(clone(model), name)(ROWS)
    fitted = fit(clone(model), ROWS, ROWS[:, 0])
    with pytest.raises(ValueError, match="rows have 4 columns, the model was fitted on 5"):
        getattr(fitted, name)(ROWS[:, :4])
    assert len(getattr(fitted, name)(np.empty((0, 5)))) == 0


@pytest.mark.parametrize("model", ALL[:5], ids=lambda one: type(one).__name__)
def test_types_of_rows(model):
    """What is stored in half precision counts as the same numbers in double."""
    name = "predict" if hasattr(model, "predict") else "transform"
    half = ROWS.astype(np.float16)
    wanted = getattr(fit(clone(model), half.astype(np.float64), half[:, 0]), name)(half)
    for rows in (half, torch.from_numpy(half), half.astype(">f4"), half[:, ::-1][:, ::-1]):
        found = getattr(fit(clone(model), rows, half[:, 0]), name)(rows)
        np.testing.assert_allclose(found, wanted, rtol=1e-10)
    whole = np.round(ROWS * 9).astype(np.int16)
    assert np.isfinite(getattr(fit(clone(model), whole, whole[:, 0]), name)(whole)).all()
