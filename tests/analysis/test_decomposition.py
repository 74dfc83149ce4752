from __future__ import annotations

import numpy as np
import pytest
from sklearn import decomposition

from spatialdl.analysis import PCA, TruncatedSVD

RNG = np.random.default_rng(2)
ROWS = RNG.normal(size=(150, 12)) * np.arange(1, 13) + 5
ROWS[:, 4] = 7  # a column that is constant
OF_BOTH = (
    *("components_", "explained_variance_", "explained_variance_ratio_", "singular_values_"),
)


def same(ours, theirs, names, tolerance=1e-9):
    for name in names:
        found, wanted = np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name))
        np.testing.assert_allclose(found, wanted, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("count", [1, 4, 11, 0.9, 0.3])
@pytest.mark.parametrize("whiten", [False, True])
def test_pca_is_that_of_scikit_learn(count, whiten):
    ours = PCA(count, whiten=whiten).fit(ROWS)
    theirs = decomposition.PCA(count, whiten=whiten, svd_solver="full").fit(ROWS)
    same(ours, theirs, (*OF_BOTH, "mean_", "noise_variance_", "n_components_", "n_samples_"))
    found = ours.transform(ROWS[:9])
    np.testing.assert_allclose(found, theirs.transform(ROWS[:9]), atol=1e-9)
    np.testing.assert_allclose(
        ours.inverse_transform(found), theirs.inverse_transform(found), atol=1e-9
    )


def test_all_components_explain_everything():
    found = PCA().fit(ROWS)
    assert found.explained_variance_ratio_.sum() == pytest.approx(1)
    np.testing.assert_allclose(found.inverse_transform(found.transform(ROWS)), ROWS, atol=1e-9)


def test_fewer_rows_than_columns():
    rows = RNG.normal(size=(6, 20))
    ours, theirs = PCA(5).fit(rows), decomposition.PCA(5).fit(rows)
    same(ours, theirs, (*OF_BOTH, "noise_variance_"))


def test_rows_that_are_all_the_same():
    found = PCA(2).fit(np.ones((5, 3)))
    assert found.explained_variance_ratio_.tolist() == [0, 0]
    np.testing.assert_allclose(found.fit_transform(np.ones((5, 3))), 0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 5])
def test_truncated_svd_is_that_of_scikit_learn(count):
    ours = TruncatedSVD(count).fit(ROWS)
    theirs = decomposition.TruncatedSVD(count, algorithm="arpack", random_state=0).fit(ROWS)
    same(ours, theirs, OF_BOTH)
    np.testing.assert_allclose(ours.transform(ROWS), theirs.transform(ROWS), atol=1e-9)
    np.testing.assert_allclose(
        ours.inverse_transform(ours.transform(ROWS)),
        theirs.inverse_transform(theirs.transform(ROWS)),
        atol=1e-9,
    )


def test_randomized_finds_what_the_exact_ones_find():
    """Of many columns, with a spectrum that falls."""
    turned = np.linalg.qr(RNG.normal(size=(400, 80)))[0].T
    rows = RNG.normal(size=(120, 80)) * 0.8 ** np.arange(80) @ turned + 1
    same(PCA(4, svd_solver="randomized").fit(rows), PCA(4).fit(rows), OF_BOTH, 1e-6)
    same(
        TruncatedSVD(4, algorithm="randomized").fit(rows), TruncatedSVD(4).fit(rows), OF_BOTH, 1e-6
    )


def test_many_columns_are_randomized_by_themselves():
    rows = RNG.normal(size=(12, 5000))
    auto, chosen = PCA(2).fit(rows), PCA(2, svd_solver="randomized").fit(rows)
    np.testing.assert_array_equal(auto.components_, chosen.components_)
    exact = decomposition.PCA(2, svd_solver="full").fit(rows)
    same(auto, exact, OF_BOTH, 1e-6)
    with pytest.raises(ValueError, match=r"n_components=0.5 needs all components"):
        PCA(0.5).fit(rows)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (PCA(13), "n_components=13 is more than 12, the minimum of rows and columns"),
        (PCA(0), "n_components=0 must be a whole number"),
        (PCA(1.5), "n_components=1.5 must be a whole number"),
        (PCA("mle"), "n_components='mle' must be"),
        (PCA(svd_solver="full"), "svd_solver='full' must be one of auto"),
        (TruncatedSVD(13), "n_components=13 is more than 12"),
        (TruncatedSVD(algorithm="arpack"), "algorithm='arpack' must be one of auto"),
    ],
)
def test_refusals(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(ROWS)


def test_variance_needs_two_rows():
    with pytest.raises(ValueError, match="there are 1 rows on all ranks, expected at least 2"):
        PCA(1).fit(ROWS[:1])
