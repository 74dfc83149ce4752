from __future__ import annotations

import pytest

from spatialdl.comm import trace


@pytest.fixture(autouse=True)
def stopped():
    yield
    trace.stop()


def test_nothing_is_recorded_unless_asked_for():
    with trace.span("compute", "before"):
        pass
    assert not trace.enabled()
    assert (trace.take(), trace.stop()) == ([], [])


def test_spans_lie_in_each_other_and_end_in_their_order():
    trace.start()
    with trace.span("compute", "outer", 7), trace.span("halo", "inner"):
        pass
    inner, outer = trace.take()
    assert (inner.kind, inner.name, inner.detail) == ("halo", "inner", None)
    assert (outer.kind, outer.name, outer.detail) == ("compute", "outer", 7)
    assert 0 <= outer.start <= inner.start <= inner.end <= outer.end
    assert trace.take() == []


def test_stop_gives_the_rest_and_ends_it():
    trace.start()
    with trace.span("reduce", "sum"):
        pass
    assert [span.name for span in trace.stop()] == ["sum"]
    with trace.span("reduce", "more"):
        pass
    assert trace.take() == []


def test_a_span_ends_with_an_error_too():
    trace.start()
    with pytest.raises(KeyError), trace.span("compute", "broken"):
        raise KeyError
    assert [span.name for span in trace.take()] == ["broken"]


def test_computing_is_over_when_the_device_has_settled():
    settled = []
    trace.start(lambda: settled.append(len(trace.take())))
    with trace.span("halo", "talk"):
        pass
    with trace.span("compute", "work"):
        pass
    assert settled == [1]


def test_waiting_for_items_is_recorded_one_by_one():
    trace.start()
    assert list(trace.each("data", "next", "abc")) == ["a", "b", "c"]
    assert [span.kind for span in trace.take()] == ["data"] * 4  # the last finds the end


@pytest.fixture
def counting():
    trace.count()
    yield
    trace.stop_counting()


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_moment_counts_once_for_the_outermost_wait(recorded, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trace.time, "perf_counter", lambda: now[0])
    if recorded:
        trace.start()
    with trace.span("compute", "work"):
        now[0] += 100
        with trace.span("hand-over", "outer"):
            now[0] += 1
            with trace.span("halo", "inner"):
                now[0] += 2
        with trace.span("halo", "alone"):
            now[0] += 4
    assert trace.counted() == {"halo": 4, "hand-over": 3, "reduce": 0, "data": 0}
    assert trace.counted() == dict.fromkeys(trace.WAITS, 0)
    assert len(trace.take()) == (4 if recorded else 0)


@pytest.mark.usefixtures("counting")
def test_a_wait_that_fails_has_ended():
    with pytest.raises(KeyError), trace.span("halo", "broken"):
        raise KeyError
    with trace.span("reduce", "next"):
        pass
    assert trace.counted()["reduce"] > 0


def test_nobody_counts_unless_asked_to():
    with trace.span("halo", "talk"):
        pass
    assert (trace.counted(), trace.watched()) == ({}, False)
