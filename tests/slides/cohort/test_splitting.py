"""Splits: no group in two of them, sizes and classes as wanted, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spatialdl.slides.cohort.splitting import (
    assign,
    counts_of,
    groups_of,
    in_two_splits,
    pairs_apart,
    strata_of,
)


def test_classes_and_sizes_are_as_wanted():
    rng = np.random.default_rng(0)
    patients = [f"p{k}" for k in rng.integers(0, 120, 400)]
    labels = list(rng.choice(["a", "b", "c"], 400, p=[0.6, 0.3, 0.1]))
    groups = groups_of([patients])
    counts = counts_of(groups, labels)
    assert counts.sum() == 400
    found = np.array(assign(counts, [0.7, 0.15, 0.15], seed=1))
    for split, share in enumerate([0.7, 0.15, 0.15]):
        np.testing.assert_allclose(counts[found == split].sum(0), share * counts.sum(0), atol=3)


@given(st.integers(2, 5), st.lists(st.integers(1, 9), min_size=5, max_size=30), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_every_split_gets_a_group(splits, sizes, seed):
    counts = np.array(sizes, float)[:, None]
    found = assign(counts, [1 / splits] * splits, seed)
    assert set(found) == set(range(splits))
    assert found == assign(counts, [1 / splits] * splits, seed)


def test_a_small_split_is_not_left_empty():
    assert sorted(assign(np.ones((3, 1)), [0.98, 0.01, 0.01], 0)) == [0, 1, 2]
    with pytest.raises(ValueError, match="2 groups cannot be divided over 3 splits"):
        assign(np.ones((2, 1)), [0.4, 0.3, 0.3], 0)


def test_reasons_to_stay_together_add_up():
    patients = ["p", "q", None, "q", "r", None]
    alike = [0, None, 0, None, None, None]
    assert groups_of([patients, alike]) == [0, 1, 0, 1, 2, 3]


def test_numbers_are_cut_into_quarters_and_words_are_not():
    ages = [str(k) for k in range(20)] + [""]
    found = strata_of([ages])
    assert [found.count(f"quarter {k}") for k in (1, 2, 3, 4)] == [5, 5, 5, 5]
    assert found[-1] == ""
    assert strata_of([["x", "y"], ["1", "2"]]) == ["x 1", "y 2"]
    names = [f"name {k}" for k in range(12)]
    assert strata_of([names]) == names


def test_leaks_are_found():
    splits = ["train", "val", "train", "test", "train"]
    assert in_two_splits(["p", "p", "q", "", None], splits) == {"p": ["train", "val"]}
    assert in_two_splits(["", "", None, None, "r"], splits) == {}
    assert pairs_apart([[0, 2], [0, 1, 2]], splits) == [(0, 1), (1, 2)]
