from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spatialdl.training.tasks.survival import (
    Survival,
    survival_columns,
    survival_edges,
    survival_of,
)


def test_the_likelihood_is_that_of_hazards() -> None:
    task = Survival(torch.tensor([2.0, 5.0], dtype=torch.float64))
    output = torch.tensor([[0.3, -1.0, 0.5]] * 4, dtype=torch.float64)
    target = torch.tensor([[1.0, 1], [2.0, 1], [9.0, 0], [3.0, 0]], dtype=torch.float64)
    h = [1 / (1 + math.exp(-x)) for x in (0.3, -1.0, 0.5)]
    likelihoods = [
        h[0],  # seen in the first interval
        (1 - h[0]) * h[1],  # an interval begins with its edge
        (1 - h[0]) * (1 - h[1]) * (1 - h[2]),
        (1 - h[0]) * (1 - h[1]),
    ]
    expected = -sum(map(math.log, likelihoods)) / 4
    assert float(task.loss(output, target)) == pytest.approx(expected, abs=1e-12)
    survived = [1 - h[0], (1 - h[0]) * (1 - h[1]), likelihoods[2]]
    assert survival_of(output)[0].tolist() == pytest.approx([-sum(survived), *survived])
    assert survival_columns(3) == ["risk", "survival_1", "survival_2", "survival_3"]
    with pytest.raises(ValueError, match=r"returns \(4, 2\) for 4 slides.*\(4, 3\)"):
        task.loss(output[:, :2], target)


def test_intervals_hold_equally_many_events() -> None:
    times = [1.0, 2, 3, 4, 5, 6, 7, 8, 99]
    labels = np.array([[time, 1.0] for time in times[:-1]] + [[99.0, 0]])
    train = SimpleNamespace(labels=labels)
    edges = survival_edges(train, 4)
    counts = np.bincount(np.searchsorted(edges.numpy(), times[:-1], side="right"))
    assert counts.tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="0 events at 0 different times"):
        survival_edges(SimpleNamespace(labels=labels[-1:]), 4)
    with pytest.raises(ValueError, match="2 events at 1 different times"):
        survival_edges(SimpleNamespace(labels=np.array([[1.0, 1], [1.0, 1]])), 3)
