"""Merged states of several ranks equal a single metric with all updates."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import ClasswiseWrapper
from torchmetrics.classification import MulticlassAUROC, MulticlassRecall

from spatialdl.training.tasks.states import irreducible, merge, state_of
from tests.training.tasks.own_metric_classes import MeanBrightness, NoReduction, RunningMean

DRAW = torch.Generator().manual_seed(0)
GIVEN = torch.randn(9, 3, generator=DRAW, dtype=torch.float64).softmax(1)
WANTED = torch.arange(9) % 3
MAKES = [
    MeanBrightness,
    RunningMean,
    lambda: MulticlassAUROC(3),  # keeps all it has seen
    lambda: ClasswiseWrapper(MulticlassRecall(3, average=None)),
]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("cuts", [(0, 2, 9), (0, 5, 5, 9), (0, 0, 9), (0, 9)])
def test_parts_are_the_whole(make, cuts):
    def seen(numbers):
        metric = make()
        for number in numbers:
            metric.update(GIVEN[number : number + 1], WANTED[number : number + 1])
        return metric

    parts = [range(cuts[n], cuts[n + 1]) for n in range(len(cuts) - 1)]
    together = make()
    merge(together, [state_of(seen(part)) for part in parts])
    found, expected = together.compute(), seen(range(9)).compute()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0, check_dtype=False)


def test_a_state_without_a_reduction_is_found_inside_of_wrappers_too():
    assert irreducible(MeanBrightness()) is None
    assert irreducible(NoReduction()) == "last"
    assert irreducible(ClasswiseWrapper(NoReduction())) == "last"
