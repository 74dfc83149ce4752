from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spatialdl.training.tasks.survival import (
    Survival,
    concordance,
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
    with pytest.raises(ValueError, match=r"gives \(4, 2\) for 4 slides.*\(4, 3\)"):
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


def test_concordance_counts_pairs_whose_order_is_known() -> None:
    draw = np.random.default_rng(0)
    risks, times = draw.integers(0, 4, 30) / 2.0, draw.integers(1, 8, 30) * 1.0
    events = draw.integers(0, 2, 30) * 1.0
    good = pairs = 0.0
    for i in range(30):
        for j in range(30):
            is_later = times[j] > times[i] or (times[j] == times[i] and not events[j])
            if events[i] and is_later:
                pairs += 1
                good += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    found = concordance(*map(torch.from_numpy, (risks, times, events)))
    assert found == pytest.approx(good / pairs)
    assert concordance(torch.ones(2), torch.ones(2), torch.zeros(2)) is None
