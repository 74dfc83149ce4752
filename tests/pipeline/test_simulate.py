from __future__ import annotations

from itertools import product

import pytest

from spatialdl.comm.trace import Span
from spatialdl.pipeline.schedule import gpipe, one_f_one_b
from spatialdl.pipeline.simulate import (
    Action,
    SharedCores,
    StageSeconds,
    busy_times,
    measured_costs,
    merged,
    simulate,
)

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
PEAKS = {
    "gpipe": lambda stages, microbatches, stage: microbatches,
    "1f1b": lambda stages, microbatches, stage: min(microbatches, stages - stage),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_and_held_activations_are_those_that_were_published(name):
    """Huang et al. 2019, section 2.3; Narayanan et al. 2021, sections 2.2.1 and 2.2."""
    for stages, microbatches in product(range(1, 9), range(1, 17)):
        timeline = simulate(SCHEDULES[name](stages, microbatches), StageSeconds.even(stages))
        assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
        assert timeline.seconds == pytest.approx(3.0 * (microbatches + stages - 1))
        held = [PEAKS[name](stages, microbatches, stage) for stage in range(stages)]
        assert list(timeline.peak_held) == held


def test_the_slowest_stage_sets_the_pace():
    """Worked out on paper: two stages, the second twice as slow, three micro-batches."""
    costs = StageSeconds(forward=(1.0, 2.0), backward=(1.0, 2.0))
    first, second = simulate(SCHEDULES["1f1b"](2, 3), costs).spans
    assert [span.start for span in second] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert [(span.action.kind[0], span.action.microbatch, span.start) for span in first] == [
        ("f", 0, 0.0),
        ("f", 1, 1.0),
        ("b", 0, 5.0),
        ("f", 2, 6.0),
        ("b", 1, 9.0),
        ("b", 2, 13.0),
    ]


def test_merged_actions_come_after_what_they_need():
    for groups, microbatches in ((1, 3), (3, 1), (3, 7), (8, 4)):
        order = merged(one_f_one_b(groups, microbatches))
        place = {action: number for number, action in enumerate(order)}
        assert len(place) == len(order) == 2 * groups * microbatches
        for action in order:
            step = -1 if action.kind == "forward" else 1
            before = place.get(action._replace(stage=action.stage + step), -1)
            assert before < place[action]
            assert place[action._replace(kind="forward")] <= place[action]
        for group, actions in enumerate(one_f_one_b(groups, microbatches)):
            assert [action for action in order if action.stage == group] == actions


def test_an_action_of_several_ranks_begins_when_all_are_there():
    """As on the ranks of a grid, one of which is late with another action."""
    own, together = Action("forward", 0, 0), Action("forward", 0, 1)
    busy, waiting = simulate([[own, together], [together]], StageSeconds.even(1)).spans
    assert [(span.action, span.start) for span in busy] == [(own, 0.0), (together, 1.0)]
    assert [(span.action, span.start) for span in waiting] == [(together, 1.0)]


@pytest.mark.parametrize(
    ("lists", "shared", "seconds"),
    [
        (gpipe(3, 4), SharedCores(3, [1] * 3, 1.0), 18.0),  # as with a device for each
        (gpipe(3, 4), SharedCores(1, [1] * 3, 1.0), 36.0),  # one after the other
        (gpipe(1, 2), SharedCores(2, [2], 1.0), 6.0),
        (gpipe(1, 2), SharedCores(2, [4], 1.0), 12.0),  # replicas share the cores too
        (gpipe(2, 1), SharedCores(2, [1, 1], 1.5), 4.0),  # faster while the other waits
    ],
)
def test_ranks_that_share_cores(lists, shared, seconds):
    found = simulate(lists, StageSeconds.even(len(lists)), shared)
    assert found.seconds == pytest.approx(seconds)


def action(kind, stage, microbatch, start, end, copy=0):
    return Span("compute", "any", start, end, Action(kind, stage, microbatch, copy))


FIRST = [
    action("forward", 0, 0, 0.0, 1.0),
    action("forward", 0, 1, 1.0, 3.0),
    Span("hand-over", "backward", 3.5, 5.0),
    Span("halo", "inside", 5.0, 5.5),
    action("backward", 0, 0, 3.0, 6.0),
    Span("hand-over", "completion of sends", 6.0, 9.0),
]
SECOND = [
    action("forward", 1, 0, 2.0, 2.5),
    action("forward", 0, 2, 3.0, 12.0, copy=1),
]


def test_costs_are_medians_without_what_an_action_waits_for_another_stage():
    assert [busy for _, busy in busy_times(FIRST)] == [1.0, 2.0, 1.5]
    costs = measured_costs([FIRST, SECOND], stages=3)
    assert list(costs.forward) == [2.0, 0.5, 0.0]
    assert list(costs.backward) == [1.5, 0.0, 0.0]
    assert measured_costs([[Span("data", "wait", 0.0, 1.0)]], 2).forward == [0.0, 0.0]


def forwards(*numbers, stage=0):
    return [Action("forward", stage, m) for m in numbers]


BACK = [[Action("backward", stage, 0)] for stage in (0, 1)]


@pytest.mark.parametrize(
    ("lists", "stuck"),
    [
        (
            [[*forwards(0), *BACK[0], *forwards(1)], [*forwards(1, 0, stage=1), *BACK[1]]],
            "stage 0 before backward 0, stage 1 before forward 1",
        ),
        ([forwards(0, 1), forwards(1, 0)], "deadlocks, ranks are stuck"),  # ranks of one grid
    ],
)
def test_ranks_that_wait_for_ever_are_told(lists, stuck):
    with pytest.raises(ValueError, match=stuck):
        simulate(lists, StageSeconds.even(2))
