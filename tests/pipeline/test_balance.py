from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.models import unet
from spatialdl.pipeline.balance import StepCosts, balance, estimated, measured, memory, weighing
from spatialdl.pipeline.recording import Forward
from spatialdl.pipeline.steps import Recording, Step, Value


def steps(*takes: tuple[int, ...]) -> Recording:
    """Step n takes what the given steps have made."""
    made = [
        Step(str(n), tuple(Value(one) for one in given), {}, (Value(n),), "")
        for n, given in enumerate(takes)
    ]
    last = Value(len(made) - 1)
    return Recording(tuple(made), last, {}, frozenset(), frozenset(), "")


def chain(length: int) -> Recording:
    return steps(*((n - 1,) for n in range(length)))


def cost_of(costs: StepCosts, recording: Recording, start: int, stop: int) -> float:
    """Word for word: what the steps cost, what they take, what they give."""
    inside = range(start, stop)
    total = sum(costs.steps[n] for n in inside)
    for value, cost in costs.values.items():
        users = [n for n, step in enumerate(recording.steps) if value in step.takes]
        taken = value.step < start and any(n in inside for n in users)
        given = value.step in inside and any(n >= stop for n in users)
        total += cost * (taken + given)
    return total


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7).flatmap(
        lambda costs: st.tuples(
            st.just([float(c) for c in costs]),
            st.lists(st.integers(1, 4), min_size=1, max_size=min(4, len(costs))),
            st.tuples(*(st.lists(st.integers(0, n), max_size=2) for n in range(len(costs)))),
            st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)),
        )
    )
)
def test_as_good_as_the_best_of_all_cuts(case):
    numbers, widths, takes, passing = case
    recording = steps(*(tuple({n - 1 for n in one}) for one in takes))
    costs = StepCosts(numbers, {Value(n): float(cost) for n, cost in enumerate(passing)})

    def heaviest(bounds) -> float:
        return max(
            cost_of(costs, recording, start, stop) / width
            for (start, stop), width in zip(pairwise(bounds), widths, strict=True)
        )

    found = balance(costs, recording, widths)
    every = (
        (0, *inner, len(numbers)) for inner in combinations(range(1, len(numbers)), len(widths) - 1)
    )
    assert (found[0], found[-1], len(found)) == (0, len(numbers), len(widths) + 1)
    assert all(start < stop for start, stop in pairwise(found))
    assert heaviest(found) == pytest.approx(min(map(heaviest, every)))


def test_a_wider_stage_gets_more():
    assert balance(StepCosts([1.0] * 8, {}), chain(8), [1, 1]) == [0, 4, 8]
    assert balance(StepCosts([1.0] * 8, {}), chain(8), [3, 1]) == [0, 6, 8]


def test_of_two_cuts_the_one_that_moves_less():
    passing = {Value(n): cost for n, cost in enumerate((1.0, 9.0, 1.0))}
    assert balance(StepCosts([1.0, 1.0, 1.0, 1.0], passing), chain(4), [1, 1]) in (
        [0, 1, 4],
        [0, 3, 4],
    )


def recorded(model: nn.Module, size: tuple[int, ...]) -> Recording:
    return Forward(model, size).of(2, training=True)


def test_estimated_costs_are_those_of_the_layers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    costs = estimated(model, recorded(model, (3, 8, 8)), (1, 3, 8, 8))
    conv, relu, _, linear = costs.steps
    assert conv - relu == 3 * 8 * 9 * 64  # multiply-adds
    assert linear == pytest.approx(1024, rel=0.05)


def test_memory_is_what_is_kept_for_backward_and_weights():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid(), nn.Conv2d(8, 2, 1))
    first, sigmoid, last = memory(model, recorded(model, (3, 8, 8)), (2, 3, 8, 8), 10).steps
    assert first == 10 * 3 * 64 * 4 + 3 * 4 * (3 * 8 * 9 + 8)  # its input
    assert sigmoid == 10 * 8 * 64 * 4  # its output
    assert last == 3 * 4 * (8 * 2 + 2)  # its input is there already


def test_measured_costs_leave_the_network_as_it_is():
    model = unet(width=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recording = recorded(model, (3, 32, 32))
    costs = measured(model, recording, (2, 3, 32, 32), torch.device("cpu"))
    assert len(costs.steps) == len(recording.steps)
    assert min(costs.steps) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_large_images_are_tried_smaller():
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    costs = measured(model, recorded(model, (3, 8, 50000)), (2, 3, 8, 50000), torch.device("cpu"))
    assert len(costs.steps) == 2
    deep = unet(width=1)  # which crops where a size is odd
    recording = recorded(deep, (3, 32, 1025))
    with pytest.raises(ValueError, match=r"at 32x1024 pixels.*has 22 steps instead of 26"):
        measured(deep, recording, (2, 3, 32, 1025), torch.device("cpu"))


def test_ways_to_find_costs_have_names():
    assert weighing("time", SingleProcess(), torch.device("cpu"), 1) is estimated
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    recording, image = recorded(model, (3, 8, 8)), (2, 3, 8, 8)
    for kind in ("memory", "measured"):
        costs = weighing(kind, SingleProcess(), torch.device("cpu"), 4)(model, recording, image)
        assert len(costs.steps) == 2
    with pytest.raises(ValueError, match=r"parallel\.balance=fair is unknown: take time, measured"):
        weighing("fair", SingleProcess(), torch.device("cpu"), 1)
