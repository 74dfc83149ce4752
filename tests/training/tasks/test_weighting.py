from __future__ import annotations

import pytest
from omegaconf import ListConfig

from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.training.tasks.weighting import balanced_classes, given_weights


def test_a_list_is_taken_as_it_is_and_null_is_none():
    assert given_weights(None, "class_weights", 2, None) is None
    assert given_weights(ListConfig([1, 0.5]), "class_weights", 2, None).tolist() == [1, 0.5]
    with pytest.raises(ValueError, match=r"task.class_weights=\[1, inf\] must be numbers"):
        given_weights(ListConfig([1, float("inf")]), "class_weights", 2, None)


def test_balanced_classes_weigh_alike_over_the_samples():
    data = SyntheticDataset(8, (8, 8), 3)
    weight = balanced_classes(data, 3)
    totals = [float(weight[data.labels[data.labels == c]].sum()) for c in range(3)]
    assert totals == pytest.approx([8 / 3] * 3)
