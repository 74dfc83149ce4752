from __future__ import annotations

import math

import pytest
import torch

from spatialdl.training.tasks.extremes import errors_of, extremes
from spatialdl.training.tasks.task import Classification, MultiLabel


def test_errors_of_classes_and_of_labels():
    values = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    assert errors_of(Classification(), values, torch.tensor([0, 1])).tolist() == [0.25, 0.5]
    labels = torch.tensor([[1.0, math.nan], [math.nan, math.nan]], dtype=torch.float64)
    first, second = errors_of(MultiLabel(), values, labels).tolist()
    assert first == 0.25
    assert math.isnan(second)


def test_the_first_and_the_last_of_an_order_that_rounding_does_not_change():
    errors = dict.fromkeys(range(12), 0.5) | {3: 0.9, 5: math.nan, 7: 0.5 + 1e-15, 8: 0.1}
    assert [sample for sample, _ in extremes(errors.items())] == [3, 0, 1, 2, 9, 10, 11, 8]
    few = [(4, 0.25), (2, 0.5)]
    assert extremes(few) == [(2, 0.5), (4, 0.25)]


@pytest.mark.parametrize("cut", [4, 9])
def test_those_of_all_are_among_those_of_each_part(cut):
    errors = list(
        enumerate(torch.rand(20, generator=torch.manual_seed(0)).round(decimals=1).tolist())
    )
    found = extremes([*extremes(errors[:cut]), *extremes(errors[cut:])])
    assert found == extremes(errors)
