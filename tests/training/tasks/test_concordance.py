from __future__ import annotations

import numpy as np
import pytest
import torch

from spatialdl.training.tasks.concordance import concordance


def counted(risks: np.ndarray, times: np.ndarray, events: np.ndarray) -> float | None:
    """Pair by pair, as the index is defined."""
    good = pairs = 0.0
    for i in np.flatnonzero(events == 1):
        for j in range(len(times)):
            if times[j] > times[i] or (times[j] == times[i] and not events[j]):
                pairs += 1
                good += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return good / pairs if pairs else None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("levels", "weeks"), [(4, 8), (3, 1000), (1000, 3), (1000, 1000), (1, 1)])
def test_pairs_of_known_order_are_counted(levels: int, weeks: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = (30, 31, 32, 33, 2, 1)[seed]
    risks, times = draw.integers(0, levels, count) / 2.0, draw.integers(0, weeks, count) * 1.0
    events = draw.integers(0, 2, count) * 1.0
    assert concordance(*map(torch.from_numpy, (risks, times, events))) == counted(
        risks, times, events
    )


def test_a_risk_that_is_nan_is_wrong_and_a_time_that_is_nan_is_no_sample() -> None:
    risks = torch.tensor([3.0, float("nan"), 1.0, 9.0])
    times = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    # of three pairs only that of the first and the third is right
    assert concordance(risks, times, torch.ones(4)) == pytest.approx(1 / 3, abs=1e-15)


def test_no_order_is_known_without_events() -> None:
    assert concordance(torch.ones(2), torch.ones(2), torch.zeros(2)) is None
    assert concordance(torch.ones(0), torch.ones(0), torch.ones(0)) is None


def test_no_matrix_of_pairs_is_made() -> None:
    """Of 200,000 samples one would have 40 GB."""
    count = 200_000
    times = torch.arange(count, dtype=torch.float64)
    assert concordance(-times, times, torch.ones(count)) == 1.0
    assert concordance(times, times, torch.ones(count)) == 0.0
    swapped = times.clone()
    swapped[[0, count - 1]] = swapped[[count - 1, 0]]
    right = 1 - (2 * count - 3) / (count * (count - 1) / 2)
    assert concordance(-swapped, times, torch.ones(count)) == pytest.approx(right, abs=1e-15)
