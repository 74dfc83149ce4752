from __future__ import annotations

import numpy as np
import pytest
from sklearn import neighbors

from spatialdl.analysis import NearestNeighbors, neighbours

RNG = np.random.default_rng(4)
ROWS = RNG.normal(size=(90, 7)) + 3


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("block", [4, 1000])
def test_neighbours_are_those_of_scikit_learn(metric, own, block, monkeypatch):
    monkeypatch.setattr(neighbours, "_ROWS", block)
    monkeypatch.setattr(neighbours, "_QUERIES", 16)
    queries = None if own else RNG.normal(size=(40, 7)) + 3
    ours = NearestNeighbors(6, metric=metric).fit(ROWS)
    theirs = neighbors.NearestNeighbors(n_neighbors=6, metric=metric, algorithm="brute").fit(ROWS)
    (distances, indices), wanted = ours.kneighbors(queries), theirs.kneighbors(queries)
    np.testing.assert_allclose(distances, wanted[0], atol=1e-9)
    np.testing.assert_array_equal(indices, wanted[1])
    only = ours.kneighbors(queries, 2, return_distance=False)
    np.testing.assert_array_equal(only, wanted[1][:, :2])


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("block", [5, 1000])
def test_rows_that_are_the_same_come_in_their_order(metric, block, monkeypatch):
    monkeypatch.setattr(neighbours, "_ROWS", block)
    rows = np.tile(ROWS[:4] * 1e3, (9, 1))
    distances, indices = NearestNeighbors(12, metric=metric).fit(rows).kneighbors(rows[:4])
    for number in range(4):
        np.testing.assert_array_equal(indices[number, :9], np.arange(9) * 4 + number)
    assert (distances[:, :9] < 1e-12).all()
    assert (distances[:, 9:] > 1e-6).all()


def test_rows_of_zeros_are_at_right_angles_to_all():
    rows = np.concatenate([ROWS[:3], np.zeros((1, 7))])
    distances, indices = NearestNeighbors(4, metric="cosine").fit(rows).kneighbors(rows[3:])
    np.testing.assert_array_equal(distances, np.ones((1, 4)))
    np.testing.assert_array_equal(indices, [[0, 1, 2, 3]])


def test_refusals():
    with pytest.raises(ValueError, match="metric='manhattan' must be one of euclidean, cosine"):
        NearestNeighbors(metric="manhattan").fit(ROWS)
    fitted = NearestNeighbors(90).fit(ROWS)
    assert fitted.kneighbors(ROWS[:2])[0].shape == (2, 90)
    with pytest.raises(ValueError, match="n_neighbors=90 is more than the 89 rows"):
        fitted.kneighbors()
    with pytest.raises(ValueError, match="n_neighbors=91 is more than the 90 rows"):
        fitted.kneighbors(ROWS, 91)
    with pytest.raises(ValueError, match="rows have 3 columns, the model was fitted on 7"):
        fitted.kneighbors(ROWS[:, :3])
    with pytest.raises(ValueError, match="is not fitted"):
        NearestNeighbors().kneighbors(ROWS)
    bad = ROWS.copy()
    bad[2, 1] = np.inf
    with pytest.raises(ValueError, match="row 2, column 1, is inf"):
        fitted.kneighbors(bad)
