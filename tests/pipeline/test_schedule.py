"""The order of actions: what was published about it, and what is refused."""

from __future__ import annotations

import re
from itertools import product

import pytest

from spatialdl.layout.placement import Placement
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
)
from spatialdl.pipeline.simulate import Schedule, StageSeconds, simulate

SIMPLE = {"gpipe": gpipe, "1f1b": one_f_one_b}


@pytest.mark.parametrize("name", SCHEDULES + GEMS)
@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_every_stage_sees_every_microbatch_once_in_one_copy_and_in_order(name, part):
    """Gradients are added up in the order of one process; what deadlocks is not simulated."""
    for groups, microbatches in product((1, 2, 3, 8), (1, 2, 3, 12)):
        if (groups == 1 and name not in SIMPLE) or (name in GEMS and microbatches % 2):
            continue
        interleave = 3 if name == "interleaved" else 1
        stages = groups * interleave
        placement = Placement(1, ((1, 1),) * stages, interleave, name in GEMS)
        lists = getattr(make_schedule(name, placement, microbatches), part)
        simulate(lists, StageSeconds.even(stages))
        done = [(a.kind, a.stage, a.microbatch) for actions in lists for a in actions]
        kinds = ("forward", "backward") if part == "train" else ("forward",)
        assert sorted(done) == sorted(product(kinds, range(stages), range(microbatches)))
        copies = {(a.microbatch, a.copy) for actions in lists for a in actions}
        assert len(copies) == microbatches
        for group, actions in enumerate(lists):
            for position in placement.positions(group):
                own = [a for a in actions if (a.stage, a.copy) == (position.stage, position.copy)]
                for kind in kinds:
                    numbers = [a.microbatch for a in own if a.kind == kind]
                    assert numbers == sorted(numbers)
            held = {(p.stage, p.copy) for p in placement.positions(group)}
            assert {(a.stage, a.copy) for a in actions} <= held


def test_names_make_the_schedules_of_their_functions() -> None:
    stages, mirrored = ((1, 1),) * 2, Placement(1, ((1, 1),) * 2, 1, True)
    for name, function in SIMPLE.items():
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
            "unknown schedule mast for this layout: take one of gpipe, 1f1b, interleaved",
        ),
        (
            *("mast", Placement(1, ((1, 1),) * 2, 1, True), 2),
            "times=2 is for parallel.gems.variant=master, not for mast",
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


# --- what was published


def test_interleaved_waits_and_holds_as_was_published():
    """Narayanan et al. 2021, section 2.2.2: bubbles are shorter by the number of stages a rank."""
    for groups, interleave, microbatches in product((1, 2, 3, 8), (1, 2, 3, 4), range(1, 17)):
        lists = interleaved(groups, microbatches, interleave)
        timeline = simulate(lists, StageSeconds.even(groups * interleave))  # nobody waits for ever
        if microbatches % groups == 0:
            expected = (groups - 1) / (interleave * microbatches + groups - 1)
            assert timeline.bubble == pytest.approx(expected)
            for group in range(groups):  # those of the warm-up and one more
                warm_up = (interleave - 1) * groups + 2 * (groups - 1 - group)
                assert timeline.peak_held[group] == min(warm_up + 1, microbatches * interleave)


# --- GEMS

GROUPS = (1, 2, 3, 8)


def drawn(lists):
    """A row a group; digits are stages, a second copy has primes, a backward takes two units."""
    timeline = simulate(lists, StageSeconds.even(len(lists)))
    rows = []
    for spans in timeline.spans:
        row = [". "] * int(timeline.seconds)
        for action, start, end in spans:
            name = f"{action.kind[0].upper()}{action.stage}{chr(39) * action.copy}"
            row[int(start)] = name
            for unit in range(int(start) + 1, int(end)):
                row[unit] = "--"
        rows.append("".join(unit.ljust(3) for unit in row).rstrip())
    return rows


def test_the_pictures_of_gems_are_right():
    assert drawn(mast(3, 2)) == [
        "F0 .  .  .  .  .  .  B0 -- F2'B2'-- .  .  .  .",
        ".  F1 .  .  .  B1 -- F1'.  .  .  .  B1'-- .  .",
        ".  .  F2 B2 -- F0'.  .  .  .  .  .  .  .  B0'--",
    ]
    assert drawn(basic(3, 2)) == [
        "F0 .  .  F2'B2'-- .  B0 -- .  .",
        ".  F1 F1'.  .  B1 -- B1'-- .  .",
        "F0'.  F2 B2 -- .  .  .  .  B0'--",
    ]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("times", [1, 2, 5, 16])
def test_mast_waits_as_long_as_was_published_and_holds_one_micro_batch(groups, times):
    """Li, Hoefler 2021, table 2: (P - 1) / (P + 1/2) of the time, in the long run."""
    chunks = 2 * times
    timeline = simulate(mast(groups, chunks, times), StageSeconds.even(groups))
    first, each_more = 3 * groups, 2 * groups + 1
    assert timeline.seconds == first + (chunks - 1) * each_more
    assert 1 - 3 / each_more == pytest.approx((groups - 1) / (groups + 0.5))
    assert set(timeline.peak_held) == {1}


@pytest.mark.parametrize("groups", GROUPS)
def test_with_gems_nobody_waits_for_ever_and_no_more_is_held_than_said(groups):
    for microbatches in range(2, 25):
        for times in range(1, microbatches // 2 + 1):
            if microbatches % (2 * times):
                continue
            size = microbatches // (2 * times)
            costs = StageSeconds.even(groups)
            assert max(simulate(mast(groups, microbatches, times), costs).peak_held) == size
            both = simulate(basic(groups, microbatches, times), costs)
            assert max(both.peak_held) <= 2 * size
            assert both.seconds <= simulate(mast(groups, microbatches, times), costs).seconds
            simulate(both_forwards(groups, microbatches, times), costs)


@pytest.mark.parametrize("make", [mast, basic, both_forwards])
def test_micro_batches_that_cannot_be_dealt_out_are_refused(make):
    with pytest.raises(
        ValueError, match=r"a multiple of 4: parallel.microbatches=6 is not, take 8"
    ):
        make(3, 6, 2)
