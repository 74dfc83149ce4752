from __future__ import annotations

import pytest

from spatialdl.comm.trace import Span
from spatialdl.pipeline.action import Action
from spatialdl.pipeline.measured import busy_times, measured_costs


def action(kind, stage, microbatch, start, end, copy=0):
    return Span("compute", "any", start, end, Action(kind, stage, microbatch, copy))


FIRST = [
    action("forward", 0, 0, 0.0, 1.0),
    action("forward", 0, 1, 1.0, 3.0),
    Span("hand-over", "backward", 3.5, 5.0),
    Span("halo", "inside", 5.0, 5.5),
    action("backward", 0, 0, 3.0, 6.0),
    Span("hand-over", "until all has left", 6.0, 9.0),
]
SECOND = [
    action("forward", 1, 0, 2.0, 2.5),
    action("weight", 1, 0, 2.5, 3.0),
    action("forward", 0, 2, 3.0, 12.0, copy=1),
]


def test_what_an_action_waits_for_another_stage_does_not_count():
    assert [busy for _, busy in busy_times(FIRST)] == [1.0, 2.0, 1.5]


def test_costs_are_medians_over_all_that_was_done():
    costs = measured_costs([FIRST, SECOND], stages=3)
    assert list(costs.forward) == [2.0, 0.5, 0.0]
    assert list(costs.backward) == [1.5, 0.0, 0.0]
    assert list(costs.weight) == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("ranks", [[], [[]], [[Span("data", "wait", 0.0, 1.0)]]])
def test_nothing_costs_nothing(ranks):
    assert measured_costs(ranks, 2).forward == [0.0, 0.0]
