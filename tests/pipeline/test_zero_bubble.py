from __future__ import annotations

from itertools import accumulate, product
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

from spatialdl.pipeline import schedule as module
from spatialdl.pipeline.action import Action
from spatialdl.pipeline.schedule import one_f_one_b, zero_bubble
from spatialdl.pipeline.simulate import StageSeconds, simulate

SHAPES = list(product(range(1, 9), range(1, 33)))


def drawn(stages, microbatches):
    """As in the docstring, with one unit of time for every action."""
    timeline = simulate(zero_bubble(stages, microbatches), StageSeconds.even(stages, backward=1.0))
    lines = []
    for stage, spans in enumerate(timeline.spans):
        cells = ["."] * round(timeline.seconds)
        for span in spans:
            cells[round(span.start)] = f"{span.action.kind[0].upper()}{span.action.microbatch}"
        lines.append(f"stage {stage}  " + " ".join(f"{cell:2}" for cell in cells).rstrip(" ."))
    return lines


def test_the_drawing_is_what_the_schedule_does():
    text = module.__doc__.partition("Zero bubble")[2].partition("GEMS")[0]
    lines = [line.strip() for line in text.splitlines()]
    assert [line for line in lines if line.startswith("stage ")] == drawn(3, 4)


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 0.5)])
def test_the_bubble_is_what_was_published(costs):
    """Qi et al. 2024, table 1; 1F1B's backward is ours and the weights' together."""
    forward, backward, weight = costs
    for stages, microbatches in SHAPES:
        if microbatches < stages:
            continue
        even = StageSeconds.even(stages, forward, backward, weight)
        timeline = simulate(zero_bubble(stages, microbatches), even)
        work, waits = microbatches * sum(costs), (stages - 1) * (forward + backward - weight)
        assert timeline.seconds == pytest.approx(work + waits)
        assert timeline.bubble == pytest.approx(waits / (work + waits))
        whole = StageSeconds.even(stages, forward, backward + weight)
        plain = simulate(one_f_one_b(stages, microbatches), whole)
        assert plain.seconds - timeline.seconds == pytest.approx(2 * (stages - 1) * weight)


def test_it_holds_what_1f1b_holds_and_weights_wait_for_few():
    for stages, microbatches in SHAPES:
        timeline = simulate(
            zero_bubble(stages, microbatches), StageSeconds.even(stages, backward=1.0)
        )
        held = simulate(one_f_one_b(stages, microbatches), StageSeconds.even(stages)).peak_held
        assert timeline.peak_held == held
        assert list(held) == [min(microbatches, stages - stage) for stage in range(stages)]
        waiting = [min(microbatches, stage + 1) for stage in range(stages)]
        change = {"backward": 1, "weight": -1}
        changes = ((change.get(span.action.kind, 0) for span in one) for one in timeline.spans)
        assert [max(accumulate(rank)) for rank in changes] == waiting


def test_every_stage_does_everything_once_in_the_order_of_micro_batches():
    for stages, microbatches in SHAPES:
        for stage, actions in enumerate(zero_bubble(stages, microbatches)):
            assert {action.stage for action in actions} == {stage}
            for kind in ("forward", "backward", "weight"):
                done = [action.microbatch for action in actions if action.kind == kind]
                assert done == list(range(microbatches))
            for m in range(microbatches):
                places = [
                    actions.index(Action(k, stage, m)) for k in ("forward", "backward", "weight")
                ]
                assert places == sorted(places)


def order_of_pytorch(stages, stage, microbatches):
    """What torch.distributed.pipelining has a stage do, computed for a stage of paper."""
    paper = MagicMock(group_size=stages, group_rank=stage, num_stages=stages, stage_index=stage)
    paper.is_last = False
    schedule = ScheduleInterleavedZeroBubble(
        [paper], microbatches, loss_fn=lambda output, target: None
    )
    kinds = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weight"}
    actions = [action for action in schedule.pipeline_order[stage] if action is not None]
    return [(kinds[a.computation_type.name], a.microbatch_index) for a in actions]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_order_is_that_of_pytorchs_own_pipelines(stages):
    for microbatches in range(stages, 33, stages):
        for stage, actions in enumerate(zero_bubble(stages, microbatches)):
            ours = [(action.kind, action.microbatch) for action in actions]
            assert ours == order_of_pytorch(stages, stage, microbatches)
