from __future__ import annotations

import re
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.action import Action, Schedule
from spatialdl.pipeline.schedule import (
    GEMS,
    SCHEDULES,
    basic,
    both_forwards,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    mast,
    one_f_one_b,
    zero_bubble,
)
from spatialdl.pipeline.simulate import StageSeconds, simulate

SIMPLE = {"gpipe": gpipe, "1f1b": one_f_one_b}
SHAPES = [(stages, microbatches) for stages in (1, 2, 3, 8) for microbatches in (1, 2, 3, 8, 32)]


def test_gpipe_is_all_forwards_then_all_backwards():
    assert gpipe(2, 2) == [
        [Action(kind, stage, m) for kind in ("forward", "backward") for m in (0, 1)]
        for stage in (0, 1)
    ]


def test_1f1b_holds_as_many_as_stages_are_to_come():
    first, last = one_f_one_b(2, 3)
    assert "".join(f"{a.kind[0]}{a.microbatch} " for a in first) == "f0 f1 b0 f2 b1 b2 "
    assert "".join(f"{a.kind[0]}{a.microbatch} " for a in last) == "f0 b0 f1 b1 f2 b2 "


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_stage_does_every_microbatch_once_forward_then_backward(name, stages, microbatches):
    lists = SIMPLE[name](stages, microbatches)
    assert len(lists) == stages
    for stage, actions in enumerate(lists):
        assert {action.stage for action in actions} == {stage}
        assert len(set(actions)) == len(actions) == 2 * microbatches
        for m in range(microbatches):
            forward, backward = (
                actions.index(Action(k, stage, m)) for k in ("forward", "backward")
            )
            assert forward < backward


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_gradients_are_added_up_in_the_order_of_one_process(name, stages, microbatches):
    for actions in SIMPLE[name](stages, microbatches):
        backwards = [action.microbatch for action in actions if action.kind == "backward"]
        assert backwards == list(range(microbatches))


@pytest.mark.parametrize("name", SCHEDULES + GEMS)
@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_every_stage_sees_every_microbatch_once_in_one_copy(name, part):
    for groups in (2, 3, 8):
        interleave = 3 if name == "interleaved" else 1
        stages = groups * interleave
        placement = Placement(1, ((1, 1),) * stages, interleave, name in GEMS)
        schedule = make_schedule(name, placement, microbatches=12)
        lists = getattr(schedule, part)
        simulate(lists, StageSeconds.even(stages))
        done = [(a.kind, a.stage, a.microbatch) for actions in lists for a in actions]
        kinds = ("forward", "backward") if part == "train" else ("forward",)
        kinds += ("weight",) * (part == "train" and name == "zero_bubble")
        assert sorted(done) == sorted(
            (kind, stage, m) for kind in kinds for stage in range(stages) for m in range(12)
        )
        copies = {(a.microbatch, a.copy) for actions in lists for a in actions}
        assert len(copies) == 12
        for group, actions in enumerate(lists):
            held = {(p.stage, p.copy) for p in placement.positions(group)}
            assert {(a.stage, a.copy) for a in actions} == held


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_evaluation_has_forwards_only(stages, microbatches):
    assert forward_only(stages, microbatches) == [
        [Action("forward", stage, m) for m in range(microbatches)] for stage in range(stages)
    ]


def order_of_pytorch(kind, stages, stage, microbatches):
    """What a schedule of torch.distributed.pipelining has a stage do, run with a stage of paper."""
    done = []
    paper = MagicMock(num_stages=stages, stage_index=stage, is_last=False)
    for messages in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(paper, f"get_{messages}_ops").return_value = []
    paper.forward_one_chunk.side_effect = lambda m, *args, **kwargs: done.append(("forward", m))
    paper.backward_one_chunk.side_effect = lambda m, *args, **kwargs: done.append(("backward", m))
    schedule = kind(paper, microbatches, loss_fn=lambda output, target: None)
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return done


@pytest.mark.parametrize(("name", "kind"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_the_order_is_that_of_pytorchs_own_pipelines(name, kind, stages, microbatches):
    if microbatches < stages and name == "1f1b":
        pytest.skip("PyTorch's takes at least as many micro-batches as stages")
    for stage, actions in enumerate(SIMPLE[name](stages, microbatches)):
        expected = order_of_pytorch(kind, stages, stage, microbatches)
        assert [(action.kind, action.microbatch) for action in actions] == expected


def test_names_make_the_schedules_of_their_functions() -> None:
    stages, mirrored = ((1, 1),) * 2, Placement(1, ((1, 1),) * 2, 1, True)
    for name, function in {**SIMPLE, "zero_bubble": zero_bubble}.items():
        made = make_schedule(name, Placement(1, stages), 3)
        assert made == Schedule(function(2, 3), forward_only(2, 3), 3)
    made = make_schedule("interleaved", Placement(1, stages * 2, 2), 4)
    assert made == Schedule(interleaved(2, 4, 2), forward_only(2, 4, 2), 4)
    for name, train in [("basic", basic(2, 4)), ("mast", mast(2, 4)), ("master", mast(2, 8, 2))]:
        times = 2 if name == "master" else 1
        made = make_schedule(name, mirrored, 4 * times, times)
        assert made == Schedule(train, both_forwards(2, 4 * times, times), 4 * times)


@pytest.mark.parametrize(
    ("name", "placement", "times", "said"),
    [
        (
            *("mast", Placement(1, ((1, 1),) * 2), 1),
            "unknown schedule mast for this layout: take one of gpipe, 1f1b, zero_bubble, "
            "interleaved",
        ),
        (
            *("mast", Placement(1, ((1, 1),) * 2, 1, True), 2),
            "parallel.gems.times=2 is for parallel.gems.variant=master, not for mast",
        ),
        (
            *("gpipe", Placement(1, ((1, 1),) * 4, 2), 1),
            "parallel.schedule=gpipe with parallel.interleave=2: ranks that hold several stages "
            "need parallel.schedule=interleaved, which is for them only",
        ),
        (
            *("interleaved", Placement(1, ((1, 1),) * 2, 2), 1),
            "a layout of 2 stages on one group of ranks has no other group to alternate with: "
            "take more stages",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    name: str, placement: Placement, times: int, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        make_schedule(name, placement, 4, times)
