from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spatialdl.training.tasks.survival import (
    Cox,
    Survival,
    check_order,
    concordance,
    partial_likelihood,
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


# remission of 42 children with leukaemia: Freireich et al., Blood 21, 1963, table 3 (weeks)
TREATED = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
CONTROL = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


def remission() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weeks = f"{TREATED} {CONTROL}".split()
    times = torch.tensor([float(one.rstrip("+")) for one in weeks], dtype=torch.float64)
    events = torch.tensor([float("+" not in one) for one in weeks], dtype=torch.float64)
    control = torch.tensor([0.0] * 21 + [1.0] * 21, dtype=torch.float64)
    return control, times, events


def test_the_remission_data_have_the_likelihood_that_other_programs_find() -> None:
    """As `PHReg(ties="efron")` of statsmodels 0.15.0 and `CoxPHFitter` of lifelines 0.30.3."""
    likelihood = -30 * float(partial_likelihood(*remission()))  # 30 events, slope 1
    assert likelihood == pytest.approx(-86.03186595922487, abs=1e-11)


def test_gradients_are_right_and_finite_for_risks_far_apart() -> None:
    control, times, events = remission()
    risks = torch.linspace(-1, 1, 42, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda one: partial_likelihood(one, times, events), risks)
    far = (control * 300 - 150).float().requires_grad_()
    loss = partial_likelihood(far, times.float(), events.float())
    [grad] = torch.autograd.grad(loss, far)
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_no_samples_and_no_events_count_for_nothing() -> None:
    control, times, events = remission()
    expected = partial_likelihood(control, times, events)
    rows = torch.full((3, 2), torch.nan, dtype=torch.float64)
    target = torch.cat([torch.stack([times, events], 1), rows])
    output = torch.cat([control, torch.full((3,), 50.0, dtype=torch.float64)])[:, None]
    output.requires_grad_()
    loss = Cox().loss(output, target)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-14)
    [grad] = torch.autograd.grad(loss, output)
    assert grad[-3:].eq(0).all()
    assert grad[:-3].ne(0).any()
    assert float(partial_likelihood(control, times, torch.zeros_like(events))) == 0
    with pytest.raises(ValueError, match=r"returns \(45, 2\) for 45 slides.*\(45, 1\), a risk"):
        Cox().loss(output.expand(45, 2), target)


def test_scores_are_of_the_risk() -> None:
    control, times, events = remission()
    task, labels = Cox(), torch.stack([times, events], 1)
    values = task.predictions(control[:, None])
    assert values.shape == (42, 1)
    [(name, found)] = task.scores(values, labels).items()
    assert name == "c_index"
    assert found == pytest.approx(0.6900420757363254, abs=1e-15)  # as lifelines counts


def test_samples_without_an_order_are_refused() -> None:
    check_order(SimpleNamespace(labels=np.array([[1.0, 1], [2.0, 0]])))
    for labels in ([[1.0, 0], [2.0, 0]], [[1.0, 0], [2.0, 1]], [[1.0, 1]]):
        with pytest.raises(ValueError, match="events among"):
            check_order(SimpleNamespace(labels=np.array(labels)))


def counted(risks: np.ndarray, times: np.ndarray, events: np.ndarray) -> float | None:
    """Pair by pair, as the index is defined."""
    good = pairs = 0.0
    for i in np.flatnonzero(events == 1):
        for j in range(len(times)):
            if times[j] > times[i] or (times[j] == times[i] and not events[j]):
                pairs += 1
                good += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return good / pairs if pairs else None


@pytest.mark.parametrize("count", [1, 2, 32, 33])
@pytest.mark.parametrize(("levels", "weeks"), [(4, 8), (3, 1000), (1000, 3), (1000, 1000), (1, 1)])
def test_pairs_of_known_order_are_counted(levels: int, weeks: int, count: int) -> None:
    draw = np.random.default_rng(count)
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
    for count in (0, 2):  # no order is known without events
        assert concordance(*torch.ones(2, count), torch.zeros(count)) is None
