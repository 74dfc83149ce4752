from __future__ import annotations

import pytest

from spatialdl.pipeline.schedule import basic, both_forwards, gpipe, mast
from spatialdl.pipeline.simulate import StageSeconds, simulate

GROUPS = range(1, 9)


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


def test_the_picture_in_the_documentation_is_right():
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
def test_nobody_waits_for_ever_and_no_more_is_held_than_said(groups):
    for microbatches in range(2, 33):
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


def test_two_groups_that_do_both_copies_at_once_never_wait():
    """Layer parallelism, or a pipeline of the same micro-batches, does."""
    for microbatches in range(2, 33, 2):
        assert simulate(basic(2, microbatches), StageSeconds.even(2)).bubble == 0
        assert simulate(gpipe(2, microbatches), StageSeconds.even(2)).bubble > 0


@pytest.mark.parametrize("make", [mast, basic, both_forwards])
def test_micro_batches_that_cannot_be_dealt_out_are_refused(make):
    with pytest.raises(
        ValueError, match=r"a multiple of 4: parallel.microbatches=6 is not, take 8"
    ):
        make(3, 6, 2)
