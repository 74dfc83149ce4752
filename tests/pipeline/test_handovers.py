"""Lanes of hand-overs, streams of messages without tags as of NCCL: one order on both sides."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.gradients import stage_groups
from spatialdl.pipeline.handovers import MOST_LANES, keeps_order, lanes_of
from spatialdl.pipeline.schedule import make_schedule
from spatialdl.pipeline.shapes import Border, own_samples
from spatialdl.pipeline.simulate import Action, Schedule, actions_of

ONE, TWO = (1, 1), (2, 1)
SIMPLE = [
    (name, Placement(1, grids), microbatches, 1)
    for name in ("gpipe", "1f1b")
    for grids in ((TWO, ONE), (ONE, TWO, ONE), (ONE,) * 4)
    for microbatches in (1, 5)
]
INTERLEAVED = [
    ("interleaved", Placement(1, grids * interleave, interleave), microbatches, 1)
    for grids, interleave in (((TWO, ONE), 2), ((ONE,) * 3, 3))
    for microbatches in (1, 5)
]
MIRRORED = [
    (name, Placement(1, grids, mirrored=True), 2 * times * size, times)
    for name, times in (("mast", 1), ("basic", 1), ("master", 3))
    for grids, size in (((TWO, ONE), 3), ((ONE, ONE, TWO), 1), ((ONE,) * 4, 1))
]
BY_SAMPLES = [
    (name, Placement(1, grids, batch=batch), 5, 1)
    for name in ("gpipe", "1f1b")
    for grids, batch in (((TWO, ONE), (1, 2)), ((ONE,) * 3, (1, 3, 2)))
]
BY_CHANNELS = [
    (name, Placement(1, grids, tensor=tensor), 5, 1)
    for name in ("gpipe", "1f1b")
    for grids, tensor in (((TWO, ONE), (1, 3)), ((ONE, TWO), (3, 1)), ((ONE,) * 3, (1, 4, 2)))
]
BY_CHANNELS.append(("mast", Placement(1, (ONE,) * 3, mirrored=True, tensor=(2,) * 3), 4, 1))
CASES = SIMPLE + INTERLEAVED + MIRRORED + BY_SAMPLES + BY_CHANNELS


def name_of(case: tuple[str, Placement, int, int]) -> str:
    name, placement, microbatches, _ = case
    return f"{name}-{placement.describe()}-m{microbatches}"


def borders_of(placement: Placement) -> list[Border]:
    """Between neighbours, and of what skips a stage, as far as there are lanes for them."""
    found = [Border(stage, stage + 1) for stage in range(placement.stages - 1)]
    return found + [Border(stage, stage + 2) for stage in range(min(4, placement.stages - 2))]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_both_ends_of_a_lane_come_to_its_messages_in_one_order(
    case: tuple[str, Placement, int, int],
) -> None:
    """In training and in evaluation, also where some ranks have no samples, or a micro-batch."""
    name, placement, microbatches, times = case
    schedule = make_schedule(name, placement, microbatches, times)
    lanes = lanes_of(placement, schedule, borders_of(placement), 0)
    assert lanes
    for lists in (schedule.train, schedule.evaluate):
        assert keeps_order(lists)
        todo = [actions_of(rank, placement, lists) for rank in range(placement.world_size)]
        for samples in ([3] * microbatches, [(m + 1) % 3 for m in range(microbatches)]):
            for (copy, border, direction, pair), ranks in lanes.items():
                sides = [
                    placement.ranks(stage, 0, copy, tensor)
                    for stage, tensor in zip(border, pair, strict=True)
                ]
                assert [*sides[0], *sides[1]] == ranks
                for (m, left), (n, right) in product(*(enumerate(side) for side in sides)):
                    orders = [
                        [
                            a.microbatch
                            for a in todo[rank]
                            if (a.kind, a.stage, a.copy) == (direction, stage, copy)
                            and own_samples(placement, border.giver, m, samples[a.microbatch])
                            and own_samples(placement, border.taker, n, samples[a.microbatch])
                        ]
                        for rank, stage in zip((left, right), border, strict=True)
                    ]
                    assert orders[0] == orders[1]


def test_what_overtakes_has_no_lanes() -> None:
    placement = Placement(1, (ONE, ONE))
    forwards = [[Action("forward", stage, m) for m in range(2)] for stage in range(2)]
    crossed = [forwards[0], forwards[1][::-1]]
    assert lanes_of(placement, Schedule(forwards, forwards, 2), borders_of(placement), 0)
    for train, evaluate in ((crossed, forwards), (forwards, crossed)):
        schedule = Schedule(train, evaluate, 2)
        assert not lanes_of(placement, schedule, borders_of(placement), 0)


def test_each_direction_of_each_border_of_each_copy_has_a_lane() -> None:
    """Those of a replica; senders come first, whichever way gradients go."""
    placement = Placement(2, (TWO, ONE), mirrored=True)
    schedule = make_schedule("basic", placement, 2)
    border = Border(0, 1)
    assert lanes_of(placement, schedule, [border], 1) == {
        (0, border, "forward", (0, 0)): [3, 4, 5],
        (0, border, "backward", (0, 0)): [3, 4, 5],
        (1, border, "forward", (0, 0)): [5, 4, 3],
        (1, border, "backward", (0, 0)): [5, 4, 3],
    }


def test_ranks_that_divide_channels_give_and_get_each_thing_once() -> None:
    placement = Placement(1, (ONE, ONE), tensor=(2, 3))
    schedule = make_schedule("gpipe", placement, 2)
    border = Border(0, 1)
    assert lanes_of(placement, schedule, [border], 0) == {
        (0, border, "forward", (0, 0)): [0, 2],
        (0, border, "forward", (1, 1)): [1, 3],
        (0, border, "forward", (0, 2)): [0, 4],
        (0, border, "backward", (0, 0)): [0, 2],
        (0, border, "backward", (1, 1)): [1, 3],
    }


def test_ranks_that_hold_both_stages_need_tags_and_so_do_too_many_borders() -> None:
    placement = Placement(1, (ONE,) * 4, 2)
    schedule = make_schedule("interleaved", placement, 4)
    borders = borders_of(placement)
    assert Border(0, 2) in borders
    assert {border for _, border, *_ in lanes_of(placement, schedule, borders, 0)} == {
        Border(stage, stage + 1) for stage in range(3)
    }
    stages = MOST_LANES // 2 + 2
    placement = Placement(1, (ONE,) * stages, stages // 2)
    schedule = make_schedule("interleaved", placement, 2)
    borders = [Border(stage, stage + 1) for stage in range(stages - 1)]
    assert len(lanes_of(placement, schedule, borders[:-1], 0)) == MOST_LANES
    assert not lanes_of(placement, schedule, borders, 0)


# --- stage groups


FIRST = SimpleNamespace(channels=0)  # a mesh


def test_ranks_with_two_stages_meet_in_one_order():
    """A rank has its stages copy by copy, another one the other way round: they would hang."""
    asked = []
    comm = SimpleNamespace(subset=lambda ranks: asked.append(ranks) or len(asked))
    placement = Placement(1, (ONE,) * 4, mirrored=True)
    for stages in ((1, 2), (2, 1)):
        asked.clear()
        stage_groups(placement, dict.fromkeys(stages, FIRST), comm)
        assert asked == [[1, 2], [1, 2]]
    placement = Placement(1, (TWO, ONE), mirrored=True)
    found = stage_groups(placement, dict.fromkeys((1, 0), FIRST), comm)
    assert asked[2:] == [[0, 1, 2], [0, 2]]
    assert list(found) == [0, 1]
