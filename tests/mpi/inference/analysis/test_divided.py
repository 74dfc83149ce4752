"""Estimators on rows of all ranks beside scikit-learn on all rows in one process."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from sklearn import cluster, decomposition, linear_model, neighbors

from spatialdl.inference.analysis import (
    PCA,
    KMeans,
    NearestNeighbors,
    Ridge,
    RidgeClassifierCV,
    RidgeCV,
    TruncatedSVD,
)
from tests.inference.analysis.test_estimators import OF_BOTH, same

RNG = np.random.default_rng(7)
CENTRES = RNG.normal(size=(4, 9)) * 2
ROWS = CENTRES[RNG.integers(0, 4, 131)] + RNG.normal(size=(131, 9)) + 8
ROWS[40:50] = ROWS[3]  # the same on several ranks
ROWS = ROWS.astype(np.float16).astype(np.float64)
TARGETS = ROWS @ RNG.normal(size=(9, 2)) + RNG.normal(size=(131, 2))


@pytest.fixture(params=["uneven", "every second rank has none"])
def own(request, world):
    """The rows of this rank."""
    rank, size, total = world.rank, world.size, len(ROWS)
    if request.param == "uneven":
        start, stop = total * rank**2 // size**2, total * (rank + 1) ** 2 // size**2
    else:
        stop = total * min(rank // 2 * 2 + 2, size) // size
        start = stop if rank % 2 else total * rank // size
    assert sum(world.allgather(stop - start)) == total
    return slice(start, stop)


def test_kmeans(world, own):
    ours = KMeans(7, n_init=2, random_state=3, comm=world).fit(ROWS[own])
    theirs = cluster.KMeans(7, n_init=2, random_state=3).fit(ROWS)
    same(ours, theirs, ("cluster_centers_", "n_iter_"))
    np.testing.assert_array_equal(ours.labels_, theirs.labels_[own])
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-9)


def test_kmeans_without_a_seed_begins_alike_on_all_ranks(world, own):
    centres = KMeans(5, random_state=None, comm=world).fit(ROWS[own]).cluster_centers_
    for other in world.allgather(centres):
        np.testing.assert_array_equal(other, centres)


def test_pca(world, own):
    theirs = decomposition.PCA(4, svd_solver="full").fit(ROWS)
    ours = PCA(4, comm=world).fit(ROWS[own].astype(np.float16))
    same(ours, theirs, (*OF_BOTH, "mean_", "noise_variance_"))
    np.testing.assert_allclose(ours.transform(ROWS[own]), theirs.transform(ROWS)[own], atol=1e-9)


def test_truncated_svd(world, own):
    theirs = decomposition.TruncatedSVD(4, algorithm="arpack", random_state=0).fit(ROWS)
    same(TruncatedSVD(4, comm=world).fit(ROWS[own]), theirs, OF_BOTH)


def test_ridge(world, own):
    targets = TARGETS
    theirs = linear_model.Ridge(2.0).fit(ROWS, targets)
    ours = Ridge(2.0, comm=world).fit(ROWS[own], targets[own])
    same(ours, theirs, ("coef_", "intercept_"))
    theirs = linear_model.RidgeCV((0.1, 5.0, 200.0), cv=6, scoring="neg_mean_squared_error").fit(
        ROWS, targets
    )
    ours = RidgeCV((0.1, 5.0, 200.0), cv=6, comm=world).fit(ROWS[own], targets[own])
    same(ours, theirs, ("coef_", "intercept_", "alpha_", "best_score_"))


def test_ridge_of_classes(world, own):
    classes = np.array(["a", "b", "c"])[np.argsort(ROWS[:, :3], 1)[:, 0]]
    theirs = linear_model.RidgeClassifier(2.0).fit(ROWS, classes)
    ours = RidgeClassifierCV([2.0], cv=4, comm=world).fit(ROWS[own], classes[own])
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-8)
    assert (ours.predict(ROWS[own]) == theirs.predict(ROWS)[own]).all()


def test_ridge_by_groups(world, own):
    groups = np.arange(len(ROWS)) % 13
    alone = RidgeCV(cv=4).fit(ROWS, TARGETS, groups)
    ours = RidgeCV(cv=4, comm=world).fit(ROWS[own], TARGETS[own], groups[own])
    same(ours, alone, ("coef_", "scores_", "fold_coef_", "fold_intercept_"))
    np.testing.assert_array_equal(ours.folds_, alone.folds_[own])


@pytest.mark.parametrize(("metric", "dtype"), [("euclidean", np.float16), ("cosine", np.float64)])
def test_neighbours(world, own, metric, dtype):
    """Rows that are the same, on several ranks, in the same order on any number of them."""
    kept, alone = (
        NearestNeighbors(7, metric=metric, comm=comm).fit(rows.astype(dtype))
        for comm, rows in ((world, ROWS[own]), (None, ROWS))
    )
    queries = ROWS[own][::3] + 0.25
    theirs = neighbors.NearestNeighbors(n_neighbors=7, metric=metric, algorithm="brute").fit(ROWS)
    distances, indices = kept.kneighbors(queries)
    wanted = alone.kneighbors(queries)
    if len(queries):
        np.testing.assert_allclose(distances, theirs.kneighbors(queries)[0], atol=1e-7)
    np.testing.assert_allclose(distances, wanted[0], atol=1e-12)
    np.testing.assert_array_equal(indices, wanted[1])


def test_a_communicator_of_mpi4py(world):
    ours = PCA(2, comm=MPI.COMM_WORLD).fit(ROWS[world.rank :: world.size])
    same(ours, decomposition.PCA(2, svd_solver="full").fit(ROWS), OF_BOTH)
    assert ours.n_samples_ == len(ROWS)


def test_rank_with_no_rows_need_not_know_their_width_or_type(world):
    rows = ROWS.astype(np.float32) if world.rank == world.size - 1 else []
    targets = TARGETS if world.rank == world.size - 1 else []
    assert KMeans(3, comm=world).fit(rows).cluster_centers_.shape == (3, 9)
    assert Ridge(comm=world).fit(rows, targets).coef_.shape == (2, 9)
    found = NearestNeighbors(2, comm=world).fit(rows).kneighbors(rows)
    assert found[0].shape == (len(rows), 2)


def test_errors_of_one_rank_are_raised_on_all(world):
    last, rows = world.size - 1, ROWS[world.rank :: world.size].copy()
    rows[-1, 4] = np.nan if world.rank == last else 0
    message = "row .*column 4, is nan"
    few = NearestNeighbors(1, comm=world).fit(ROWS[world.rank :: world.size])
    for work in (
        lambda: KMeans(2, comm=world).fit(rows),
        lambda: PCA(2, comm=world).fit(rows),
        lambda: TruncatedSVD(2, comm=world).fit(rows),
        lambda: Ridge(comm=world).fit(rows, rows[:, 0]),
        lambda: NearestNeighbors(comm=world).fit(rows),
        lambda: few.kneighbors(rows),
    ):
        with pytest.raises(ValueError, match=message):
            work()
    with pytest.raises(ValueError, match=r"not finite"):
        Ridge(comm=world).fit(ROWS[: len(rows)], rows[:, 4])
    assert KMeans(2, comm=world).fit(ROWS[:5]).n_features_in_ == 9, "ranks are still in step"


def test_fewer_rows_than_ranks_and_than_wanted(world):
    rows = ROWS[:1] if world.rank == 0 else ROWS[:0]
    assert KMeans(1, comm=world).fit(rows).inertia_ == 0
    with pytest.raises(ValueError, match="n_clusters=2 is more than the 1 rows on all ranks"):
        KMeans(2, comm=world).fit(rows)
    near = NearestNeighbors(2, comm=world).fit(rows)
    with pytest.raises(ValueError, match="n_neighbors=2 is more than the 1 rows on all ranks"):
        near.kneighbors(rows)


@pytest.mark.world(2, 3, 4)
def test_widths_must_agree(world):
    with pytest.raises(ValueError, match=r"different widths: 9 on rank 0, 8 on rank"):
        PCA(1, comm=world).fit(ROWS[:5, : 9 if world.rank == 0 else 8])
