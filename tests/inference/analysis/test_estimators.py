"""Estimators beside those of scikit-learn: all, k-means, components, neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import cluster, decomposition, neighbors

from spatialdl.inference.analysis import (
    PCA,
    KMeans,
    NearestNeighbors,
    Ridge,
    RidgeCV,
    TruncatedSVD,
    neighbours,
)

ALL = [KMeans(2), PCA(2), TruncatedSVD(2), Ridge(), RidgeCV(cv=2), NearestNeighbors(1)]
ROWS = np.random.default_rng(0).normal(size=(20, 5))


def again(model):
    """An estimator with the same parameters, not fitted."""
    return type(model)(**model.get_params())


def fit(model, rows, targets=None):
    targets = np.zeros(len(rows)) if targets is None else targets
    return model.fit(rows, targets)


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
            fit(again(model), rows)


@pytest.mark.parametrize("model", ALL[:5], ids=lambda one: type(one).__name__)
def test_other_widths_and_models_that_are_not_fitted(model):
    name = "predict" if hasattr(model, "predict") else "transform"
    with pytest.raises(ValueError, match="is not fitted"):
        getattr(again(model), name)(ROWS)
    fitted = fit(again(model), ROWS, ROWS[:, 0])
    with pytest.raises(ValueError, match="rows have 4 columns, the model was fitted on 5"):
        getattr(fitted, name)(ROWS[:, :4])
    assert len(getattr(fitted, name)(np.empty((0, 5)))) == 0


@pytest.mark.parametrize("model", ALL[:5], ids=lambda one: type(one).__name__)
def test_types_of_rows(model):
    """What is stored in half precision counts as the same numbers in double."""
    name = "predict" if hasattr(model, "predict") else "transform"
    half = ROWS.astype(np.float16)
    wanted = getattr(fit(again(model), half.astype(np.float64), half[:, 0]), name)(half)
    for rows in (half, torch.from_numpy(half), half.astype(">f4"), half[:, ::-1][:, ::-1]):
        found = getattr(fit(again(model), rows, half[:, 0]), name)(rows)
        np.testing.assert_allclose(found, wanted, rtol=1e-10)
    whole = np.round(ROWS * 9).astype(np.int16)
    assert np.isfinite(getattr(fit(again(model), whole, whole[:, 0]), name)(whole)).all()


# --- k-means


DRAWS_OF_GROUPS = np.random.default_rng(1)
GROUPS = np.repeat(DRAWS_OF_GROUPS.normal(size=(5, 8)) * 3, 40, axis=0)
GROUPED = GROUPS + DRAWS_OF_GROUPS.normal(size=GROUPS.shape) + 10


@pytest.mark.parametrize(("clusters", "n_init", "seed"), [(1, 1, 0), (5, 1, 1), (9, 4, 2)])
def test_clusters_are_those_of_scikit_learn(seed, clusters, n_init):
    """Draws, too: the same seed has the same centres to begin with."""
    ours = KMeans(clusters, n_init=n_init, random_state=seed).fit(GROUPED)
    theirs = cluster.KMeans(clusters, n_init=n_init, random_state=seed).fit(GROUPED)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-10)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-10)
    assert ours.n_iter_ == theirs.n_iter_
    more = GROUPED[::7] + 0.5
    np.testing.assert_array_equal(ours.predict(more), theirs.predict(more))
    np.testing.assert_allclose(ours.transform(more), theirs.transform(more), atol=1e-10)


def test_clusters_without_rows_keep_their_centres():
    far = np.full((3, 8), 1e3) * [[1], [2], [3]]  # centres to begin with that no row is near to
    with pytest.warns(UserWarning, match="only 2 of 5 clusters have rows"):
        found = KMeans(5, init=np.concatenate([GROUPED[:2], far]), max_iter=20).fit(GROUPED)
    np.testing.assert_allclose(found.cluster_centers_[2:], far)
    theirs = cluster.KMeans(2, init=GROUPED[:2], n_init=1, max_iter=20).fit(GROUPED)
    assert found.inertia_ == pytest.approx(theirs.inertia_, rel=1e-10)


def test_duplicates_and_more_clusters_than_distinct_rows():
    rows = np.repeat(GROUPED[:3], 7, axis=0)
    with pytest.warns(UserWarning, match="only 3 of 5 clusters have rows"):
        found = KMeans(5).fit(rows)
    assert found.inertia_ == 0
    assert len(set(found.labels_)) == 3
    assert (found.labels_.reshape(3, 7) == found.labels_.reshape(3, 7)[:, :1]).all()
    with pytest.warns(UserWarning, match="only 1 of 2"):
        assert KMeans(2).fit(np.ones((4, 2))).inertia_ == 0


# --- components


DRAWS_OF_COLUMNS = np.random.default_rng(2)
COLUMNS = DRAWS_OF_COLUMNS.normal(size=(150, 12)) * np.arange(1, 13) + 5
COLUMNS[:, 4] = 7  # a column that is constant
OF_BOTH = (
    *("components_", "explained_variance_", "explained_variance_ratio_", "singular_values_"),
)


def same(ours, theirs, names, tolerance=1e-9):
    for name in names:
        found, wanted = np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name))
        np.testing.assert_allclose(found, wanted, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("count", [1, 11, 0.9, 0.3])
def test_pca_is_that_of_scikit_learn(count):
    ours = PCA(count).fit(COLUMNS)
    theirs = decomposition.PCA(count, svd_solver="full").fit(COLUMNS)
    same(ours, theirs, (*OF_BOTH, "mean_", "noise_variance_", "n_components_", "n_samples_"))
    found = ours.transform(COLUMNS[:9])
    np.testing.assert_allclose(found, theirs.transform(COLUMNS[:9]), atol=1e-9)


def test_fewer_rows_than_columns():
    rows = DRAWS_OF_COLUMNS.normal(size=(6, 20))
    ours, theirs = PCA(5).fit(rows), decomposition.PCA(5).fit(rows)
    same(ours, theirs, (*OF_BOTH, "noise_variance_"))


def test_rows_that_are_all_the_same():
    found = PCA(2).fit(np.ones((5, 3)))
    assert found.explained_variance_ratio_.tolist() == [0, 0]
    np.testing.assert_allclose(found.fit_transform(np.ones((5, 3))), 0, atol=1e-12)


def test_sizes_that_cannot_be_are_refused():
    for model, rows, message in [
        (KMeans(201), GROUPED, "n_clusters=201 is more than the 200 rows on all ranks"),
        (KMeans(0), GROUPED, "n_clusters=0 must be a whole number of at least 1"),
        (KMeans(2.5), GROUPED, "n_clusters=2.5 must be"),
        (KMeans(n_init=0), GROUPED, "n_init=0 must be"),
        (KMeans(max_iter=0), GROUPED, "max_iter=0 must be"),
        (KMeans(init="random"), GROUPED, "init='random' must be 'k-means\\+\\+' or an array"),
        (KMeans(3, init=GROUPED[:2]), GROUPED, r"init has shape \(2, 8\), expected \(3, 8\)"),
        (PCA(13), COLUMNS, "n_components=13 is more than 12, the minimum of rows and columns"),
        (PCA(0), COLUMNS, "n_components=0 must be a whole number"),
        (PCA(1.5), COLUMNS, "n_components=1.5 must be a whole number"),
        (PCA("mle"), COLUMNS, "n_components='mle' must be"),
        (TruncatedSVD(13), COLUMNS, "n_components=13 is more than 12"),
        (PCA(1), COLUMNS[:1], "there are 1 rows on all ranks, expected at least 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.fit(rows)


# --- neighbours


DRAWS_OF_NEAR = np.random.default_rng(4)
NEAR = DRAWS_OF_NEAR.normal(size=(90, 7)) + 3


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("block", [4, 1000])
def test_neighbours_are_those_of_scikit_learn(metric, block, monkeypatch):
    monkeypatch.setattr(neighbours, "_ROWS", block)
    monkeypatch.setattr(neighbours, "_QUERIES", 16)
    queries = DRAWS_OF_NEAR.normal(size=(40, 7)) + 3
    ours = NearestNeighbors(6, metric=metric).fit(NEAR)
    theirs = neighbors.NearestNeighbors(n_neighbors=6, metric=metric, algorithm="brute").fit(NEAR)
    (distances, indices), wanted = ours.kneighbors(queries), theirs.kneighbors(queries)
    np.testing.assert_allclose(distances, wanted[0], atol=1e-9)
    np.testing.assert_array_equal(indices, wanted[1])
    _, few = ours.kneighbors(queries, 2)
    np.testing.assert_array_equal(few, wanted[1][:, :2])


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("block", [5, 1000])
def test_rows_that_are_the_same_come_in_their_order(metric, block, monkeypatch):
    monkeypatch.setattr(neighbours, "_ROWS", block)
    rows = np.tile(NEAR[:4] * 1e3, (9, 1))
    distances, indices = NearestNeighbors(12, metric=metric).fit(rows).kneighbors(rows[:4])
    for number in range(4):
        np.testing.assert_array_equal(indices[number, :9], np.arange(9) * 4 + number)
    assert (distances[:, :9] < 1e-12).all()
    assert (distances[:, 9:] > 1e-6).all()


def test_refusals_of_neighbours():
    with pytest.raises(ValueError, match="metric='manhattan' must be one of euclidean, cosine"):
        NearestNeighbors(metric="manhattan").fit(NEAR)
    fitted = NearestNeighbors(90).fit(NEAR)
    assert fitted.kneighbors(NEAR[:2])[0].shape == (2, 90)
    with pytest.raises(ValueError, match="n_neighbors=91 is more than the 90 rows"):
        fitted.kneighbors(NEAR, 91)
    with pytest.raises(ValueError, match="rows have 3 columns, the model was fitted on 7"):
        fitted.kneighbors(NEAR[:, :3])
    with pytest.raises(ValueError, match="is not fitted"):
        NearestNeighbors().kneighbors(NEAR)
    bad = NEAR.copy()
    bad[2, 1] = np.inf
    with pytest.raises(ValueError, match="row 2, column 1, is inf"):
        fitted.kneighbors(bad)
