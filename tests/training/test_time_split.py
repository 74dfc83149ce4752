from __future__ import annotations

import pytest

from spatialdl.comm import trace
from spatialdl.training import time_split as module
from spatialdl.training.time_split import COUNTS, PARTS, TimeSplit


@pytest.fixture
def clock(monkeypatch):
    """Clock controlled by the test."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    trace.count()
    yield now
    trace.stop_counting()


def wait(clock: list[float], kind: trace.Kind, seconds: float) -> None:
    with trace.span(kind, "a wait"):
        clock[0] += seconds


def test_a_step_is_what_it_waits_for_and_computing(clock):
    split = TimeSplit()
    split.restart()
    wait(clock, "data", 1.0)
    with trace.span("compute", "forward"):
        clock[0] += 5.0
        wait(clock, "halo", 2.0)
    wait(clock, "reduce", 0.5)
    own = split.own()
    assert own == pytest.approx([8.5, 2.0, 0.0, 0.5, 1.0])
    split.note(own, ranks=1)
    assert split.last == pytest.approx(
        {"compute": 5 / 8.5, "halo": 2 / 8.5, "hand_over": 0, "reduce": 0.5 / 8.5, "data": 1 / 8.5}
    )
    assert sum(split.last.values()) == pytest.approx(1)


def test_what_was_between_steps_belongs_to_none(clock):
    split = TimeSplit()
    split.restart()
    wait(clock, "reduce", 7.0)
    clock[0] += 9.0
    split.restart()
    clock[0] += 1.0
    assert split.own() == pytest.approx([1.0, 0, 0, 0, 0])


def test_the_summary_is_a_mean_over_ranks_and_leaves_the_first_step_out():
    split = TimeSplit()
    assert split.summary() == {}
    split.note([100.0, 0, 0, 0, 100.0], ranks=2)
    assert split.summary()["data"] == 1.0
    split.note([2.0, 1.0, 0, 0, 0], ranks=2)
    split.note([6.0, 1.0, 0, 0, 2.0], ranks=2)
    found = split.summary()
    assert found.pop("seconds_per_step") == pytest.approx(2.0)
    assert tuple(found) == PARTS
    assert found == pytest.approx(
        {"compute": 0.5, "halo": 0.25, "hand_over": 0, "reduce": 0, "data": 0.25}
    )


@pytest.mark.parametrize("counts", [False, True])
def test_so_many_numbers_are_added_up(counts):
    if counts:
        trace.count()
    assert len(TimeSplit().own()) == COUNTS
    trace.stop_counting()
