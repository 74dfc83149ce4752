from __future__ import annotations

import pytest

from spatialdl.pipeline.schedule import SCHEDULES, Action, forward_only, gpipe

SHAPES = [(1, 1), (1, 4), (3, 1), (3, 4)]


def test_gpipe_is_all_forwards_then_all_backwards():
    assert gpipe(2, 2) == [
        [Action(kind, stage, m) for kind in ("forward", "backward") for m in (0, 1)]
        for stage in (0, 1)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_stage_does_every_microbatch_once_forward_then_backward(name, stages, microbatches):
    lists = SCHEDULES[name](stages, microbatches)
    assert len(lists) == stages
    for stage, actions in enumerate(lists):
        assert {action.stage for action in actions} == {stage}
        assert len(set(actions)) == len(actions) == 2 * microbatches
        for m in range(microbatches):
            forward, backward = (
                actions.index(Action(k, stage, m)) for k in ("forward", "backward")
            )
            assert forward < backward


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_gradients_are_added_up_in_the_order_of_one_process(name, stages, microbatches):
    for actions in SCHEDULES[name](stages, microbatches):
        backwards = [action.microbatch for action in actions if action.kind == "backward"]
        assert backwards == list(range(microbatches))


@pytest.mark.parametrize("make", [*SCHEDULES.values(), forward_only])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_no_stage_waits_for_ever(make, stages, microbatches):
    """An action can run when its neighbour has done the same one; all must come to an end."""
    todo = [list(actions) for actions in make(stages, microbatches)]
    done: set[Action] = set()
    while any(todo):
        ready = [actions for actions in todo if actions and depends_on(actions[0], stages) <= done]
        assert ready, f"nobody can go on: {[actions[:1] for actions in todo]}"
        for actions in ready:
            done.add(actions.pop(0))


def depends_on(action: Action, stages: int) -> set[Action]:
    before = action.stage - 1 if action.kind == "forward" else action.stage + 1
    return {action._replace(stage=before)} if 0 <= before < stages else set()


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_evaluation_has_forwards_only(stages, microbatches):
    assert forward_only(stages, microbatches) == [
        [Action("forward", stage, m) for m in range(microbatches)] for stage in range(stages)
    ]
