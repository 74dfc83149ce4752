from __future__ import annotations

import numpy as np
import pytest
from sklearn import cluster

from spatialdl.analysis import KMeans

RNG = np.random.default_rng(1)
GROUPS = np.repeat(RNG.normal(size=(5, 8)) * 3, 40, axis=0)
ROWS = GROUPS + RNG.normal(size=GROUPS.shape) + 10


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("clusters", "n_init"), [(1, 1), (5, 1), (9, 4)])
def test_clusters_are_those_of_scikit_learn(seed, clusters, n_init):
    """Draws, too: the same seed has the same centres to begin with."""
    ours = KMeans(clusters, n_init=n_init, random_state=seed).fit(ROWS)
    theirs = cluster.KMeans(clusters, n_init=n_init, random_state=seed).fit(ROWS)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-10)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-10)
    assert ours.n_iter_ == theirs.n_iter_
    more = ROWS[::7] + 0.5
    np.testing.assert_array_equal(ours.predict(more), theirs.predict(more))
    np.testing.assert_allclose(ours.transform(more), theirs.transform(more), atol=1e-10)
    assert ours.score(more) == pytest.approx(theirs.score(more), rel=1e-10)


def test_clusters_without_rows_take_the_farthest():
    far = np.full((3, 8), 1e3) * [[1], [2], [3]]  # centres to begin with that no row is near to
    init = np.concatenate([ROWS[:2], far])
    ours = KMeans(5, init=init, max_iter=20).fit(ROWS)
    theirs = cluster.KMeans(5, init=init, n_init=1, max_iter=20).fit(ROWS)
    assert sorted(np.bincount(ours.labels_)) == sorted(np.bincount(theirs.labels_))
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-10)


def test_duplicates_and_more_clusters_than_distinct_rows():
    rows = np.repeat(ROWS[:3], 7, axis=0)
    with pytest.warns(UserWarning, match="only 3 of 5 clusters have rows"):
        found = KMeans(5).fit(rows)
    assert found.inertia_ == 0
    assert len(set(found.labels_)) == 3
    assert (found.labels_.reshape(3, 7) == found.labels_.reshape(3, 7)[:, :1]).all()
    with pytest.warns(UserWarning, match="only 1 of 2"):
        assert KMeans(2).fit(np.ones((4, 2))).inertia_ == 0


def test_several_runs_are_never_worse_than_the_first():
    first, best = (KMeans(9, n_init=n, random_state=5).fit(ROWS).inertia_ for n in (1, 8))
    assert best <= first


def test_refusals():
    for model, message in [
        (KMeans(201), "n_clusters=201 is more than the 200 rows on all ranks"),
        (KMeans(0), "n_clusters=0 must be a whole number of at least 1"),
        (KMeans(2.5), "n_clusters=2.5 must be"),
        (KMeans(n_init=0), "n_init=0 must be"),
        (KMeans(max_iter=0), "max_iter=0 must be"),
        (KMeans(init="random"), "init='random' must be 'k-means\\+\\+' or an array"),
        (KMeans(3, init=ROWS[:2]), r"init has shape \(2, 8\), expected \(3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.fit(ROWS)
