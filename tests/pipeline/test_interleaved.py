from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from spatialdl.pipeline.schedule import interleaved, one_f_one_b
from spatialdl.pipeline.simulate import StageSeconds, simulate

SHAPES = [(groups, interleave) for groups in range(1, 9) for interleave in (1, 2, 3, 4)]


@pytest.mark.parametrize(("groups", "interleave"), SHAPES)
def test_the_bubble_is_what_was_published_and_nobody_waits_for_ever(groups, interleave):
    """Narayanan et al. 2021, section 2.2.2: bubbles are shorter by the number of stages a rank."""
    for microbatches in range(1, 33):
        lists = interleaved(groups, microbatches, interleave)
        timeline = simulate(lists, StageSeconds.even(groups * interleave))
        if microbatches % groups == 0:
            expected = (groups - 1) / (interleave * microbatches + groups - 1)
            assert timeline.bubble == pytest.approx(expected)


@pytest.mark.parametrize(("groups", "interleave"), SHAPES)
def test_activations_held_are_those_of_the_warm_up_and_one_more(groups, interleave):
    for microbatches in range(groups, 33, groups):
        lists = interleaved(groups, microbatches, interleave)
        held = simulate(lists, StageSeconds.even(groups * interleave)).peak_held
        for group in range(groups):
            warm_up = (interleave - 1) * groups + 2 * (groups - 1 - group)
            assert held[group] == min(warm_up + 1, microbatches * interleave)


def test_one_stage_a_group_has_1f1bs_bubble():
    ours = simulate(interleaved(4, 8, 1), StageSeconds.even(4))
    assert ours.seconds == simulate(one_f_one_b(4, 8), StageSeconds.even(4)).seconds


def order_of_pytorch(groups, group, interleave, microbatches):
    """What torch.distributed.pipelining has a group do, computed for stages of paper."""
    stages = []
    for number in range(interleave):
        stage = MagicMock(group_size=groups, group_rank=group, is_last=False)
        stage.num_stages, stage.stage_index = groups * interleave, group + number * groups
        stages.append(stage)
    schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda output, target: None)
    actions = [action for action in schedule.pipeline_order[group] if action is not None]
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    return [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions]


@pytest.mark.parametrize(("groups", "interleave"), [(2, 2), (3, 2), (4, 3), (8, 2)])
def test_the_order_is_that_of_pytorchs_own_pipelines(groups, interleave):
    for microbatches in range(1, 33):
        if microbatches % max(1, microbatches // groups):
            continue  # PyTorch refuses blocks of different sizes
        for group, actions in enumerate(interleaved(groups, microbatches, interleave)):
            ours = [(a.kind, a.stage, a.microbatch) for a in actions]
            assert ours == order_of_pytorch(groups, group, interleave, microbatches)
